"""Parser of the output of nccl-tests and rccl-tests. Pure; no text makes it raise.

It reads both forms: the printed output (any version since 2.0, one run or several, between other output, tagged by mpirun or
srun), and the file of ``-J``. Times are the out-of-place ones, which frameworks use most, and in-place only where there are no
others; the smaller of the two would be a choice by chance. The size column is S of docs/numbers.md for every operation
(``max(sendBytes, expectedBytes)``: gathered for all_gather, before the split for reduce_scatter).

Source: NVIDIA/nccl-tests 2.19.6, src/util.cu (both forms), ``GetBw`` and ``GetCollByteCount`` of src/*.cu.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.text.units import counted

#: Most devices of a run, because each entry of a file may represent up to 65,536.
_MOST_DEVICES = 1 << 17
#: Program name without ``_perf`` to our operations; ``sendrecv`` sends to one neighbour while it receives from the other.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "alltoall": ("all_to_all",),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "sendrecv": ("send", "recv"),
}
#: Whether a program's lines have a reduction, and a root.
_LOOKS = {
    "all_reduce": (True, False), "all_gather": (False, False), "reduce_scatter": (True, False), "alltoall": (False, False),
    "broadcast": (False, True), "reduce": (True, True), "gather": (False, True), "scatter": (False, True),
    "sendrecv": (True, False),
}  # fmt: skip
#: Programs whose operation is not one of ours, or whose size does not determine the bytes that a rank sends.
UNSUPPORTED = ("hypercube", "alltoallv")
_TYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16",
    "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2", "char", "int",
)  # fmt: skip
_PROGRAM = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join((*PROGRAMS, *UNSUPPORTED))})_perf")
_BEGIN = re.compile(r"#\s*nThreads?:?\s+\d+\s+nGpus:?\s+\d+")
_DEVICE = re.compile(r"#\s*Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_ROW = re.compile(rf"(?<![\w.+-])(\d{{1,18}})\s+(\d{{1,18}})\s+(?:{'|'.join(_TYPES)})(?=\s)(.*)")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,2})?|N/A|nan|-?inf")


class Run(NamedTuple):
    """Measured times of one operation in one run."""

    op: str
    group_size: int
    hosts: tuple[str, ...]
    #: Seconds by S in bytes; the fastest where a size was measured several times.
    times_s: dict[int, float]


class Parsed(NamedTuple):
    """The runs in a text, and remarks on what was left out."""

    runs: list[Run]
    remarks: list[str]


class _Row(NamedTuple):
    """One line of the table."""

    size: int
    time_us: float
    #: GB/s.
    busbw: float
    #: Whether the line has a reduction, and a root.
    looks: tuple[bool, bool]


class _Run:
    """A run while it is being parsed."""

    def __init__(self, program: str | None) -> None:
        self.program = program
        self.devices: dict[int, tuple[int, str]] = {}
        self.rows: list[_Row] = []
        self.checked = False
        self.wrong = self.torn = 0

    def group(self) -> list[str]:
        """Return the hosts of the ranks in rank 0's communicator (NCCL_TESTS_SPLIT creates several)."""
        first = self.devices.get(min(self.devices, default=0), (0, ""))[0]
        return [host for group, host in self.devices.values() if group == first]


def parse(text: str, otherwise: str | None = None) -> Parsed:
    """Return the measured operations in a text; ``otherwise`` is the operation of runs that do not name theirs."""
    found = _from_json(text) if text.lstrip()[:1] == "{" else None
    runs = list(_from_text(text)) if found is None else [found]
    parsed = Parsed([], [])
    for run in runs:
        _conclude(run, parsed, otherwise)
    if not parsed.runs and not parsed.remarks:
        parsed.remarks.append("no output of nccl-tests in it")
    return parsed


def _conclude(run: _Run, parsed: Parsed, otherwise: str | None) -> None:
    """Add the operations of a run to ``parsed``, or a remark why there are none."""
    hosts = run.group()
    name = f"{run.program or 'a run'}{f' of {len(hosts)} ranks' if hosts else ''}"
    if run.program in UNSUPPORTED:
        parsed.remarks.append(f"{name}: not an operation of torch.distributed with a size of its own")
        return
    if run.wrong:
        parsed.remarks.append(f"{name}: {counted(run.wrong, 'line')} left out: wrong results (#wrong)")
    if run.torn:
        parsed.remarks.append(f"{name}: {counted(run.torn, 'line')} left out: torn")
    if not run.rows:
        if not run.wrong and not run.torn:
            parsed.remarks.append(f"{name}: no results")
        return
    if len(hosts) < 2:
        why = "one rank cannot communicate" if hosts else "the lines that name its ranks are missing"
        parsed.remarks.append(f"{name}: {why}")
        return
    ops = PROGRAMS[run.program] if run.program else _guess(run, len(hosts))
    if not ops and otherwise is not None:
        ops = (otherwise,)
    if not ops:
        parsed.remarks.append(f"{name}: the operation is unknown; name it with --ops")
        return
    rows = [row for row in run.rows if _holds(ops[0], len(hosts), row)]
    if fewer := len(run.rows) - len(rows):
        parsed.remarks.append(f"{name}: {counted(fewer, 'line')} left out: the bandwidth is not that of the operation")
    times: dict[int, float] = {}
    for row in rows:
        times[row.size] = min(row.time_us / 1e6, times.get(row.size, float("inf")))
    if times:
        parsed.runs.extend(Run(op, len(hosts), tuple(sorted(set(hosts))), times) for op in ops)


