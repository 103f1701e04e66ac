"""Profiles in the trainer: once, over the right steps, and without harm in any circumstances."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler as backend
from torch.profiler import ProfilerActivity, profile, schedule

from commwatch.probe.torch_profile import Profiling
from commwatch.probe.torch_steps import EXPLICIT
from commwatch.wire import profile_files as files
from tests.helpers import NOBODY, PLANTED, needs, small_tmpfs

RANK = 1


class Trainer:
    """A rank without a job: it marks steps on request, and computes between them."""

    def __init__(self, run_dir: Path) -> None:
        self.directory, self.said = files.directory(run_dir), list[str]()
        self.request_path = files.request_path(run_dir, "job")
        self.marks = 0
        self.profiling = self.born()

    def born(self) -> Profiling:
        """The rank begins its life, or a new one."""
        return Profiling(self.request_path, "job", RANK, {}, self.said.append)

    def asked(self, steps: int = 2, **more: Any) -> files.Request:
        """Somebody asks for a profile."""
        here = files.place_of(socket.gethostname(), os.getpid())
        standing = files.Request(os.urandom(8).hex(), "job", steps, [0, RANK], time.time() + 1000, "job#2", [here])
        request = replace(standing, **more)
        files.write(self.request_path, request, {})
        return request

    def step(self, *optimizers: int) -> None:
        """Steps that end in a mark of one optimizer each."""
        for optimizer in optimizers:
            torch.ones(20, 20) @ torch.ones(20, 20)
            self.profiling.mark(optimizer, self.marks, time.monotonic_ns())
            self.marks += 1

    def result(self, request: files.Request) -> files.Result | None:
        """What it has left."""
        path = files.of_rank(self.directory, request.id, RANK, files.RESULT)
        return files.result_from(path.read_text()) if path.exists() else None

    def trace(self, request: files.Request) -> dict[str, Any]:
        """The trace it has left."""
        with gzip.open(files.of_rank(self.directory, request.id, RANK, files.TRACE)) as file:
            content: dict[str, Any] = json.load(file)
            return content


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A rank; at its end no profiler runs, and torch is as it was."""
    doors = [getattr(backend, name) for name in ("_prepare_profiler", "_enable_profiler")]
    yield Trainer(tmp_path)
    assert not torch._C._autograd._profiler_enabled()
    assert [getattr(backend, name) for name in ("_prepare_profiler", "_enable_profiler")] == doors


def test_nothing_asked(trainer: Trainer) -> None:
    """Without a request nothing is done, whether or not its directory is there."""
    trainer.step(0, 0)
    trainer.directory.mkdir(parents=True)
    trainer.step(0, 0)
    assert list(trainer.directory.iterdir()) == []


def test_steps(trainer: Trainer) -> None:
    """The steps begin at the mark after the one that began the profile, and the trace holds all of them, on the system's clock."""
    trainer.step(0, 0)
    request = trainer.asked(steps=3)
    before = time.time_ns()
    trainer.step(0, 0, 0, 0)
    assert trainer.result(request) is None
    trainer.step(0)
    after = time.time_ns()
    result = trainer.result(request)
    assert result is not None
    assert (result.rank, result.steps, result.from_seq, result.until_seq, result.error) == (RANK, 3, 3, 6, None)
    assert before < result.from_ns < result.until_ns < after
    trace = trainer.trace(request)
    starts = [
        trace["baseTimeNanoseconds"] + event["ts"] * 1000
        for event in trace["traceEvents"]
        if event.get("name") == "aten::mm"
    ]
    assert len(starts) == 4
    assert sum(result.from_ns <= start < result.until_ns for start in starts) == 3
    modes = {stat.S_IMODE(path.stat().st_mode) for path in trainer.directory.iterdir()}
    assert modes == {0o600}


