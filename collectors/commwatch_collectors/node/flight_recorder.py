"""Parser of dumps of PyTorch's Flight Recorder, pickled or JSON. Pure, and safe with untrusted dumps.

The pickle is read by a small machine that supports only the opcodes PyTorch writes: it builds lists, dicts, tuples,
text and numbers, nothing else. An ``Unpickler`` without globals is not safe: its memo can be made to fill all memory.

Source: pytorch/pytorch, torch/csrc/distributed/c10d/FlightRecorder.hpp and FlightRecorderDetail.hpp (dumps of version 2.10).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from commwatch.wire import bounded

#: Bytes; larger dumps are refused: two thousand operations with their stacks take some megabytes.
MOST_BYTES = 64 << 20
#: Steps of a pickle, values of JSON; and how many of these may be containers, which take the most memory. One operation has 40 containers,
#: most of them the frames of its stack.
MOST_STEPS, MOST_CONTAINERS = 5_000_000, 1_000_000
#: Operations read of one dump, the latest.
MOST_ENTRIES = 100_000
#: Groups whose operations are read, the latest used: each is compared with all operations in flight.
MOST_GROUPS = 256
_MOST_TEXT = 500
#: Names that ProcessGroups give operations (after the backend's name) -> canonical names, where they differ.
_OPS = {
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
#: Parts of paths of files that are not the user's code.
_NOT_THEIRS = ("/torch/", "/commwatch/probe/", "/commwatch/wire/")
#: Bytes of an element, by ATen's name of its type.
_WIDTHS = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


class BadDump(ValueError):
    """The data is not a valid dump of the Flight Recorder; the message gives the reason."""


class Entry(NamedTuple):
    """One operation in the recorder's ring buffer."""

    #: The process group's name and description.
    group: tuple[str, str]
    #: Number among the group's collectives, or among its sends and receives.
    seq: int
    op: str
    is_p2p: bool
    dtype: str | None
    #: S as nccl-tests counts it; ``None`` if not known.
    size_bytes: int | None
    #: ``scheduled``, ``started`` or ``completed``; on Gloo always the first.
    state: str
    #: Whether its device has reached it; ``None``: operations on GPUs are not timed in this job, so only their ends are seen.
    reached: bool | None
    #: Whether it has ended.
    done: bool
    #: Unix time in ns; the end is when the watchdog noticed it.
    created_ns: int
    completed_ns: int | None
    #: The caller: the first frame outside of torch.
    frame: str | None


class Dump(NamedTuple):
    """The records of one rank."""

    version: str
    #: The oldest first.
    entries: list[Entry]
    #: Global ranks by group, where the dump has them.
    members: dict[tuple[str, str], tuple[int, ...]]
    #: Whether older operations were overwritten.
    cut: bool
    #: Entries of unknown form, or of groups past ``MOST_GROUPS``, which are skipped.
    unknown: int


def load(data: bytes) -> Dump:
    """Parse a dump; raise ``BadDump`` if it is invalid."""
    if len(data) > MOST_BYTES:
        raise BadDump(f"larger than {MOST_BYTES >> 20} MiB")
    try:
        parsed = bounded.load(data, MOST_STEPS, MOST_CONTAINERS) if data[:1] in (b"{", b" ", b"\n") else unpickled(data)
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        raise BadDump(f"not a dump of the Flight Recorder: {str(error)[:200]}") from None
    if not isinstance(parsed, dict) or "version" not in parsed:
        raise BadDump("not a dump of the Flight Recorder: it has no version")
    raw = parsed.get("entries")
    raw = raw[-MOST_ENTRIES:] if isinstance(raw, list) else []
    starts_seen = any(isinstance(each, dict) and each.get("time_discovered_started_ns") is not None for each in raw)
    read = [_entry(each, starts_seen) for each in raw]
    known = [entry for entry in read if entry is not None]
    groups = set(islice({entry.group: None for entry in reversed(known)}, MOST_GROUPS))
    entries = [entry for entry in known if entry.group in groups]
    first = raw[0].get("record_id") if raw and isinstance(raw[0], dict) else None
    cut = isinstance(first, int) and first > 0
    return Dump(_text(parsed["version"]) or "unknown", entries, _members(parsed), cut, len(read) - len(entries))


# -- entries --------------------------------------------------------------------------------------