def _holds(op: str, group_size: int, row: _Row) -> bool:
    """Return whether the printed bus bandwidth (GB/s, two decimals) fits size and time.

    Not checked by algorithm bandwidth, because old versions use (n-1)/n of S in it for all_gather and reduce_scatter.
    """
    busbw = bus_factor(op, group_size)
    expected = 0.0 if busbw is None else busbw * row.size / row.time_us / 1e3
    return abs(row.busbw - expected) <= 0.011 + 0.01 * expected


def _guess(run: _Run, group_size: int) -> tuple[str, ...]:
    """Return the only operation that fits reduction, root and factor; empty if several fit (all_gather and alltoall do)."""
    large = [row for row in run.rows if row.busbw >= 1]
    fitting = [
        ops
        for program, ops in PROGRAMS.items()
        if large and all(row.looks == _LOOKS[program] and _holds(ops[0], group_size, row) for row in large)
    ]
    return fitting[0] if len(fitting) == 1 else ()


# -- the text form ----------------------------------------------------------------------------


def _from_text(text: str) -> Iterator[_Run]:
    run, program = None, None
    for line in text.splitlines():
        row = _ROW.search(line)
        if row is None:
            named = _PROGRAM.search(line)
            program = named[1] if named else program
        if _BEGIN.search(line):
            if run is not None:
                yield run
            run = _Run(program)
        elif row is not None:
            run = run or _Run(program)
            _add(run, row)
        elif run is not None:
            device = _DEVICE.search(line)
            if device:
                run.devices[int(device[1])] = (int(device[2] or 0), device[3])
            elif "#wrong" in line:
                run.checked = True
    if run is not None:
        yield run


def _add(run: _Run, row: re.Match[str]) -> None:
    """Add one line of the table: [redop] [root] then out-of-place and in-place columns, four (-I: eight) each."""
    words, redop = row[3].split(), "none"
    if words and not _NUMBER.fullmatch(words[0]):
        redop, words = words[0], words[1:]
    numbers = []
    for word in words:
        if not _NUMBER.fullmatch(word):
            break
        numbers.append(word)
    root, columns = (numbers[0], numbers[1:]) if len(numbers) % 4 == 1 else ("-1", numbers)
    if len(columns) not in (4, 8, 16):
        run.torn += 1
        return
    time_us, _, busbw, wrong = map(_number, columns[:4])
    looks = (redop != "none", not root.startswith("-"))
    _take(run, int(row[1]), (time_us, busbw, wrong if run.checked else 0), looks)


def _number(word: str) -> float | None:
    value = None if word in ("N/A", "nan") else float(word)
    return None if value in (float("inf"), float("-inf")) else value


def _take(
    run: _Run, size: int, values: tuple[float | None, float | None, float | None], looks: tuple[bool, bool]
) -> None:
    """Add a row from time (µs), bus bandwidth (GB/s) and number of wrong results; count wrong and torn ones."""
    time_us, busbw, wrong = values
    if wrong:
        run.wrong += 1
    elif time_us is None or busbw is None:
        run.torn += 1
    elif size > 0 < time_us:
        run.rows.append(_Row(size, time_us, busbw, looks))


# -- the form of -J ---------------------------------------------------------------------------


def _from_json(text: str) -> _Run | None:
    """Return the run; ``None`` if the text is not in that form, or cut off."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("results"), list):
        return None
    named = _PROGRAM.search(str(_first(found.get("args"))))
    run = _Run(named[1] if named else None)
    config = found["config"] if isinstance(found.get("config"), dict) else {}
    # Only the first device of each process is listed.
    each = _count(config.get("nthreads")) * _count(config.get("ngpus"))
    devices = config.get("devices")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("rank"), int):
            group = device.get("group")
            place = (group if isinstance(group, int) else 0, str(device.get("hostname")))
            if len(run.devices) + each > _MOST_DEVICES:
                run.torn += 1
                continue
            run.devices.update({device["rank"] + n: place for n in range(each)})
    for result in found["results"]:
        if isinstance(result, dict):
            _add_result(run, result)
    return run


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 1 <= value <= 256 else 1


def _add_result(run: _Run, result: dict[str, Any]) -> None:
    place = result.get("out_of_place") or result.get("in_place")
    size = result.get("size")
    if not isinstance(place, dict) or not isinstance(size, int) or not 0 <= size < 1 << 62:
        run.torn += 1
        return
    time = place.get("time", place.get("cpu_time"))
    looks = (result.get("redop") not in ("none", ""), not str(result.get("root")).strip().startswith("-"))
    _take(run, size, (_value(time), _value(place.get("bus_bw")), _value(place.get("nwrong"))), looks)


def _value(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if good else None


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) and found else ""
