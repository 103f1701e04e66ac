"""The rows of ``commwatch doctor --gpu-proof``: what holds, what does not, and what could not be checked."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commwatch import __version__
from commwatch.wire import events as ev
from commwatch_agent.cli import doctor
from commwatch_agent.proof import gpu_proof, gpu_proof_rows
from commwatch_agent.proof.gpu_proof import CannotProve, JobFailed, Machine, Proof
from commwatch_agent.proof.gpu_proof_rows import Ran, Records, Row
from commwatch_collectors.node.gpu import Gpu, Measured
from tests.agent.test_config import one_line
from tests.gpus import card
from tests.helpers import MS, commwatch, mark, operation, packed

MACHINE = Machine("2.14.1", "13.0", "2.30.7", "580.1", ("NVIDIA H100",))


def ran(**result: Any) -> Ran:
    """A job that has printed this."""
    return Ran({"loss": "0x1p-1", "step_s": 0.01, **result})


def records(*fields: tuple[int, ...], mode: str = "events", messages: tuple[str, ...] = ()) -> Records:
    """What a job with these records and step marks leaves."""
    every = [ev.Record._make(each) for each in ev.RECORD.iter_unpack(packed(*fields))]
    marks, operations = ([r for r in every if (r.op == ev.STEP_MARK) == wanted] for wanted in (True, False))
    identity = {"timing": {"mode": mode, "reason": "default"}, "hook": "native"}
    return Records(identity, operations, marks, 0, list(messages))


def timed(number: int, op: str = "all_gather", ns: int = MS) -> list[tuple[int, ...]]:
    """So many operations of a millisecond, by events."""
    return [
        operation(op, start_ns=n * 10 * MS, end_ns=n * 10 * MS + ns, seq=n, timing=ev.BY_EVENTS) for n in range(number)
    ]


def test_loss() -> None:
    """A loss that differs with commwatch does not hold; one that varies by itself cannot be checked."""
    same, other = ran(), ran(loss="0x1p-2")
    assert gpu_proof_rows.loss_row("ddp", [same, same], [same, same]).ok is True
    differs = gpu_proof_rows.loss_row("ddp", [same, same], [same, other])
    assert differs.ok is False
    assert "0x1p-2" in differs.says
    assert gpu_proof_rows.loss_row("ddp", [same, other], [same, other]).ok is None


def test_timing() -> None:
    """Another mode than the settings lead to, too few durations, or a message of commwatch in the job do not hold."""
    untimed = [operation(start_ns=MS, end_ns=2 * MS, flags=ev.UNTIMED)]
    assert gpu_proof_rows.timing_row("ddp", records(*timed(10)), "events") == Row(
        "ddp: timing", True, "events (default), native hook; 10 of 10 operations have a duration", 1.0
    )
    assert gpu_proof_rows.timing_row("ddp", records(*timed(10)), "poll").ok is False
    assert gpu_proof_rows.timing_row("ddp", records(*timed(10), *2 * untimed), "events").ok is False
    assert gpu_proof_rows.timing_row("ddp", records(*untimed, mode="poll"), "poll").ok is True
    assert gpu_proof_rows.timing_row("ddp", records(), "events").ok is False
    told = gpu_proof_rows.timing_row("ddp", records(*timed(10), messages=("commwatch: timing ended",)), "events")
    assert (told.ok, told.says.endswith("; commwatch: timing ended")) == (False, True)
    # Operations of graphs are counted only.
    replayed = [operation("all_gather", start_ns=MS, end_ns=MS, flags=ev.UNTIMED)] * 10
    assert gpu_proof_rows.timing_row("graphs", records(*replayed, *timed(10, "all_reduce")), "events").ok is True


def test_count() -> None:
    """An operation that is missing, or has another size, does not hold; without a Flight Recorder it cannot be checked."""
    seen = records(*timed(3))

    def row(counted: Counter[tuple[str, int | None]] | None) -> Row:
        return gpu_proof_rows.count_row("ddp", Ran({}, counted), seen)

    assert row(Counter({("all_gather", 4096): 3})).ok is True
    assert row(Counter({("all_gather", None): 3})).ok is True
    missing = row(Counter({("all_gather", 4096): 4}))
    assert (missing.ok, missing.figure) == (False, 3)
    assert "missing 1, extra 0" in missing.says
    assert row(Counter({("all_gather", 4096): 2, ("all_gather", 8192): 1})).ok is False
    assert row(None).ok is None


def test_step() -> None:
    """A step may take one percent longer; one that takes longer cannot be judged where it varies more without commwatch."""
    for times, took, ok in (((1.0, 1.0), 1.009, True), ((1.0, 1.0), 1.02, False), ((0.99, 1.02), 1.02, None)):
        row = gpu_proof_rows.step_row("ddp", [ran(step_s=time) for time in times], [ran(step_s=took)] * 2, 1.01)
        assert row.ok is ok, row


@pytest.mark.parametrize(
    ("exposed_ms", "known", "at_once", "beside"),
    [(0.98, 20, True, False), (0.02, 20, False, True), (0.5, 20, False, False), (1.0, 10, False, False)],
)
def test_exposed(exposed_ms: float, known: int, at_once: bool, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exposed is what is waited for at once, and not what is hidden; steps of which it is unknown do not hold."""
    marks = [
        mark(n, n * 10 * MS + 5 * MS, exposed_ns=int(exposed_ms * MS) if n < known else None, exposed_by=ev.BY_EVENTS)
        for n in range(20)
    ]
    monkeypatch.setattr(Proof, "_run", lambda *_, **__: Ran({}, None, records(*timed(20), *marks)))
    proof = Proof(MACHINE, sys.executable, {})
    proof.hook = "native"
    (first,), (second,) = proof._exposed("exposed", 0.9, 1.1), proof._exposed("hidden", 0.0, 0.1)
    assert (first.ok, second.ok) == (at_once, beside)
    proof.hook = "python"
    (blind,) = proof._exposed("exposed", 0.9, 1.1)
    assert blind.ok is None


