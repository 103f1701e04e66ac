"""Which run of a job a process belongs to, by what its ring says and by when it lived."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from commwatch_agent.model.runs import (
    ALIVE_NS,
    KnownRun,
    Origin,
    common_id,
    free_name,
    number_of,
    origin_of,
    renamed,
    run_of,
)

S = 10**9
#: A rank of torchrun, which is process 50.
FIRST = Origin("job", 1000, "boot", 0, 0, 4, 1, "1:100:7", "1:50:5", "", "127.0.0.1:29500", 10 * S)


def rank(number: int, **more: Any) -> Origin:
    """Another rank beside the first."""
    return FIRST._replace(**{"rank": number, "process": f"1:{100 + number}:7", **more})


def is_of(*known: Origin, origin: Origin) -> bool:
    """Whether a process belongs to the run of some others."""
    return KnownRun("job", "key", list(known)).fit(origin) > 0


ENDED: dict[str, Any] = {"until_ns": 20 * S}
LATER: dict[str, Any] = {"began_ns": 30 * S}


@pytest.mark.parametrize(
    ("known", "origin"),
    [
        pytest.param(FIRST, rank(1), id="the same launcher"),
        pytest.param(FIRST, rank(1, launcher="1:51:5"), id="a shell script for each rank"),
        pytest.param(FIRST, rank(1, launcher="2:51:5", space=2), id="a container for each rank, on the network of the node"),
        pytest.param(FIRST._replace(rendezvous="head:1"), rank(1, launcher="", space=2, rendezvous="head:1"), id="a container for each rank"),
        pytest.param(FIRST._replace(rendezvous=""), rank(1, rendezvous=""), id="no rendezvous known"),
        pytest.param(FIRST._replace(rendezvous=""), rank(1, launcher="1:60:9", rendezvous=""), id="launchers that meet nowhere known"),
        pytest.param(FIRST, rank(1, launcher="1:60:9", rendezvous=""), id="one of which it is not known where it meets"),
        pytest.param(FIRST, rank(1, launcher="1:60:9", rendezvous="node1:29500"), id="two names of this node"),
        pytest.param(FIRST._replace(launcher="", rendezvous=""), rank(1, launcher="", rendezvous=""), id="nothing known"),
        pytest.param(FIRST, rank(1, launcher=FIRST.process), id="the first rank has started the other"),
        pytest.param(rank(1, launcher=FIRST.process, rendezvous=""), FIRST._replace(rendezvous=""), id="and came later"),
        pytest.param(FIRST._replace(rendezvous=""), rank(0, process="1:200:9", launcher=FIRST.process, rendezvous=""), id="a forked child"),
        pytest.param(FIRST, FIRST._replace(rendezvous="127.0.0.1:4"), id="the same process, another group"),
        pytest.param(FIRST._replace(**ENDED), rank(0, process="1:200:9", restart=1, **LATER), id="a restart"),
        pytest.param(FIRST._replace(**ENDED), rank(0, process="1:200:9", restart=1, rendezvous="127.0.0.1:4", **LATER), id="a restart at another port"),
        pytest.param(FIRST, rank(0, process="1:200:9", restart=1), id="a restart beside one that has not ended yet"),
        pytest.param(
            FIRST._replace(**ENDED), rank(0, process="1:200:9", launcher="1:60:9", restart=1, **LATER), id="a restart of a script for each rank"
        ),
        pytest.param(FIRST._replace(restart=1, **LATER), rank(0, process="1:99:7", **ENDED), id="an agent that comes late and reads the restart first"),
        pytest.param(
            FIRST._replace(watched="run", **ENDED),
            rank(0, process="1:200:9", launcher="1:60:9", watched="run", rendezvous="127.0.0.1:4", **LATER),
            id="one after the other in one script",
        ),
        pytest.param(FIRST._replace(owner=None), rank(1), id="an owner that is not known"),
        pytest.param(FIRST._replace(launcher="", rendezvous=""), rank(1), id="beside a trainer of which less is known"),
    ],
)  # fmt: skip
def test_belongs(known: Origin, origin: Origin) -> None:
    """Ranks that one launcher has started, over all restarts, and what they have started, are of one run."""
    assert is_of(known, origin=origin)


@pytest.mark.parametrize(
    ("known", "origin"),
    [
        pytest.param(FIRST, rank(0, process="1:200:9", launcher="1:60:9", rendezvous="127.0.0.1:4"), id="two launchers at once"),
        pytest.param(FIRST, rank(1, launcher="1:60:9", rendezvous="127.0.0.1:4"), id="another rank of the second"),
        pytest.param(FIRST, rank(1, rendezvous="127.0.0.1:4"), id="two worlds of one parent"),
        pytest.param(FIRST._replace(watched="run"), rank(1, watched="run", rendezvous="127.0.0.1:4"), id="two worlds of one script at once"),
        pytest.param(FIRST._replace(rendezvous=""), rank(0, process="1:200:9", rendezvous=""), id="two live ranks 0 of one parent"),
        pytest.param(FIRST._replace(rendezvous=""), rank(0, process="1:200:9", launcher="1:60:9", rendezvous=""), id="two live ranks 0"),
        pytest.param(FIRST._replace(rendezvous=""), rank(1, launcher="1:60:9", rendezvous="", world_size=2), id="worlds of two sizes"),
        pytest.param(FIRST._replace(rendezvous="node1:29500"), rank(1, rendezvous="node2:29500"), id="the same port of two nodes"),
        pytest.param(FIRST, rank(0, process="2:200:9", launcher="", space=2), id="localhost in two containers"),
        pytest.param(FIRST._replace(rendezvous="file:/a"), rank(1, rendezvous="file:/b"), id="two files"),
        pytest.param(FIRST._replace(**ENDED), rank(0, process="1:200:9", launcher="1:60:9", **LATER), id="another day, the same port"),
        pytest.param(FIRST._replace(**ENDED), rank(0, process="1:200:9", **LATER), id="the same shell, another time"),
        pytest.param(FIRST._replace(restart=2, **ENDED), rank(0, process="1:200:9", launcher="1:60:9", restart=1, **LATER), id="a restart of a later run"),
        pytest.param(FIRST, rank(1, owner=1001), id="another user"),
        pytest.param(FIRST, rank(1, boot="later"), id="another boot"),
        pytest.param(FIRST, rank(1, job="other"), id="another job"),
    ],
)  # fmt: skip
def test_does_not_belong(known: Origin, origin: Origin) -> None:
    """Processes of another launcher, user, boot, or time are of another run, also under the same name and at the same port."""
    assert not is_of(known, origin=origin)


def test_any_order() -> None:
    """Two runs of one name are apart in whatever order their rings are read."""
    second = [
        rank(number, process=f"1:{200 + number}:9", launcher="1:60:9", rendezvous="127.0.0.1:4", began_ns=12 * S)
        for number in (0, 1)
    ]
    for order in permutations([FIRST, rank(1), *second]):
        runs: list[KnownRun] = []
        for origin in order:
            found = run_of(origin, runs)
            if found is None:
                runs.append(KnownRun("job", str(len(runs)), [origin]))
            else:
                found.origins.append(origin)
        assert sorted(sorted(origin.process for origin in run.origins) for run in runs) == [
            ["1:100:7", "1:101:7"],
            ["1:200:9", "1:201:9"],
        ]


def test_of_several() -> None:
    """Of two runs that a restart could be of, it is of the later one."""
    earlier, later = FIRST._replace(**ENDED), FIRST._replace(began_ns=25 * S, until_ns=28 * S, launcher="1:70:1")
    restart = rank(0, process="1:200:9", launcher="1:60:9", restart=1, **LATER)
    found = run_of(restart, [KnownRun("job", "b", [later]), KnownRun("job", "a", [earlier])])
    assert found is not None
    assert found.key == "b"


def test_sure() -> None:
    """A process that meets nowhere known is of the run of its own launcher, not of one that only lacks its rank."""
    blind = FIRST._replace(rendezvous="")
    first, second = (
        KnownRun("job", "a", [blind]),
        KnownRun("job#2", "b", [rank(0, process="1:200:9", launcher="1:60:9", rendezvous="", began_ns=5 * S)]),
    )
    for launcher, key in ((FIRST.launcher, "a"), ("1:60:9", "b"), ("1:70:9", "a")):
        found = run_of(rank(1, process="1:201:9", launcher=launcher, rendezvous=""), [first, second])
        assert found is not None
        assert found.key == key


def test_live() -> None:
    """A run is live for a process that began before its last one ended."""
    run = KnownRun("job", "key", [FIRST._replace(**ENDED)])
    assert run.is_live(rank(1))
    assert not run.is_live(rank(1, **LATER))
    assert not run.is_live(rank(1, boot="later"))
    assert KnownRun("job", "key", [FIRST._replace(**ENDED), rank(1)]).until_ns == ALIVE_NS


def test_identity() -> None:
    """The origin comes from the ring's identity; a parent outside the container is not known."""
    who = {"job": "job", "restart": 1, "rank": 3, "world_size": 4, "wall_offset_ns": 0, "started_ns": 50 * S}
    more = {"boot_id": "boot", "pid": 7, "pid_namespace": 4, "started_ticks": "1000", "launcher": "6:900"}
    origin = origin_of({**who, **more, "run": "ab", "rendezvous": "node:1"}, 1000)
    assert origin == ("job", 1000, "boot", 1, 3, 4, 4, "4:7:1000", "4:6:900", "ab", "node:1", 10 * S, ALIVE_NS)
    assert origin_of({**who, **more, "launcher": "0:"}, 1000).launcher == ""
    assert origin_of(who, None, 9)[4:] == (3, 4, 0, "", "", "", "", 50 * S, 9)


