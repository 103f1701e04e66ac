"""``commwatch bench``: sweep collectives over sizes with the user's launch command, and keep the result as a reference.

The job runs ``commwatch.probe.torch_sweep``, appended to the command. Also imports output of nccl-tests.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire.errors import CommwatchError
from commwatch.wire.events import OPS
from commwatch_agent.commands.run import Signals, Stopped
from commwatch_agent.proof import nccl_tests
from commwatch_agent.reference import references
from commwatch_agent.reference.references import Measured

log = logging.getLogger("commwatch")

#: Operations that can be swept, and those swept by default.
SWEPT = tuple(op for op in OPS if op not in ("send", "recv", "barrier"))
DEFAULT = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_SIZES = 64
#: Time between two looks at what the sweep has measured so far.
_LOOK_S = 0.2

#: A line of the results file (``torch_sweep``).
Line = dict[str, Any]


class CannotBench(CommwatchError):
    """A flag is wrong, or the sweep failed; the message gives the reason."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Wanted:
    """What to sweep, in about how many seconds. Empty ``backends``: the one that torch chooses by default."""

    backends: tuple[str, ...] = ()
    ops: tuple[str, ...] = DEFAULT
    sizes: tuple[int, ...] = ()
    seconds: float = 20.0


class Point(NamedTuple):
    """One row of the table."""

    op: str
    size_bytes: int
    time_s: float
    #: How many operations were timed.
    timed: int


@dataclass
class Outcome:
    """The results of a sweep on one backend."""

    backend: str
    group_size: int
    hosts: tuple[str, ...]
    points: list[Point] = field(default_factory=list)


@dataclass
class Swept:
    """The results of a sweep job."""

    outcomes: list[Outcome]
    #: What was not measured, with the reason, as text.
    left_out: list[str]


# -- flags ------------------------------------------------------------------------------------