def test_once(trainer: Trainer) -> None:
    """One id is done once, also by a later life of the rank; the next one is done again."""
    request = trainer.asked(steps=1)
    trainer.step(0, 0, 0, 0, 0)
    assert trainer.result(request) is not None
    for what in (files.RESULT, files.TRACE):
        files.of_rank(trainer.directory, request.id, RANK, what).unlink()
    files.write(trainer.request_path, request, {})  # a file of another time
    trainer.step(0, 0, 0)
    trainer.profiling = trainer.born()
    trainer.step(0, 0, 0)
    assert trainer.result(request) is None
    other = trainer.asked(steps=1)
    trainer.step(0, 0, 0)
    assert trainer.result(other) is not None


@pytest.mark.parametrize(
    "changed", [{"job": "another"}, {"ranks": [0]}, {"until": 1.0}, {"steps": 51}, {"processes": ["another host:1"]}]
)
def test_not_for_this_rank(trainer: Trainer, changed: dict[str, Any]) -> None:
    """A request for another job, rank or run, or out of time, is skipped; a damaged one is reported."""
    trainer.asked(**changed)
    trainer.step(0, 0, 0, 0)
    assert [text for text in trainer.said if "cannot read the request" not in text] == []
    assert bool(trainer.said) == ("steps" in changed)
    assert [path.name for path in trainer.directory.iterdir()] == [trainer.request_path.name]


def test_two_optimizers(trainer: Trainer) -> None:
    """With several optimizers a step is over when the same one has come again."""
    request = trainer.asked(steps=2)
    trainer.step(0, 1, 0, 1, 0, 1, 0)
    result = trainer.result(request)
    assert result is not None
    assert (result.steps, result.from_seq, result.until_seq) == (2, 2, 6)


def test_explicit_marks_win(trainer: Trainer) -> None:
    """Once the user marks steps, those are counted, from the beginning."""
    request = trainer.asked(steps=2)
    trainer.step(0, 0, EXPLICIT, EXPLICIT, EXPLICIT)
    result = trainer.result(request)
    assert result is not None
    assert (result.steps, result.from_seq, result.until_seq) == (2, 2, 4)


def test_out_of_time(trainer: Trainer) -> None:
    """When the time is over it stops at the next mark: with the steps that were, or the reason why there are none."""
    for steps, error in ((1, None), (0, "no step ended in time")):
        until = time.time() + 3  # more than a busy machine takes for two marks
        request = trainer.asked(steps=50, until=until)
        trainer.step(*[0] * (1 + steps))
        while time.time() <= until:
            time.sleep(0.01)
        trainer.step(0 if steps else 1)  # another optimizer's mark ends it, too
        result = trainer.result(request)
        assert result is not None
        assert (result.steps, result.error) == (steps, error)


def test_end_of_training(trainer: Trainer) -> None:
    """A profile is stopped when the probe is taken out: with the steps that were, or the reason why there are none."""
    for marks, error in ((3, None), (1, "the training ended before a step ended")):
        request = trainer.asked(steps=50)
        trainer.step(*[0] * marks)
        trainer.profiling.end()
        trainer.profiling.end()
        result = trainer.result(request)
        assert result is not None
        assert (result.steps, result.error) == (max(0, marks - 2), error)


def test_other_threads(trainer: Trainer) -> None:
    """Marks of another thread neither count nor stop the profiler, which only its own thread can."""
    request = trainer.asked(steps=2)
    trainer.step(0)
    other = threading.Thread(target=trainer.step, args=(0, 0, 0, 0))
    other.start()
    other.join()
    assert trainer.result(request) is None
    trainer.step(0, 0, 0)
    result = trainer.result(request)
    assert result is not None
    assert (result.steps, result.error) == (2, None)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child(trainer: Trainer) -> None:
    """A forked child neither ends its parent's profile nor speaks for it."""
    request = trainer.asked(steps=1)
    trainer.step(0, 0)
    child = os.fork()
    if child == 0:
        trainer.profiling.forget()
        trainer.profiling.end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert trainer.result(request) is None
    trainer.step(0)
    result = trainer.result(request)
    assert result is not None
    assert result.error is None