def test_common_id() -> None:
    """What all nodes of a run share is the id in the job's store; where all ranks are on one node, that of the run there; else it is not known."""
    assert common_id("key", ["", "shared"], 4, 2, {0, 1}) == "shared"
    assert common_id("key", ["first", "restarted", ""], 4, 2, {0, 1}) == "restarted"
    assert common_id("key", [], 4, 4, {0}) == "key"
    assert common_id("key", [""], 2, None, {0, 1}) == "key"
    assert common_id("key", [""], 4, 2, {0, 1}) == ""
    assert common_id("key", [], 4, None, {0, 1}) == ""


def test_names() -> None:
    """A run has the job's name, or the first number that is free."""
    assert free_name("a", set()) == "a"
    assert free_name("a", {"a", "a#3"}) == "a#2"
    assert free_name("a#2", {"a#2"}) == "a#2#2"


def test_numbers() -> None:
    """A name has the number after its last #, if that is one; another node can report any text."""
    names = ("a", "a#2", "a#17", "a#1", "a#0", "a#02", "a#x", "a#100", "#", "2")
    assert [number_of(name) for name in names] == [1, 2, 17, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("here", "there", "changed"),
    [
        ({"1": "a", "2": "a#2"}, {}, {}),
        ({"1": "a"}, {"1": ["a"], "2": ["a#2"]}, {}),
        ({"2": "a"}, {"2": ["a", "a#2"]}, {"a": "a#2"}),
        ({"2": "a#3"}, {"2": ["a#2"]}, {}),
        ({"1": "a", "2": "a#2"}, {"1": ["a#2"], "2": ["a"]}, {"a": "a#3"}),
        ({"1": "a", "2": "b"}, {"1": ["a#2"], "2": ["b#4"]}, {"a": "a#2", "b": "b#4"}),
    ],
)
def test_one_name_on_all_nodes(here: dict[str, str], there: dict[str, list[str]], changed: dict[str, str]) -> None:
    """A run takes the highest of its numbers on other nodes, or the next that is free here."""
    assert renamed(here, set(here.values()), there) == changed


def test_nodes_agree() -> None:
    """Nodes that tell each other their names come to one name for each run, and to another one for each, in whatever order they began."""
    nodes = [{"1": "a", "2": "a#2", "3": "a#3"}, {"3": "a", "1": "a#2"}, {"2": "a", "3": "a#2"}]
    for _ in range(5):
        for node in nodes:
            there: dict[str, list[str]] = {}
            for other in nodes:
                for run, name in other.items():
                    there.setdefault(run, []).append(name)
            changed = renamed(node, set(node.values()), there)
            node.update({run: changed.get(name, name) for run, name in node.items()})
    names = {run: {node[run] for node in nodes if run in node} for run in "123"}
    assert all(len(of_run) == 1 for of_run in names.values())
    assert len(set.union(*names.values())) == 3
