"""Real dumps of PyTorch's Flight Recorder, and what the probe reports about NCCL Inspector."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from commwatch.wire.ring_reader import RingReader
from commwatch_agent.analysis.flight_recorder_analysis import take
from commwatch_agent.incidents.judging import judged_dumps
from commwatch_collectors.node.flight_recorder import load, unpickled
from tests.e2e.torchjob import run_job
from tests.helpers import commwatch

HERE = "recorded.py"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have left theirs; as if they had been dumped a minute later."""
    folder = tmp_path_factory.mktemp("recorded")
    run_job(
        folder,
        "recorded.py",
        str(folder),
        TORCH_FR_BUFFER_SIZE="2000",
        NCCL_INSPECTOR_ENABLE="1",
        NCCL_INSPECTOR_DUMP_DIR="/somewhere/else",
    )
    for path in folder.glob("trace_*"):
        later = path.stat().st_mtime + 60
        os.utime(path, (later, later))
    return folder


def test_real_dump(dumps: Path) -> None:
    """What PyTorch writes is read as its own unpickler reads it, without one; JSON says the same but for the stacks."""
    data = (dumps / "trace_0").read_bytes()
    assert unpickled(data) == pickle.loads(data)
    dump = load(data)
    assert (dump.version, dump.unknown, dump.cut) == ("2.10", 0, False)
    told = [(entry.group[1], entry.op, entry.seq, entry.size_bytes, entry.done) for entry in dump.entries]
    assert told[-2:] == [("twin", "all_gather", 1, 56, True), ("default_pg", "all_reduce", 4, 32, False)]
    assert [entry[:4] for entry in told[-5:-2]] == [("default_pg", "all_reduce", seq, 60) for seq in (1, 2, 3)]
    assert dump.entries[-1].dtype == "Float"
    assert (dump.entries[-1].frame or "").rpartition("/")[2].startswith(HERE)
    by_json = load((dumps / "trace_0.json").read_bytes())
    assert [entry._replace(frame=None) for entry in dump.entries] == [
        entry._replace(frame=None) for entry in by_json.entries
    ]


@pytest.mark.parametrize("form", ["trace_{}", "trace_{}.json"])
def test_who_has_not_come(dumps: Path, form: str) -> None:
    """The dumps of two ranks together name the one that has not entered what the other waits in."""
    (verdict,) = judged_dumps([take(dumps / form.format(rank)) for rank in (0, 1)])
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("stalled", "not_joined", [1], [0])
    assert (verdict.group, verdict.op, verdict.seq, verdict.source) == (
        "default_pg",
        "all_reduce",
        4,
        "flight_recorder",
    )


def test_command(dumps: Path) -> None:
    """``commwatch diagnose --flight-recorder`` prints the verdict, and the position of each rank."""
    done = commwatch("diagnose", "--flight-recorder", dumps / "trace_0", dumps / "trace_1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "WARNING  Stall: rank 1 (the dumps)\n" in done.stdout
    assert "rank 1 has not joined" in done.stdout
    assert "default_pg: all_reduce 4 scheduled, not completed, called 6" in done.stdout
    assert HERE in done.stdout
    assert "twin: all_gather 1 completed, the latest" in done.stdout
    asked = ("diagnose", "--flight-recorder", dumps / "trace_0", dumps / "trace_1", "--json")
    told = json.loads(commwatch(*asked).stdout)
    assert told["verdicts"][0]["ranks"] == told["incidents"][0]["ranks"] == [1]
    assert {group["group"] for group in told["ranks"][0]["groups"]} == {"default_pg", "twin"}


def test_probe_tells_of_inspector(dumps: Path) -> None:
    """The names file has one entry with the folder that NCCL Inspector dumps into."""
    for path in sorted((dumps / "rings").glob("*.ring")):
        reader = RingReader(path)
        assert [entry for entry in reader.names() if "inspector" in entry] == [{"inspector": "/somewhere/else"}]
        reader.close()