# -- files of others ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", PLANTED)
def test_planted_request(what: str, trainer: Trainer) -> None:
    """Anything but a request is neither waited for nor read, and reported once; a request in its place is executed."""
    trainer.directory.mkdir(parents=True)
    why = PLANTED[what](trainer.request_path)
    trainer.step(0, 0, 0)
    (said,) = trainer.said
    assert re.search(why, said), said
    assert list(trainer.directory.iterdir()) == [trainer.request_path]
    trainer.request_path.rmdir() if what == "folder" else trainer.request_path.unlink()
    request = trainer.asked(steps=1)
    trainer.step(0, 0, 0)
    result = trainer.result(request)
    assert result is not None
    assert result.error is None


@pytest.mark.parametrize("what", ["link", "fifo"])
def test_planted_trace(what: str, trainer: Trainer, tmp_path: Path) -> None:
    """A trace is not written through a link, or into a FIFO, that another user has put at its path."""
    (tmp_path / "checkpoint").write_text("mine")
    request = trainer.asked(steps=1)
    trace = files.of_rank(trainer.directory, request.id, RANK, files.TRACE)
    hidden = trace.with_name(f".{trace.name}")
    hidden.symlink_to(tmp_path / "checkpoint") if what == "link" else os.mkfifo(hidden)
    trainer.step(0, 0, 0)
    assert (tmp_path / "checkpoint").read_text() == "mine"
    assert trainer.trace(request)["traceEvents"]


# -- other profilers ----------------------------------------------------------------------------


def test_own_profiler_runs(trainer: Trainer) -> None:
    """While the training's own profiler runs, ours does not start; the other has all it would have had."""
    with profile(activities=[ProfilerActivity.CPU]) as own:
        request = trainer.asked(steps=1)
        trainer.step(0, 0, 0)
    result = trainer.result(request)
    assert result is not None
    assert result.error == "the training itself runs a profiler"
    assert sum(event.name == "aten::mm" for event in own.events() or ()) == 3


def test_own_profiler_warms_up(trainer: Trainer) -> None:
    """Neither does it while the other warms up: torch would crash, or record nothing."""
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=1)) as own:
        request = trainer.asked(steps=1)
        trainer.step(0, 0)
        result = trainer.result(request)
        assert result is not None
        assert result.error == "the training itself runs a profiler"
        own.step()
        own.step()
        trainer.step(0)
    assert sum(event.name == "aten::mm" for event in own.events() or ()) == 1


def test_own_profiler_waits(trainer: Trainer) -> None:
    """While the other only waits for its turn ours runs, and gives way when that one begins to warm up."""
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1)) as own:
        request = trainer.asked(steps=1)
        trainer.step(0)
        own.step()
        trainer.step(0, 0)
        own.step()
        trainer.step(0, 0, 0)
    result = trainer.result(request)
    assert result is not None
    assert result.error == "it stopped because the training started a profiler"
    assert sum(event.name == "aten::mm" for event in own.events() or ()) == 3


def test_gives_way(trainer: Trainer) -> None:
    """A profiler that the training starts has all that it would have had; ours stops and says why."""
    request = trainer.asked(steps=5)
    trainer.step(0, 0)
    with profile(activities=[ProfilerActivity.CPU]) as own:
        trainer.step(0, 0)
    trainer.step(0)
    assert sum(event.name == "aten::mm" for event in own.events() or ()) == 2
    result = trainer.result(request)
    assert result is not None
    assert result.error == "it stopped because the training started a profiler"