def wanted(
    backends: str | None, ops: str | None, min_bytes: str, max_bytes: str, *, factor: float, seconds: float
) -> Wanted:
    """Return the sweep that the flags describe.

    Raises:
        CannotBench: a flag is wrong; the message names it.
    """
    chosen = operations(ops) or DEFAULT
    low, high = _bytes("--min-bytes", min_bytes), _bytes("--max-bytes", max_bytes)
    if not 4 <= low <= high:
        raise CannotBench(
            f"--min-bytes {min_bytes} and --max-bytes {max_bytes}: need at least 4 bytes, and --max-bytes not below --min-bytes"
        )
    if not factor >= 1.1:
        raise CannotBench(f"--factor {factor:g}: needs 1.1 or more")
    if not 0 < seconds <= 86400:
        raise CannotBench(f"--seconds {seconds:g}: needs more than 0 and at most 86400")
    sizes: dict[int, None] = {}
    size = float(low)
    while size <= high * (1 + 1e-9):
        sizes[int(size) // 4 * 4] = None
        size *= factor
    if len(sizes) > _MOST_SIZES:
        raise CannotBench(
            f"--factor {factor:g}: gives {len(sizes)} sizes, at most {_MOST_SIZES}; choose a larger factor"
        )
    return Wanted(_names("--backends", backends), chosen, tuple(sizes), seconds)


def operations(text: str | None) -> tuple[str, ...]:
    """Return the operations of ``--ops``; empty if it was not given.

    Raises:
        CannotBench: an operation cannot be swept.
    """
    chosen = _names("--ops", text)
    for op in chosen:
        if op not in SWEPT:
            raise CannotBench(f"--ops: no operation '{op}'; choose from {', '.join(SWEPT)}")
    return chosen


def _names(flag: str, text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(re.fullmatch(r"\w+", name) for name in names):
        raise CannotBench(f"{flag} {text}: needs comma-separated names")
    return names


def _bytes(flag: str, text: str) -> int:
    matched = re.fullmatch(r"(\d{1,12})([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if matched is None:
        raise CannotBench(f"{flag} {text}: needs a number of bytes, such as 4096, 64K or 1G")
    return int(matched[1]) * _UNITS[matched[2].upper()]


# -- sweep job --------------------------------------------------------------------------------


def run(
    command: list[str], what: Wanted, state: Path, env: Mapping[str, str], measured: Callable[[Line], None]
) -> Swept:
    """Run a sweep with a launch command; the job's output goes to standard error.

    Args:
        measured: called with each result as soon as it is there.

    Raises:
        CannotBench: the sweep could not start or did not finish.
    """
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise CannotBench(
            f"no such command: {command[0]}; check its name, and whether the environment of your job is active"
        )
    directory = references.directory(state)
    results = directory / f".sweep-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CannotBench(f"cannot write {directory}: {error.strerror}", 1) from None
    try:
        lines = Lines(results)

        def look() -> None:
            for line in lines.new():
                measured(line)

        code = _launch([*command, *_script(what, results)], env, look)
        return _read(results, code, command)
    finally:
        with suppress(OSError):
            results.unlink(missing_ok=True)


def _script(what: Wanted, results: Path) -> list[str]:
    """Return the words that are appended to the launch command."""
    found = find_spec("commwatch.probe.torch_sweep")
    assert found is not None
    assert found.origin is not None
    with socket.socket() as probe:  # for launchers that name no MASTER_PORT
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    flags = [f"--results={results}", f"--ops={','.join(what.ops)}", f"--sizes={','.join(map(str, what.sizes))}"]
    flags += [f"--seconds={what.seconds:g}", f"--port={port}"]
    return [found.origin, *flags, *([f"--backends={','.join(what.backends)}"] if what.backends else [])]


def _launch(command: list[str], env: Mapping[str, str], look: Callable[[], None]) -> int:
    """Run the command without the probe; return its exit code, 128 + n if signal n ended it.

    Args:
        look: called some times a second while it runs, and once after its end.
    """
    quiet = {name: value for name, value in env.items() if not name.startswith("COMMWATCH")}
    with Signals() as signals:
        try:
            child = signals.start(command, {**quiet, "COMMWATCH_DISABLE": "1"}, stdout=2, stdin=subprocess.DEVNULL)
            while (code := _ended(child)) is None:
                look()
            look()
        except OSError as error:
            raise CannotBench(f"cannot run {command[0]}: {error.strerror}") from None
        except Stopped as stopped:
            raise CannotBench("stopped", 128 + int(stopped.args[0])) from None
    return code if code >= 0 else 128 - code


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    """Wait for a moment; return the exit code if the process has ended."""
    try:
        return child.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return None


class Lines:
    """The lines of a results file that are complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[Line]:
        """Return the lines since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                complete = file.read().rpartition(b"\n")[0]
            self._at += len(complete) + bool(complete)
            return [json.loads(line) for line in complete.splitlines()]
        except (OSError, ValueError):
            return []


def _read(results: Path, code: int, command: list[str]) -> Swept:
    """Return the results that rank 0 wrote; raise CannotBench if they are not complete."""
    try:
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        lines = []
    errors = [line["error"] for line in lines if "error" in line]
    if errors:
        raise CannotBench(errors[0], 1)
    # Complete results count even if the interpreter crashes at exit (torch 2.13 on Gloo sometimes does).
    if not any("done" in line for line in lines):
        if code:
            raise CannotBench(f"{shlex.join(command)} failed with exit code {code}; see its output above", code)
        raise CannotBench(
            f"{shlex.join(command)} ended without a result: it must start Python with the arguments appended to it (torchrun ..., "
            f"srun python, mpirun -np 2 python), and its rank 0 must be able to write to {results.parent}", 1
        )  # fmt: skip
    (head,) = (line for line in lines if "ranks" in line)
    outcomes: dict[str, Outcome] = {}
    for line in lines:
        if "backend" in line:
            backend = line["backend"]
            outcome = outcomes.setdefault(backend, Outcome(backend, head["ranks"], tuple(head["hosts"])))
            outcome.points.append(Point(line["op"], line["size"], line["time_s"], line["timed"]))
    left_out = [
        f"{line['left_out']}{'' if line['op'] is None else ' ' + line['op']} left out: {line['why']}"
        for line in lines
        if "left_out" in line
    ]
    return Swept(list(outcomes.values()), left_out)


# -- references -------------------------------------------------------------------------------


def keep(outcome: Outcome, state: Path, command: list[str]) -> tuple[Path, Measured]:
    """Store the results of a sweep as a reference; return its file and the reference.

    Raises:
        references.BadReference: the file cannot be written.
    """
    points: dict[str, dict[int, float]] = {}
    for point in outcome.points:
        points.setdefault(point.op, {})[point.size_bytes] = point.time_s
    reference = _reference(
        "bench", outcome.backend, outcome.group_size, outcome.hosts, points=points, source=shlex.join(command)
    )
    return references.save(references.directory(state), reference), reference


def _reference(
    kind: str,
    backend: str,
    group_size: int,
    hosts: tuple[str, ...],
    *,
    points: dict[str, dict[int, float]],
    source: str,
) -> Measured:
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    name = f"{backend}, {group_size} ranks on {where}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    return Measured(kind, name, backend, group_size, hosts, time.time(), points, source)


def take_in(file: Path, state: Path, op: str | None) -> tuple[list[tuple[Path, Measured]], list[str]]:
    """Store an output of nccl-tests, one reference for each set of ranks; return them and remarks on what was left out.

    Args:
        op: the operation of runs that do not name theirs.

    Raises:
        CannotBench: ``file`` cannot be read, or has no results.
        references.BadReference: a reference cannot be written.
    """
    try:
        parsed = nccl_tests.parse(file.read_text(encoding="utf-8", errors="replace"), op)
    except OSError as error:
        raise CannotBench(f"{file}: {error.strerror}") from None
    groups: dict[tuple[int, tuple[str, ...]], dict[str, dict[int, float]]] = {}
    for found in parsed.runs:
        points = groups.setdefault((found.group_size, found.hosts), {}).setdefault(found.op, {})
        for size, time_s in found.times_s.items():
            points[size] = min(time_s, points.get(size, time_s))
    if not groups:
        raise CannotBench(f"{file}: {'; '.join(parsed.remarks)}", 1)
    kept = []
    for (group_size, hosts), found_points in groups.items():
        reference = _reference(
            "nccl_tests", "nccl", group_size, hosts, points=found_points, source=str(file.absolute())
        )
        kept.append((references.save(references.directory(state), reference), reference))
    return kept, [f"{file}: {remark}" for remark in parsed.remarks]


def as_json(kept: list[tuple[Path, Measured]], left_out: list[str]) -> dict[str, Any]:
    """Return the references for programs, in seconds, bytes, and bytes per second."""
    return {
        "references": [
            {
                "file": str(path), "kind": one.kind, "name": one.name, "backend": one.backend, "group_size": one.group_size,
                "hosts": list(one.hosts), "made_at": one.made_at, "source": one.source, "points": one.points,
                "fits": {
                    op: {"alpha_s": fitted.curve.alpha_s, "bandwidth": fitted.curve.bandwidth, "error": fitted.error}
                    for op, fitted in one.fits.items()
                },
            }
            for path, one in kept
        ],
        "left_out": left_out,
    }  # fmt: skip
