"""What a trainer calls its groups, kept within bounds."""

from __future__ import annotations

import pytest

from commwatch_agent.model.cells import LATEST_KNOWN, MOST_APART, OTHER_ID
from commwatch_agent.model.names_file import Names, OutputFile
from commwatch_agent.model.shares import Room
from tests.helpers import group_entry


def test_group_announced_again() -> None:
    """Of the groups without totals of their own, the latest names are kept; one that is announced again counts once."""
    names = Names()
    numbers = range(MOST_APART, MOST_APART + LATEST_KNOWN)
    names.learn([group_entry(number) for number in numbers])
    for size in (3, 4, 5):
        names.learn([group_entry(MOST_APART, tuple(range(size)))])
    assert set(names.groups) == {*numbers, OTHER_ID}
    assert names.groups_announced == LATEST_KNOWN


@pytest.mark.parametrize(
    "address",
    [
        "http://node1:9477/api",
        "ftp://node1:9477",
        "http://user@node1:9477",
        "http://node1",
        "http://node1:1\r\nX: y",
        7,
        None,
    ],
)
def test_addresses_of_agents(address: object) -> None:
    """A rank can report scheme, host and port of other agents, and nothing else; a list with anything else is skipped."""
    names = Names()
    names.learn([{"peers": ["http://node1:9477", "https://[fe80::1]:1"]}])
    assert names.peers == ("http://node1:9477", "https://[fe80::1]:1")
    names.learn([{"peers": ["http://node2:9477", address]}])
    assert names.peers == ("http://node1:9477", "https://[fe80::1]:1")


def test_frameworks() -> None:
    """Frameworks are not known until the rank reports them, perhaps none; what is no name of one is skipped."""

    def learned(*reported: object) -> tuple[str, ...] | None:
        names = Names()
        names.learn([{"frameworks": each} for each in reported])
        return names.frameworks

    assert learned() is None
    assert learned([]) == ()
    assert learned(["ddp", "deepspeed"], ["<b>"], [1], "ddp\n", None, 3) == ("ddp", "deepspeed")


def test_destroyed_groups() -> None:
    """A rank can report that it has destroyed a group that it has announced, until the name is dropped; nonsense is skipped."""
    names = Names()
    numbers = range(MOST_APART, MOST_APART + LATEST_KNOWN)
    names.learn([group_entry(0), *(group_entry(number) for number in numbers)])
    names.learn([{"destroyed": number} for number in (0, MOST_APART, MOST_APART - 1, -1, "x", None, 1 << 40)])
    assert names.destroyed == {0, MOST_APART}
    names.learn([group_entry(MOST_APART + LATEST_KNOWN)])
    assert names.destroyed == {0}


def test_output_files() -> None:
    """A rank can report files of its output, a few, each as it was first reported; damaged entries are skipped."""
    names = Names()
    one = {"output": "/log/1", "device": 1, "inode": (1 << 64) - 1, "size": 5}
    for wrong in ({"size": -1}, {"size": 1 << 64}, {"inode": "x"}, {"device": None}, {"output": "x" * 5000}):
        names.learn([{**one, **wrong}])
    names.learn([{"output": "/log/1"}])
    assert not names.outputs
    names.learn([one, {**one, "size": 7}])
    assert names.outputs == (OutputFile("/log/1", (1, (1 << 64) - 1), 5),)
    names.learn([{**one, "inode": inode} for inode in range(10)])
    assert len(names.outputs) == 4


def test_output_files_take_memory() -> None:
    """Where a ring has no room left, files of its output are not kept."""
    names = Names(Room(0).account())
    names.learn([{"output": "/log/1", "device": 1, "inode": 1, "size": 5}])
    assert names.outputs == ()
