"""Evidence from stuck processes: real stacks by py-spy, and a pipe that answers as PyTorch's Flight Recorder does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.model.views import RankView
from commwatch_agent.sources.stack_capture import evidence, flight_recorder, recorder, stack, trainer_of
from tests.collectors.node.test_flight_recorder import dump_of, entry, pending
from tests.helpers import PATIENCE_S, needs

#: As ProcessGroupNCCL does: opens the pipe of its rank, and writes its dump when something comes. (PyTorch, c10d, DumpPipe.)
RECORDER = """
import os, sys, time
stem, rank = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"], 3
os.mkfifo(f"{stem}{rank}.pipe")
pipe = os.open(f"{stem}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)

def saving_a_checkpoint():
    while True:
        time.sleep(0.05)
        try:
            asked = os.read(pipe, 128)
        except BlockingIOError:
            asked = b""
        if asked:
            with open(sys.argv[1] + str(rank), "wb") as dump:
                dump.write(os.environ.get("RECORDED", "what was recorded").encode())

print("ready", flush=True)
saving_a_checkpoint()
"""


@contextmanager
def trainer(dump: Path, **env: str) -> Iterator[int]:
    """A process that answers like a rank; its pid."""
    command = [sys.executable, "-c", RECORDER, str(dump)]
    with subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def test_end_of_an_agent(tmp_path: Path) -> None:
    """A process that ends does not wait for the stacks that it was asking a trainer for."""
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho $$ > {asked}\nexec sleep 600 > /dev/null\n", encoding="utf-8")
    program.chmod(0o755)
    ends = (
        "import sys; from commwatch_agent.sources import stack_capture; from commwatch.wire.concurrency import at_once; stack_capture._STACK_S = 600\n"
        "at_once(stack_capture.stack, [1], 1); print(open(sys.argv[1]).read())"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-c", ends, str(asked)],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
    )
    os.kill(int(ended.stdout), signal.SIGKILL)


def rank_view(pid: int, **more: object) -> RankView:
    about: dict[str, object] = {
        "job_id": "job",
        "rank": 3,
        "restart": 0,
        "state": "running",
        "host": "here",
        "local_rank": 3,
        "pid": 1,
        "visible_pid": pid,
    }
    rest = {"hook": "native", "process": "sleeping", "heartbeat_age_s": 0.0, "last_seq": {}, "launched_s": {}}
    return RankView(**{**about, **rest, "in_flight": [], "failed": [], "records": 0, "lost": 0, **more})  # type: ignore[arg-type]


def stalled(rank: int) -> Verdict:
    return Verdict("stalled", "not_joined", "job", "g", "g", 1, "all_reduce", [rank], [], 11.0, "stalled")


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("TORCH_FR_DUMP_TEMP_FILE", "dump_"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "dump_"),
        ("XDG_CACHE_HOME", "torch/comm_lib_trace_rank_"),
        ("HOME", ".cache/torch/comm_lib_trace_rank_"),
        ("HOME", ".cache/torch/nccl_trace_rank_"),  # of earlier versions
    ],
)
def test_flight_recorder(tmp_path: Path, variable: str, place: str) -> None:
    """A rank with a pipe for it is made to dump its Flight Recorder, wherever PyTorch puts that; an old dump is no answer."""
    unset = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"), "")
    stem = tmp_path / place
    value = stem if place == "dump_" else tmp_path
    stem.parent.mkdir(parents=True, exist_ok=True)
    dump = Path(f"{stem}3")
    dump.write_text("of yesterday")
    pipe = str(tmp_path / "pipe_")
    with (
        trainer(stem, **{**unset, variable: str(value), "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipe}) as pid,
        trainer_of(pid) as rank,
    ):
        assert flight_recorder(rank, 3, timeout_s=PATIENCE_S) == dump
        assert dump.read_text() == "what was recorded"
        assert flight_recorder(rank, 4) is None  # that rank has no pipe


def test_path_of_any_bytes(tmp_path: Path) -> None:
    """A dump whose path is no UTF-8 is made and read, and its evidence is text that can be stored and sent."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    stems = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump_"),
    }
    with trainer(folder / "dump_", RECORDED=json.dumps(dump_of(entry(0, 1))), **stems) as pid:
        found = [each for each in evidence([stalled(3)], [rank_view(pid)], "here") if each.kind == "flight_recorder"]
    assert len(found) == 1
    assert found[0].text.encode().startswith(f"{tmp_path}/\N{REPLACEMENT CHARACTER}/dump_3".encode())


def test_no_flight_recorder(tmp_path: Path) -> None:
    """Without the setting, with a file in the pipe's place, without a reader, or without the process there is no dump, and no wait."""
    command = ["sleep", "600"]
    pipe = tmp_path / "pipe_3.pipe"
    env = {**os.environ, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_")}
    with subprocess.Popen(command, env=env) as process:
        try:
            with trainer_of(process.pid) as rank:
                assert flight_recorder(rank, 3) is None
                os.mkfifo(pipe)
                assert flight_recorder(rank, 3) is None
                pipe.unlink()
                pipe.write_text("")
                assert flight_recorder(rank, 3) is None
                assert pipe.read_text() == ""
        finally:
            process.kill()
    with pytest.raises(OSError, match="No such"), trainer_of(process.pid):
        pass
    with trainer_of(os.getpid()) as rank:
        assert flight_recorder(rank, 3) is None


def test_stacks(tmp_path: Path) -> None:
    """py-spy shows the stack of a rank that a verdict names; ranks that are gone or on other hosts are left out."""
    needs(shutil.which("py-spy", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}"), "py-spy")
    stems = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }
    with trainer(tmp_path / "dump_", **stems) as pid:
        told = stack(pid)
        assert told is not None
        assert "saving_a_checkpoint" in told
        found = evidence([stalled(3)], [rank_view(pid)], "here")
        assert [(each.rank, each.kind) for each in found] == [(3, "python_stack"), (3, "flight_recorder")]
        assert "saving_a_checkpoint" in found[0].text
        assert found[1].text.splitlines()[0] == str(tmp_path / "dump_3")
        assert "it cannot be read: not a dump" in found[1].text
        for view in (rank_view(pid, host="there"), rank_view(pid, state="gone"), rank_view(pid, visible_pid=None)):
            assert evidence([stalled(3)], [view], "here") == []
        assert evidence([stalled(2)], [rank_view(pid)], "here") == []
    assert stack(pid) is None


def test_what_was_recorded(tmp_path: Path) -> None:
    """A dump that a verdict has led to is read: it says where the rank is in each group."""
    stems = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }
    with trainer(tmp_path / "dump_", RECORDED=json.dumps(dump_of(entry(0, 1), pending(1, 2))), **stems) as pid:
        assert recorder(3, pid) == "works"
        assert recorder(4, pid) == "down"
        found = [each for each in evidence([stalled(3)], [rank_view(pid)], "here") if each.kind == "flight_recorder"]
        file, line = found[0].text.splitlines()
        assert file == str(tmp_path / "dump_3")
        assert line.startswith("default_pg: all_reduce 2 started, not completed, called ")
    assert recorder(3, os.getpid()) == "off"