def test_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations hold within five percent of those that something else measured; what measures nothing checks nothing."""
    seen = records(*timed(20))

    def row(theirs: list[float], ours: Records = seen) -> Row:
        monkeypatch.setattr(Proof, "_run", lambda *_, **__: Ran({"gathers": theirs}, None, ours))
        (row,) = Proof(MACHINE, sys.executable, {})._durations("torch.profiler", True)
        return row

    assert row([1.04e-3]).ok is True
    assert row([1.06e-3]).ok is False
    assert row([]).ok is None
    assert row([1e-3], records(*timed(10))).ok is False


@pytest.mark.parametrize(("fails_alone", "ok"), [(True, None), (False, False)])
def test_profiler_that_fails(fails_alone: bool, ok: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler that fails without commwatch checks nothing; one that fails only with commwatch does not hold."""

    def run(_: Proof, scene: str, settings: dict[str, str], watched: bool, **more: Any) -> Ran:
        if watched or fails_alone:
            raise JobFailed("SIGSEGV")
        return Ran({"gathers": [1e-3]})

    monkeypatch.setattr(Proof, "_run", run)
    proof = Proof(MACHINE, sys.executable, {})
    (row,) = proof._checked("durations", proof._durations("torch.profiler", True))
    assert row.ok is ok
    assert "SIGSEGV" in row.says


