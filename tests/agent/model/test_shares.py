"""Room that owners share: none can take all of it."""

from __future__ import annotations

from commwatch_agent.model.shares import Room, fair


def test_no_owner_takes_all() -> None:
    """However much one owner wants, the next one finds three quarters of what is left, and so does the one after that."""
    room, held = Room(1024), list[int]()
    for owner in "abc":
        account = room.account(owner)
        while account.take(1):
            pass
        held.append(account.used)
    assert held == [768, 192, 48]
    assert room.refused == 3


def test_several_accounts_of_one_owner() -> None:
    """Two accounts of an owner get no more than one, and what one of them gives back the other can take."""
    room = Room(100)
    first, second = room.account("a"), room.account("a")
    assert first.take(75)
    assert not second.take(1)
    first.give(30)
    assert (second.take(30), second.take(1)) == (True, False)


def test_units_of_its_own() -> None:
    """An account has some units of its own, even if the shared ones are all taken."""
    room = Room(100, each=10)
    greedy = room.account("a")
    assert greedy.take(85)
    later = [room.account("a") for _ in range(5)]
    assert [account.take(10) for account in later] == [True] * 5
    assert not any(account.take(1) for account in later)


def test_closed() -> None:
    """An account that is closed leaves nothing behind, whatever it took and gave before."""
    room = Room(100, each=10)
    account = room.account("a")
    for before, after in ((0, 40), (40, 5), (5, 60), (60, 300)):
        account.change(before, after)
    assert account.used == 60
    account.close()
    assert (account.used, room.free, room.held("a")) == (0, 100, 0)


def test_fair() -> None:
    """Owners take turns, each with its things in their order."""
    assert fair({"a": [1, 2, 3, 4], "b": [10], "c": [20, 21]}) == [1, 10, 20, 2, 21, 3, 4]
    assert fair(dict[str, list[int]]()) == []
