"""``commwatch doctor --gpu-proof``: what one NVIDIA GPU can prove of commwatch, claim by claim.

Starts training jobs of one rank, without and with the probe. The jobs (``collectors/commwatch/probe/torch_proof.py``) run in processes of their
own, because this package never imports torch.
"""

from __future__ import annotations

import json
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from commwatch import __version__
from commwatch.wire import events as ev
from commwatch.wire.errors import CommwatchError, UsageError
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.commands import native_hook
from commwatch_agent.proof.gpu_proof_rows import (
    TIMED,
    Ran,
    Records,
    Row,
    count_row,
    gpu_row,
    is_timed,
    loss_row,
    sized,
    step_row,
    timing_row,
    took_s,
)
from commwatch_agent.text import terminal_text
from commwatch_agent.text.units import seconds
from commwatch_collectors.node import flight_recorder
from commwatch_collectors.node.gpu import DriverTrouble, NoGpus, plain_uuid
from commwatch_collectors.node.gpu_nvidia import NvidiaSource

_MODULE = "commwatch.probe.torch_proof"
#: Seconds that a job may take.
_JOB_S = 300.0
_GATHERS = 20
#: Largest relative error of a duration.
_ERROR = 0.05
#: Variables of the caller that would change the jobs: those of launchers, and those that a scene sets.
_LEFT_OUT = ("COMMWATCH", "TORCHELASTIC", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_")
#: Torch 2.13 on CPU sometimes aborts at exit with this text, with and without the probe, after all is done.
_ABORTS = "terminate called without an active exception"
_ISSUE = "open an issue in commwatch's repository on GitHub and attach this file"


class CannotProve(UsageError):
    """There is no torch, no GPU, or no place for the result; the message says what to do."""


class Stopped(CommwatchError):
    """Ctrl-C."""

    exit_code = 130


class JobFailed(Exception):
    """A job did not end as it should; the message is one line."""


class Scene(NamedTuple):
    """A job, its settings, and the timing mode that they lead to."""

    title: str
    name: str
    env: Mapping[str, str]
    mode: str
    #: Runs without and with the probe, in turn. The time of a step is compared if there are several.
    rounds: int = 1


SCENES = (
    Scene("ddp", "ddp", {}, "events", rounds=3),
    Scene("one queue", "ddp", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "poll"),
    Scene("polling", "ddp", {"COMMWATCH_TIMING": "poll"}, "poll"),
    Scene("sharded", "sharded", {}, "events"),
    Scene("graphs", "graphs", {}, "events"),
)


@dataclass(frozen=True)
class Machine:
    """What the proof runs on."""

    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    #: Names of the GPUs that torch sees. The jobs run on the first.
    gpus: tuple[str, ...]
    #: UUID of the first, as torch writes it; empty if torch does not know it.
    uuid: str = ""


# -- what it runs on --------------------------------------------------------------------------


def machine(python: str, env: Mapping[str, str], device: str = "cuda") -> Machine:
    """Return what ``python`` and the driver say of torch and the GPUs.

    Raises:
        CannotProve: there is no torch or no NVIDIA GPU; the message says what to do.
    """
    done = _call([python, "-m", _MODULE, "about"], {**_plain(env), "COMMWATCH": "0"})
    if done.returncode != 0:
        remedy = "name the Python of your training jobs with --python"
        raise CannotProve(f"{python} cannot import torch ({_last_line(done.stderr)}): {remedy}")
    found = json.loads(done.stdout.splitlines()[-1])
    if device == "cuda":
        _check_gpu(found)
    return Machine(
        found["torch"], found["cuda"], found["nccl"], _driver(), tuple(found["gpus"]), plain_uuid(found["uuid"])
    )


def _check_gpu(found: Mapping[str, Any]) -> None:
    torch = f"torch {found['torch']}"
    if found["rocm"]:
        raise CannotProve(f"{torch} is built for ROCm: the proof needs an NVIDIA GPU")
    if not found["cuda"]:
        raise CannotProve(f"{torch} is built without CUDA: install the CUDA build (pytorch.org/get-started)")
    if not found["gpus"]:
        why = found["why"] or "the driver shows none"
        raise CannotProve(f"{torch} finds no NVIDIA GPU ({why}): check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if not found["nccl"]:
        raise CannotProve(f"{torch} is built without NCCL: install a build that has it (pytorch.org/get-started)")


def _driver() -> str | None:
    source = NvidiaSource()
    try:
        driver = source.open()
    except (NoGpus, DriverTrouble):
        return None
    source.close()
    return driver.version


def check_file(file: Path) -> None:
    """Raise ``CannotProve`` if the result cannot be written to ``file``, before the proof takes its minutes."""
    folder = file.parent
    if file.is_dir() or not folder.is_dir():
        raise CannotProve(f"--gpu-proof {file}: needs a file in a folder that exists")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        if file.exists():
            file.open("ab").close()
    except OSError as error:
        raise CannotProve(f"--gpu-proof {file}: {error.strerror}; name another file") from None


# -- jobs -------------------------------------------------------------------------------------


@dataclass
class Proof:
    """Runs the jobs and compares.

    Args:
        env: the environment of the caller.
        most: a step with the probe may take so many times as long as without.
    """

    machine: Machine
    python: str
    env: Mapping[str, str]
    device: str = "cuda"
    scenes: tuple[Scene, ...] = SCENES
    steps: int = 100
    most: float = 1.01
    #: The hook of the jobs, once one has run.
    hook: str | None = field(default=None, init=False)

    def rows(self) -> Iterator[Row]:
        """Yield each row as soon as it is known."""
        self.env = {**_plain(self.env), **native_hook.prepare([self.python], _plain(self.env), waits=True)}
        on_gpu = self.device == "cuda"
        for scene in self.scenes if on_gpu else self.scenes[:1]:
            yield from self._checked(scene.title, self._scene(scene))
        for source, profile in (("CUDA events", False), ("torch.profiler", True)):
            yield from self._checked(f"durations: {source}", self._durations(source, profile))
        if on_gpu:
            yield from self._checked("exposed", self._exposed("exposed", 0.9, 1.1))
            yield from self._checked("hidden", self._exposed("hidden", 0.0, 0.1))
            yield gpu_row(self.machine.uuid)

    def _checked(self, what: str, rows: Iterator[Row]) -> Iterator[Row]:
        try:
            yield from rows
        except JobFailed as error:
            yield Row(what, False, str(error))

    def _run(
        self, scene: str, settings: Mapping[str, str], watched: bool, gathers: int = 0, *, profile: bool = False
    ) -> Ran:
        """Run one job.

        Raises:
            JobFailed: it failed, took too long, or recorded nothing.
        """
        with tempfile.TemporaryDirectory(prefix="commwatch-proof-") as name:
            directory = Path(name)
            # A fixed workspace, so that cuBLAS computes the same in every run.
            fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONWARNINGS": "ignore"}
            fixed |= {"TORCH_FR_BUFFER_SIZE": "50000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "50000"}
            probe = {"COMMWATCH": "0"}
            if watched:
                probe = {"COMMWATCH": "1", "COMMWATCH_DIR": name, "COMMWATCH_BUDGET": "0", "COMMWATCH_SLOTS": "65536"}
            recorder = directory / "recorder.pickle"
            command = [self.python, "-m", _MODULE, scene, "--device", self.device, "--steps", str(self.steps)]
            command += ["--gathers", str(gathers), "--recorder", str(recorder), *(["--profile"] if profile else [])]
            which = f"{scene} {'with' if watched else 'without'} commwatch"
            done = _call(command, {**self.env, **fixed, **probe, **settings})
            if done.returncode != 0 and not (done.stdout and _ABORTS in done.stderr):
                raise JobFailed(f"{which}: {_ending(done)}")
            ran = Ran(json.loads(done.stdout.splitlines()[-1]))
            ran.counted = _counted(ran.result, recorder)
            if watched:
                ran.records = _read(directory, done.stderr, which)
                self.hook = ran.records.identity["hook"]
            return ran

    def _scene(self, scene: Scene) -> Iterator[Row]:
        """Yield the rows of a scene, from runs without and with the probe in turn."""
        without, watched = [], []
        for _ in range(scene.rounds):
            without.append(self._run(scene.name, scene.env, watched=False))
            watched.append(self._run(scene.name, scene.env, watched=True))
        name, records = scene.title, watched[-1].records
        assert records is not None
        yield loss_row(name, without, watched)
        yield timing_row(name, records, scene.mode if self.device == "cuda" else None)
        yield count_row(name, watched[-1], records)
        if scene.rounds > 1:
            yield step_row(name, without, watched, self.most)

    def _durations(self, source: str, profile: bool) -> Iterator[Row]:
        """Yield the row that compares durations of all_gathers with those of torch.profiler, or of CUDA events around them."""
        what = f"durations: {source}"
        try:
            ran = self._run("ddp", {}, watched=True, gathers=_GATHERS, profile=profile)
        except JobFailed:
            try:
                self._run("ddp", {}, watched=False, gathers=_GATHERS, profile=profile)
            except JobFailed as error:
                yield Row(what, None, f"no figures of {source} here: {error}")
                return
            raise
        assert ran.records is not None
        ours = [took_s(record) for record in ran.records.of("all_gather")[-_GATHERS:] if is_timed(record)]
        theirs = ran.result["gathers"]
        if not theirs:
            yield Row(what, None, f"{source} measured none; commwatch: {len(ours)}")
        elif len(ours) < TIMED * _GATHERS:
            yield Row(what, False, f"commwatch measured {len(ours)} of {_GATHERS}")
        else:
            both, ratio = (
                (statistics.median(ours), statistics.median(theirs)),
                statistics.median(ours) / statistics.median(theirs),
            )
            says = f"{ratio:.3f} of what {source} measured: {seconds(both[0])} and {seconds(both[1])}, medians of {len(theirs)}"
            yield Row(what, abs(ratio - 1) < _ERROR, says, ratio)

    def _exposed(self, scene: str, least: float, most: float) -> Iterator[Row]:
        """Yield the row that compares the exposed time of steps with the time of their all_gathers."""
        records = self._run(scene, {}, watched=True).records
        assert records is not None
        if self.hook != "native":
            yield Row(f"{scene} share", None, "only the native hook measures it: see commwatch native status")
            return
        marks = records.marks[len(records.marks) // 2 :]
        known = [mark for mark in marks if mark.flags & ev.EXPOSED and mark.timing == ev.BY_EVENTS]
        gathers = [record for record in records.of("all_gather")[-len(marks) :] if is_timed(record)]
        if len(known) < TIMED * len(marks) or len(gathers) < TIMED * len(marks) or not marks:
            says = (
                f"exposed time is known of {len(known)} of {len(marks)} steps, durations of {len(gathers)} operations"
            )
            yield Row(f"{scene} share", False, says)
            return
        exposed_s = sum(mark.size_bytes for mark in known) / len(known) / 1e9
        op_s = statistics.fmean(map(took_s, gathers))
        expected = "waits for it at once" if least else "computes longer beside it"
        says = f"{exposed_s / op_s:.1%} of the communication, where the GPU {expected} ({seconds(op_s)} a step)"
        yield Row(f"{scene} share", least <= exposed_s / op_s <= most, says, exposed_s / op_s)


def _plain(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_LEFT_OUT)}


def _call(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, or for ``_JOB_S``; the folder is one in which no file has the name of a module."""
    try:
        return subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, errors="replace", timeout=_JOB_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"did not end within {_JOB_S:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"{error.strerror}")


def _last_line(stderr: str) -> str:
    """Return the last line that is not a warning."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and "Warning: " not in line]
    return terminal_text.line(lines[-1]) if lines else ""


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Return how a process failed, and the last line of its errors."""
    names = {-number: number.name for number in signal.Signals}
    how = names.get(done.returncode, f"exit code {done.returncode}")
    return f"{how}: {last}" if (last := _last_line(done.stderr)) else how


# -- what they recorded -----------------------------------------------------------------------


def _read(directory: Path, stderr: str, which: str) -> Records:
    messages = [line for line in stderr.splitlines() if line.startswith("commwatch: ")]
    paths = list((directory / "rings").glob("*.ring"))
    if len(paths) != 1:
        raise JobFailed(f"{which}: the probe made {len(paths)} rings{''.join(f'; {text}' for text in messages)}")
    reader = RingReader(paths[0])
    drained = reader.drain(final=True)
    reader.close()
    records = sorted(map(ev.Record._make, ev.RECORD.iter_unpack(drained.records)), key=lambda each: each.launch_ns)
    marks = [record for record in records if record.op == ev.STEP_MARK]
    operations = [record for record in records if record.op != ev.STEP_MARK]
    return Records(reader.identity, operations, marks, drained.lost, messages)


def _counted(result: Mapping[str, Any], recorder: Path) -> Counter[tuple[str, int | None]] | None:
    """Return the operations that ran: as the job says, else as PyTorch's Flight Recorder has them; ``None`` if it has none."""
    if "ran" in result:
        return Counter({(op, None): count for op, count in result["ran"].items()})
    try:
        dump = flight_recorder.load(recorder.read_bytes())
    except (OSError, flight_recorder.BadDump):
        return None
    if dump.cut or dump.unknown:
        return None
    return Counter(sized(each.op, each.size_bytes) for each in dump.entries if each.op != "coalesced")


# -- output -----------------------------------------------------------------------------------


def head(on: Machine) -> str:
    """Return the first lines of the output."""
    parts = [f"commwatch {__version__}", f"torch {on.torch}"]
    parts += [
        f"{name} {value}" for name, value in (("CUDA", on.cuda), ("NCCL", on.nccl), ("driver", on.driver)) if value
    ]
    return terminal_text.lines([", ".join(parts), *(f"GPU {number}: {name}" for number, name in enumerate(on.gpus))])


def text(row: Row) -> str:
    """Return a row as one line."""
    sign = {True: "ok", False: "NOT", None: "–"}[row.ok]
    return terminal_text.line(f"{sign:<4} {row.what:<25} {row.says}")


def holds(rows: list[Row]) -> bool:
    """Return whether all that could be checked holds."""
    return any(row.ok for row in rows) and all(row.ok is not False for row in rows)


def conclusion(rows: list[Row], file: Path) -> str:
    """Return the last lines: how much holds, and how to report it."""
    counts = Counter(row.ok for row in rows)
    parts = [f"{counts[True]} of {len(rows)} hold"]
    parts += [
        f"{counts[ok]} {words}" for ok, words in ((False, "do not"), (None, "could not be checked")) if counts[ok]
    ]
    return terminal_text.lines(["; ".join(parts), f"To report the result, whatever it is: {_ISSUE}: {file}"])


def as_json(proof: Proof, rows: list[Row]) -> str:
    """Return the result for a report."""
    on = asdict(proof.machine)
    del on["uuid"]
    about = {"commwatch": __version__, "python": platform.python_version(), **on, "hook": proof.hook}
    made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps(
        {"format": 1, "made_at": made_at, "holds": holds(rows), **about, "rows": [asdict(row) for row in rows]},
        indent=2,
    )


def write(file: Path, result: str) -> None:
    """Write the result.

    Raises:
        CannotProve: the file cannot be written.
    """
    try:
        file.write_text(result + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotProve(f"--gpu-proof {file}: {error.strerror}; name another file") from None
