"""Calls of the real NCCL, as recorded on the simulated driver (tests/fixtures/nccl_plugin): nothing is lost, and each duration is right."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from commwatch.probe.native.library import PLUGIN
from tests.collectors.nccl_plugin.conftest import HERE, STRICT, Built

SEQUENCES = sorted((Path(__file__).parents[2] / "fixtures" / "nccl_plugin").glob("*.v*"))
GROUP, COLL, P2P, KERNEL, COLL_API, P2P_API = 1, 2, 4, 64, 1 << 9, 1 << 10
#: Sequences of version 4 have no API calls.
WITH_API = [sequence for sequence in SEQUENCES if sequence.suffix != ".v4"]
#: As in plugin.c.
KEPT = 60


class Event(NamedTuple):
    """A line ``begin``."""

    handle: int
    type: int
    parent: int
    channels: int
    func: str
    elements: int
    timer: int


def events(sequence: Path) -> list[Event]:
    """The recorded events, in their order."""
    found = []
    for line in sequence.read_text().splitlines():
        word, *fields = line.split()
        if word == "begin":
            handle, _, kind, parent, _, channels = map(int, fields[:6])
            found.append(Event(handle, kind, parent, channels, fields[6], int(fields[7]), int(fields[-1])))
    return found


def played(sequence: Path) -> dict[Event, int]:
    """The collectives whose kernels have ended on all channels, with the durations that are played: a thousandth of the recorded ones."""
    words = [line.split() for line in sequence.read_text().splitlines()]
    stopped = {int(word[1]) for word in words if word[0] == "stop"}
    ends = {int(word[1]): int(word[3]) for word in words if word[0] == "state" and int(word[1]) in stopped}
    everything = events(sequence)
    kernels: dict[int, list[Event]] = {}
    for event in everything:
        if event.type == KERNEL:
            kernels.setdefault(event.parent, []).append(event)
    found = {}
    for event in everything:
        mine = kernels.get(event.handle, [])
        if event.type == COLL and len(mine) == event.channels and all(k.handle in ends for k in mine):
            zero = mine[0].timer
            begin = min(int((kernel.timer - zero) / 1000) for kernel in mine)
            found[event] = max((ends[kernel.handle] - zero) // 1000 for kernel in mine) - begin
    return found


def reported_late(sequence: Path) -> set[int]:
    """The operations before whose last end so many others begin that their times may be those of later ones."""
    begun, number, late = 0, dict[int, int](), set[int]()
    operation_of = {event.handle: event.parent for event in events(sequence) if event.type == KERNEL}
    kinds = {event.handle: event.type for event in events(sequence)}
    for line in sequence.read_text().splitlines():
        word, handle, *_ = line.split()
        if word == "begin" and kinds[int(handle)] in (COLL, P2P):
            begun += 1
            number[int(handle)] = begun
        elif word == "stop":
            operation = operation_of.get(int(handle), int(handle))
            if begun - number.get(operation, begun) >= KEPT:
                late.add(operation)
    return late


@pytest.mark.parametrize("sequence", WITH_API, ids=lambda path: path.name)
def test_without_calls(built: Built, sequence: Path) -> None:
    """Without c10d, each operation and each replay goes to the sink once, a collective with its duration."""
    known = played(sequence)
    made = [event for event in events(sequence) if event.type in (COLL, P2P)]
    late = reported_late(sequence)
    ns = {event: -1 if event.handle in late else known.get(event, -1) for event in made}
    expected = Counter(f"op {event.func} {event.elements} {ns[event]}" for event in made)
    unended = sum(event.type == COLL and event not in known for event in made)
    lines = Counter(built.replay(sequence))
    # Those that had not ended when the recording was cut are not reported.
    assert lines <= expected
    assert sum(lines.values()) >= len(made) - unended
    assert len(made) > 10


@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda path: path.name)
def test_within_calls(built: Built, sequence: Path) -> None:
    """Within calls of c10d, each call, and each replay of a captured one, has the duration of its operation; one of messages has none."""
    calls = (COLL_API, P2P_API) if sequence in WITH_API else (GROUP,)
    apis = {event.handle for event in events(sequence) if event.type in calls}
    expected = Counter(f"call {event.parent} {ns}" for event, ns in played(sequence).items() if event.parent in apis)
    assert bool(expected) is (sequence.stem != "messages")
    assert Counter(built.replay(sequence, "calls")) == expected


@pytest.mark.parametrize("version", [4, 5, 6])
def test_recorder(tmp_path: Path, version: int) -> None:
    """The recorder, with which new sequences are made, compiles."""
    command = [
        "gcc",
        *STRICT,
        "-shared",
        f"-DVERSION={version}",
        str(HERE / "recorder.c"),
        "-o",
        str(tmp_path / "r.so"),
    ]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "r.so").stat().st_size > 0
    assert (PLUGIN / "interface.h").exists()