def _members(parsed: dict[Any, Any]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the ranks by group, where they are known: ``pg_config`` has them as text, such as ``[0, 1]``."""
    config = parsed.get("pg_config")
    found = {}
    for each in config.values() if isinstance(config, dict) else ():
        if isinstance(each, dict):
            name, desc, ranks = (_text(each.get(key)) for key in ("name", "desc", "ranks"))
            numbers = tuple(int(number) for number in re.findall(r"\d{1,9}", ranks or ""))
            if numbers and name is not None:
                found[name, desc or ""] = numbers
    return found


def _entry(parsed: Any, starts_seen: bool) -> Entry | None:
    if not isinstance(parsed, dict):
        return None
    group = parsed.get("process_group")
    name = _text(parsed.get("profiling_name"))
    created = _number(parsed.get("time_created_ns"))
    is_p2p = parsed.get("is_p2p") is True
    seq = _number(parsed.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    if not isinstance(group, (list, tuple)) or len(group) != 2 or name is None or created is None or seq is None:
        return None
    backend, _, op = name.rpartition(":")
    op = op.split(" ")[0]
    state = parsed.get("state")
    completed = _number(parsed.get("time_discovered_completed_ns")) or None
    # Retired operations have ended, except on NCCL, which also retires failed ones.
    done = state == "completed" or (parsed.get("retired") is True and backend != "nccl")
    inputs, outputs = (_data(parsed.get(f"{way}_sizes"), parsed.get(f"{way}_dtypes")) for way in ("input", "output"))
    sizes = [size for size, _ in (inputs, outputs) if size is not None]
    return Entry(
        group=(_text(group[0]) or "", _text(group[1]) or ""),
        seq=seq,
        op=_OPS.get(op, op),
        is_p2p=is_p2p,
        dtype=inputs[1] or outputs[1],
        size_bytes=max(sizes, default=None),
        state=state if state in ("scheduled", "started", "completed") else "unknown",
        reached=True if done or state == "started" or "ccl" not in backend else False if starts_seen else None,
        done=done,
        created_ns=created,
        completed_ns=completed,
        frame=_frame(parsed.get("frames")),
    )


def _data(shapes: Any, dtypes: Any) -> tuple[int | None, str | None]:
    """Return size in bytes and type of tensors; ``None`` where they are not known."""
    if not isinstance(shapes, list) or not isinstance(dtypes, list) or not shapes or len(shapes) != len(dtypes):
        return None, None
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        width = _WIDTHS.get(dtype) if isinstance(dtype, str) else None
        if width is None or not isinstance(shape, list):
            return None, _text(dtypes[0])
        for length in shape:
            number = _number(length)
            if number is None:
                return None, _text(dtypes[0])
            width = min(width * number, 1 << 62)
        total += width
    return total, _text(dtypes[0])


def _frame(frames: Any) -> str | None:
    """Return the innermost frame that is neither in torch nor in our hook, else the innermost frame."""
    valid_frames = [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, list) else []
    others = (
        frame for frame in valid_frames if not any(part in (_text(frame.get("filename")) or "") for part in _NOT_THEIRS)
    )
    frame = next(others, valid_frames[0] if valid_frames else None)
    if frame is None:
        return None
    file, line, name = _text(frame.get("filename")), _number(frame.get("line")), _text(frame.get("name"))
    return f"{file or '?'}:{'?' if line is None else line} in {name or '?'}"


def _text(value: Any) -> str | None:
    """Return text of bounded length on one line; ``None`` for other values."""
    return "".join(c if c.isprintable() else "?" for c in value[:_MOST_TEXT]) if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


# -- the pickle -----------------------------------------------------------------------------------


def unpickled(data: bytes) -> Any:
    """Return the value of a pickle that holds only containers, text and numbers.

    Raises ``ValueError``, ``IndexError`` or ``OverflowError`` if it holds anything else, or is not a pickle.
    """
    import pickletools  # large, and only needed for dumps

    machine, containers = _Machine(), 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number > MOST_STEPS:
            raise ValueError(f"its pickle has more than {MOST_STEPS} steps")
        if opcode.name == "STOP":
            break
        containers += opcode.name in _CONTAINERS
        if containers > MOST_CONTAINERS:
            raise ValueError(f"its pickle has more than {MOST_CONTAINERS} containers")
        if opcode.name in _VALUES:
            machine.stack.append(argument)
        elif opcode.name in _CONSTANTS:
            machine.stack.append(_CONSTANTS[opcode.name])
        elif opcode.name in _EMPTY:
            machine.stack.append(_EMPTY[opcode.name]())
        elif opcode.name in _STEPS:
            _STEPS[opcode.name](machine, argument)
        elif opcode.name not in _IGNORED:
            raise ValueError(f"its pickle uses {opcode.name}")
    return machine.stack.pop()


class _Machine:
    """The pickle machine: a stack with marks, and a memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def put(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, number: int) -> None:
        if number not in self._memo:
            raise ValueError(f"its pickle refers to {number}, which it does not define")
        self.stack.append(self._memo[number])

    def append(self, _: Any) -> None:
        value = self.stack.pop()
        self._extend([value])

    def appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def set_items(self, _: Any) -> None:
        self._update(self._since_mark())

    def tuple_of(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def pair(self, _: Any) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.stack.append((first, second))

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("its pickle appends to something that is not a list")
        self.stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        target, keys = self.stack[-1], values[::2]
        if not isinstance(target, dict) or len(values) % 2 or not all(type(key) in (str, int) for key in keys):
            raise ValueError("its pickle sets an item of something that is not a dict")
        target.update(zip(keys, values[1::2], strict=True))


_VALUES = frozenset(
    {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"},
)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_CONTAINERS = frozenset({*_EMPTY, "TUPLE", "TUPLE2"})
_IGNORED = frozenset({"PROTO", "FRAME"})
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "TUPLE": _Machine.tuple_of,
    "TUPLE2": _Machine.pair,
}
