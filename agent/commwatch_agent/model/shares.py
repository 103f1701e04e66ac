"""Room that many users share: a fixed number of units, of which no owner can take all. Pure.

An owner is the user whose files the units belong to. It may take a unit as long as it holds less than ``_OF_FREE`` times what is free. So
one owner can take three quarters, and the next one always finds three quarters of what is left. Nothing is taken back from an owner
that came earlier, because totals that have been counted must not shrink; instead each account has some units of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

_T = TypeVar("_T")
_Owner = TypeVar("_Owner", bound=Hashable)
#: An owner may hold this many times what is free.
_OF_FREE = 3
#: Owner of an account for which none is named.
NO_OWNER = "no owner"


class Room:
    """Units that accounts share.

    Args:
        size: units in all, without those that accounts have of their own.
        each: units that each account has of its own.
    """

    def __init__(self, size: int, each: int = 0) -> None:
        self.size, self.each = size, each
        #: Units that no account holds, and how often there was no room for something.
        self.free, self.refused = size, 0
        self._held: Counter[Hashable] = Counter()

    def held(self, owner: Hashable) -> int:
        """Return the units that the accounts of an owner hold together, without those of their own."""
        return self._held[owner]

    def hold(self, owner: Hashable, number: int) -> None:
        """Note units that an owner has already."""
        self._held[owner] += number
        self.free -= number

    def account(self, owner: Hashable = NO_OWNER) -> Account:
        """Open an account."""
        return Account(self, owner)

    def move(self, owner: Hashable, number: int) -> bool:
        """Take units for an owner, or give them back if ``number`` is negative; return whether there was room."""
        if number > 0 and (number > self.free or self._held[owner] + number > _OF_FREE * self.free):
            self.refused += 1
            return False
        self.hold(owner, number)
        if not self._held[owner]:
            del self._held[owner]
        return True


class Account:
    """What one part of an owner holds of a ``Room``."""

    __slots__ = ("_room", "owner", "used")

    def __init__(self, room: Room, owner: Hashable) -> None:
        self._room, self.owner, self.used = room, owner, 0

    def take(self, number: int) -> bool:
        """Take units; return False, and take none, if there is no room."""
        beyond = self._beyond(self.used + number) - self._beyond(self.used)
        if beyond and not self._room.move(self.owner, beyond):
            return False
        self.used += number
        return True

    def give(self, number: int) -> None:
        """Give units back."""
        beyond = self._beyond(self.used) - self._beyond(self.used - number)
        if beyond:
            self._room.move(self.owner, -beyond)
        self.used -= number

    def change(self, before: int, after: int) -> bool:
        """Hold ``after`` units where there were ``before``; return False, and change nothing, if there is no room."""
        if after > before:
            return self.take(after - before)
        self.give(before - after)
        return True

    def refuse(self) -> None:
        """Count that there was no room for something, for a reason of the caller's own."""
        self._room.refused += 1

    def close(self) -> None:
        """Give all units back."""
        self.give(self.used)

    def _beyond(self, used: int) -> int:
        return max(0, used - self._room.each)


class Portions:
    """Hands out portions of an amount: half of what is left, at most ``most``, and at least ``least``, also when nothing is left."""

    def __init__(self, amount: int, most: int, least: int) -> None:
        self._left, self._most, self._least = amount, most, least

    def take(self) -> int:
        """Return a portion."""
        portion = max(self._least, min(self._most, self._left // 2))
        self._left -= portion
        return portion

    def give(self, portion: int) -> None:
        """Give a portion back."""
        self._left += portion


def admitted(most: int, held: Iterable[_Owner], wanted: Mapping[_Owner, Sequence[_T]]) -> list[tuple[_Owner, _T]]:
    """Return the things for which there is room, each with its owner: those of different owners in turn, and no owner takes all.

    Args:
        most: number of things in all.
        held: the owner of each thing that is there already.
    """
    room = Room(most)
    for owner in held:
        room.hold(owner, 1)
    pairs = {owner: [(owner, thing) for thing in things] for owner, things in wanted.items()}
    return [pair for pair in fair(pairs) if room.move(pair[0], 1)]


def fair(wanted: Mapping[_Owner, Sequence[_T]]) -> list[_T]:
    """Return all things, one of each owner in turn, those of each owner in their order; no thing is ``None``."""
    return [thing for thing in chain.from_iterable(zip_longest(*wanted.values())) if thing is not None]