def test_gpu() -> None:
    """Memory and power limit must be those of nvidia-smi, or unknown to both; without nvidia-smi it cannot be checked."""
    gpu = Gpu(card(0), Measured(memory_total_bytes=81559 << 20, power_limit_watts=700.0, power_watts=71.2))
    assert gpu_proof_rows.beside_smi(gpu, ["81559", "700.00", "73.00", "0"]).ok is True
    assert gpu_proof_rows.beside_smi(gpu, ["81559", "350.00", "73.00", "0"]).ok is False
    assert gpu_proof_rows.beside_smi(gpu, ["81559", "[N/A]", "73.00", "0"]).ok is False
    assert gpu_proof_rows.beside_smi(gpu, None).ok is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cuda": None}, "is built without CUDA"),
        ({"rocm": "6.4"}, "is built for ROCm"),
        ({"gpus": [], "why": "Found no NVIDIA driver"}, "finds no NVIDIA GPU (Found no NVIDIA driver)"),
        ({"nccl": None}, "is built without NCCL"),
    ],
)
def test_no_gpu(changes: dict[str, Any], says: str) -> None:
    """Without an NVIDIA GPU, CUDA or NCCL in torch, the message names it; with all of them there is none."""
    found = {"torch": "2.14.1", "cuda": "13.0", "rocm": None, "nccl": "2.30.7", "gpus": ["NVIDIA H100"], "why": ""}
    gpu_proof._check_gpu(found)
    with pytest.raises(CannotProve) as error:
        gpu_proof._check_gpu({**found, **changes})
    assert says in str(error.value)


def test_jobs_that_fail() -> None:
    """A job that fails is a row that does not hold, and the others follow."""
    proof = Proof(MACHINE, "/bin/false", {}, device="cpu")
    assert [(row.what, row.ok, row.says) for row in proof.rows()] == [
        ("ddp", False, "ddp without commwatch: exit code 1"),
        ("durations: CUDA events", None, "no figures of CUDA events here: ddp without commwatch: exit code 1"),
        ("durations: torch.profiler", None, "no figures of torch.profiler here: ddp without commwatch: exit code 1"),
    ]


def test_conclusion() -> None:
    """It holds if nothing is false and something is true; the last line says how to report it."""
    rows = [Row("a", True, ""), Row("b", None, "")]
    assert gpu_proof.holds(rows)
    assert not gpu_proof.holds([*rows, Row("c", False, "")])
    assert not gpu_proof.holds([Row("b", None, "")])
    first, last = gpu_proof.conclusion([*rows, Row("c", False, "")], Path("result.json")).splitlines()
    assert first == "1 of 3 hold; 1 do not; 1 could not be checked"
    assert last.endswith("GitHub and attach this file: result.json")


@pytest.mark.parametrize(("last", "code"), [(True, 0), (None, 0), (False, 1)])
def test_command(
    last: bool | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints a line for each row and writes them to the file; it ends with 1 if one does not hold."""
    rows = [Row("ddp: count", True, "840 operations", 840), Row("gpu", last, "81559 MiB")]
    monkeypatch.setattr(gpu_proof, "machine", lambda *_: MACHINE)
    monkeypatch.setattr(Proof, "rows", lambda _: iter(rows))
    file = tmp_path / "result.json"
    assert doctor._gpu_proof(file, sys.executable, False) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [
        f"commwatch {__version__}, torch 2.14.1, CUDA 13.0, NCCL 2.30.7, driver 580.1",
        "GPU 0: NVIDIA H100",
        "ok   ddp: count                840 operations",
    ]
    assert printed[-1].endswith(str(file))
    written = json.loads(file.read_text())
    assert [row["ok"] for row in written["rows"]] == [True, last]
    assert (written["holds"], written["driver"], written["gpus"]) == (code == 0, "580.1", ["NVIDIA H100"])
    assert doctor._gpu_proof(file, sys.executable, True) == code
    assert json.loads(capsys.readouterr().out)["rows"] == written["rows"]


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command with one line, exit code 130 and no file."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_proof, "machine", interrupted)
    with pytest.raises(gpu_proof.Stopped) as error:
        doctor._gpu_proof(tmp_path / "result.json", sys.executable, False)
    assert error.value.exit_code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["none/result.json", "."])
def test_file_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    """A file that cannot be written is refused before any job runs, with one line and exit code 2."""
    assert "--gpu-proof" in one_line(commwatch("doctor", "--gpu-proof", tmp_path / name))
