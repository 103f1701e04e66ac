"""Ranks that are forked, ranks that fork, ranks that leave without ``atexit``, and groups made without ``init_process_group``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire import ring
from commwatch.wire.ring_reader import RingReader
from tests.e2e.torchjob import JOBS, RankRecords, alone, preforked, read_rings, results
from tests.helpers import BOTH_HOOKS, PATIENCE_S, clean_env

STEPS = 4


def forking(directory: Path, start: str, leave: str, probe: str) -> subprocess.CompletedProcess[str]:
    """Run ``jobs/forking.py`` to its end."""
    # A fork server starts Python anew; the other ranks are forks in any case.
    anew = [sys.executable, str(JOBS / "forking.py"), start, leave]
    return subprocess.run(
        anew if start == "forkserver" else preforked("forking.py", 2 if start == "torchrun" else 0, start, leave),
        env=clean_env(COMMWATCH=probe, COMMWATCH_DIR=str(directory), COMMWATCH_JOB="forking"),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )


def closed(directory: Path) -> list[bool]:
    """For each ring: whether its process has ended, and well."""
    found = []
    for path in sorted(directory.glob("rings/*.ring")):
        reader = RingReader(path)
        found.append(reader.counter(ring.CLOSED) > 0 and not reader.alive())
        reader.close()
    return found


def counted(rank: RankRecords) -> Counter[str]:
    """Operations by name."""
    return Counter(map(rank.op, rank.operations))


# -- forks


@cache
def unwatched(start: str, leave: str) -> list[Any]:
    """Losses and exit codes of a run without the probe."""
    with tempfile.TemporaryDirectory() as nowhere:
        done = forking(Path(nowhere), start, leave, "0")
    assert done.returncode == 0, done.stderr[-4000:]
    return results(done.stdout)


@pytest.mark.parametrize(
    ("hook", "start", "leave"),
    [
        ("native", "fork", "return"),
        pytest.param("native", "forkserver", "return", marks=pytest.mark.long),
        ("native", "torchrun", "end"),
        ("python", "fork", "return"),
        ("python", "torchrun", "end"),
    ],
    indirect=["hook"],
)
def test_ranks_that_fork(hook: str, start: str, leave: str, tmp_path: Path) -> None:
    """Forked ranks are recorded whole, each in its own ring that ends well; workers and other children leave none; output, losses
    and exit codes are those of a run without the probe."""
    done = forking(tmp_path, start, leave, "1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "commwatch: " not in done.stderr
    said = results(done.stdout)
    assert said == unwatched("fork" if start == "forkserver" else start, leave)  # they train in the same way
    assert [codes for _, codes in said] == [[7, *[0, 1] * STEPS]] * 2
    ranks = read_rings(tmp_path)
    assert [(rank.rank, rank.identity["world_size"], rank.identity["local_rank"]) for rank in ranks] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    assert len({rank.identity["pid"] for rank in ranks}) == 2
    assert closed(tmp_path) == [True, True]
    for rank in ranks:
        assert (len(rank.marks), rank.lost) == (STEPS, 0)
        assert not any(record.flags & ev.UNALIGNED for record in rank.operations)
        assert {group["name"]: group["ranks"] for group in rank.groups.values()} == {"0": [0, 1]}
    assert counted(ranks[0]) == counted(ranks[1])
    assert counted(ranks[0])["all_reduce"] >= STEPS
    assert len({group["group_id"] for rank in ranks for group in rank.groups.values()}) == 1


@BOTH_HOOKS
def test_a_rank_killed_after_its_group_was_destroyed(hook: str, tmp_path: Path) -> None:
    """A process that destroys its default group and is killed has ended well; one that makes another and is killed has not."""
    killed = alone(tmp_path, "destroyed.py", 1, COMMWATCH_JOB="once")
    again = alone(tmp_path, "destroyed.py", 2, COMMWATCH_JOB="twice")
    assert (killed.returncode, again.returncode) == (-9, -9), (killed.stderr, again.stderr)
    assert closed(tmp_path) == [True, False]


# -- groups without init_process_group


def names(rank: RankRecords) -> Counter[tuple[str, int, bool]]:
    """How many operations each group had: its label, its size, and whether it can be joined with that of other ranks."""
    groups = {small: (group["label"], group["size"], group["aligned"]) for small, group in rank.groups.items()}
    return Counter(groups[record.group] for record in rank.operations)


STRANGERS = {("unnamed", 2, False): 4, ("replicas", 2, False): 2, ("replicas", 4, False): 2}
TRAINING = {("default_pg", 8, True): 5, ("replicas", 2, False): 1}


@BOTH_HOOKS
def test_groups_without_a_default(hook: str, tmp_path: Path) -> None:
    """Groups made without ``init_process_group`` are counted by name and size, never joined; the training after it is recorded in the
    same ring where rank and world were known from the environment."""
    done = alone(tmp_path, "strangers.py", 1, 5, RANK="5", WORLD_SIZE="8")
    assert done.returncode == 0, done.stderr
    assert "commwatch: " not in done.stderr
    (rank,) = read_rings(tmp_path)
    assert (rank.rank, rank.identity["world_size"]) == (5, 8)
    assert names(rank) == Counter(STRANGERS) + Counter(TRAINING)
    assert all(bool(r.flags & ev.UNALIGNED) == (rank.groups[r.group]["label"] != "default_pg") for r in rank.operations)


@BOTH_HOOKS
def test_another_rank_later(hook: str, tmp_path: Path) -> None:
    """Where the environment names no rank, the group's own counts until there is a default group; a ring never names another rank
    than the one it records, so that each rank the process has had gets a ring of its own, and the n-th group stays the n-th."""
    done = alone(tmp_path, "strangers.py", 1, 5, 6, 5, RANK="5", WORLD_SIZE="")
    assert done.returncode == 0, done.stderr
    assert "commwatch: " not in done.stderr
    rings = sorted(read_rings(tmp_path), key=lambda rank: int(rank.identity["started_ns"]))
    assert [(rank.rank, rank.identity["world_size"]) for rank in rings] == [(1, 2), (5, 8), (6, 8), (5, 8)]
    assert names(rings[0]) == Counter(STRANGERS)
    assert all(names(rank) == Counter(TRAINING) for rank in rings[1:])
    assert all(closed(tmp_path))
    defaults = [group["group_id"] for rank in rings for group in rank.groups.values() if group["label"] == "default_pg"]
    assert len(set(defaults)) == 3