# -- things in the way --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["start", "stop"])
def test_profiler_that_fails(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A profiler that raises when it starts or stops is an error in the result."""
    real = getattr(profile, method)

    def fail(self: Any) -> None:
        real(self)
        raise RuntimeError(f"no {method}")

    monkeypatch.setattr(profile, method, fail)
    request = trainer.asked(steps=1)
    trainer.step(0, 0, 0)
    result = trainer.result(request)
    assert result is not None
    assert result.error == f"RuntimeError: no {method}"


def test_no_room_for_the_trace(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the trace cannot be written, the result has the reason, and no other file is left."""
    with small_tmpfs(tmp_path / "small", 65_536) as mounted:
        needs(mounted, "root, to mount a file system")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
        request = trainer.asked(steps=1)
        for _ in range(3):
            for _ in range(500):
                torch.ones(2) + 1
            trainer.step(0)
        result = trainer.result(request)
        assert result is not None
        assert "torch could not write the trace" in (result.error or "")
        assert list((tmp_path / "small").iterdir()) == []
    names = sorted(path.name for path in trainer.directory.iterdir())
    assert names == sorted([f"{request.id}.rank1.claim", f"{request.id}.rank1.json", trainer.request_path.name])


def test_limit_of_file_size(trainer: Trainer) -> None:
    """Where the training's files may only grow so large, nothing is profiled, and no signal is sent."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sent = list[int]()
    handler = signal.signal(signal.SIGXFSZ, lambda number, frame: sent.append(number))
    request = trainer.asked(steps=1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        trainer.step(0, 0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    result = trainer.result(request)
    assert result is not None
    assert result.error == "the trainer cannot write files of more than 2000 bytes (ulimit -f); lift that limit"
    assert sent == []


def test_run_directory_is_not_filled(tmp_path: Path) -> None:
    """A small run directory keeps its room for rings and NCCL: there is an error instead of a trace."""
    with small_tmpfs(tmp_path / "run", 8 << 20) as mounted:
        needs(mounted, "root, to mount a file system")
        trainer = Trainer(tmp_path / "run")
        request = trainer.asked(steps=1)
        trainer.step(0, 0, 0)
        result = trainer.result(request)
        assert result is not None
        assert "No space left on device" in (result.error or "")
        assert not list(trainer.directory.glob("*trace*"))


def test_unwritable_directory(trainer: Trainer) -> None:
    """If not even a claim can be written, nothing is profiled; this is reported, and the next request is read again."""
    request = trainer.asked(steps=1)
    elsewhere = trainer.directory.rename(trainer.directory.with_name("elsewhere"))
    trainer.directory.symlink_to(elsewhere)  # which make_private_dir does not take
    trainer.step(0, 0, 0)
    assert trainer.result(request) is None
    assert len(trainer.said) == 1
    assert f"no profile of rank {RANK}: " in trainer.said[0]
    trainer.directory.unlink()
    elsewhere.rename(trainer.directory)
    request = trainer.asked(steps=1)
    trainer.step(0, 0, 0)
    assert trainer.result(request) is not None


def test_result_cannot_be_left(trainer: Trainer) -> None:
    """A directory that vanishes while the profiler runs costs the profile and nothing else."""
    trainer.asked(steps=1)
    trainer.step(0, 0)
    elsewhere = trainer.directory.rename(trainer.directory.with_name("elsewhere"))
    trainer.directory.write_text("no directory")
    trainer.step(0, 0)
    assert len(trainer.said) == 1
    assert not list(elsewhere.glob("*trace*"))


def test_request_of_another_member(trainer: Trainer) -> None:
    """A request of another user is not obeyed, however often that user rewrites it in a folder of the group; one of root is."""
    needs(os.getuid() == 0, "root, to give a file away")
    for attempt in range(5):
        request = trainer.asked(steps=1)
        os.chown(trainer.request_path, NOBODY, NOBODY)
        os.utime(trainer.request_path, (attempt, attempt))
        trainer.step(0, 0, 0)
        assert trainer.result(request) is None
    assert [path.name for path in trainer.directory.iterdir()] == [trainer.request_path.name]
    assert f"belongs to uid {NOBODY}" in trainer.said[0]
    request = trainer.asked(steps=1)
    trainer.step(0, 0, 0)
    assert trainer.result(request) is not None
