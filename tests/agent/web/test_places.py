"""Places that clients share: none keeps the others out, and none goes back and forth."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from commwatch_agent.web.turns import AllTaken, Place, Places, TooManyOfOne


def nothing() -> None:
    """What happens to those that are not looked at."""


def test_bounds() -> None:
    """There are so many places, and a client gets only its number of them."""
    places = Places(4, 3)
    for _ in range(3):
        places.take("a", nothing)
    with pytest.raises(TooManyOfOne):
        places.take("a", nothing)
    places.take("b", nothing)
    with pytest.raises(AllTaken):
        Places(0, 1).take("a", nothing)


def test_newest_of_the_client_with_the_most() -> None:
    """A client without a place gets the newest one of the client with the most; who has lost it can give it back without effect."""
    places, told = Places(4, 4), list[str]()
    mine = [places.take("a", lambda n=n: told.append(f"a{n}")) for n in range(3)]  # type: ignore[misc]
    places.take("b", lambda: told.append("b"))
    places.take("c", nothing)
    assert (told, places.displaced) == (["a2"], 1)
    places.give_back(mine[2])
    with pytest.raises(AllTaken):
        places.take("c", nothing)
    places.give_back(mine[0])
    places.take("c", nothing)


def test_any_order() -> None:
    """In any order of coming and going no client has more than its number, all together not more than there are, each is displaced at
    most once, and a client is refused only where none has two more than it would have."""
    chance, places = Random(49), Places(8, 5)
    held: dict[Place, str] = {}
    gone: Counter[int] = Counter()

    def take(client: str, number: int) -> None:
        mine: list[Place] = []

        def give_way() -> None:
            gone[number] += 1
            del held[mine[0]]

        counts = Counter(held.values())
        try:
            mine.append(places.take(client, give_way))
            held[mine[0]] = client
        except TooManyOfOne:
            assert counts[client] == 5
        except AllTaken:
            assert (counts.total(), max(counts.values()) <= counts[client] + 1) == (8, True)

    for number in range(4000):
        if held and chance.random() < 0.4:
            place = chance.choice(list(held))
            del held[place]
            places.give_back(place)
        else:
            take(chance.choice("aaaabbcdefghij"), number)
        counts = Counter(held.values())
        assert counts.total() <= 8
        assert not counts or max(counts.values()) <= 5
    assert set(gone.values()) == {1}
    assert places.displaced == len(gone)
