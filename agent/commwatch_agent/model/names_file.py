"""Contents of a trainer's names file: groups, operations, dtypes, parts of the model, NCCL log files, GPU. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.model.cells import (
    LATEST_KNOWN,
    MOST_APART,
    OTHER_GROUP,
    OTHER_ID,
    UNKNOWN_GROUP,
    GroupInfo,
    count_of,
)
from commwatch_agent.model.group_labels import MOST_NAME, label
from commwatch_agent.model.model_parts.tables import PartTable, table_of, text_of
from commwatch_agent.model.shares import Account, Room
from commwatch_collectors.node.gpu import GpuPlace, place_of

#: What a rank may report as the address of an agent, and how many.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_MOST_PEERS = 1024
#: What a rank may report as the id of its run.
_RUN = re.compile(r"[0-9a-f]{16}")
#: What a rank may report as a framework in use, and how many.
_FRAMEWORK = re.compile(r"[a-z0-9_]{1,20}")
_MOST_FRAMEWORKS = 16
#: At most so many groups of the same ranks with one label have names of their own.
_MOST_ALIKE = 8
#: Characters of the name of an exception's type, of an operator or dtype, of any other text.
_MOST_TYPE, _MOST_OP, _MOST_SAYS, _MOST_TEXT = 80, 200, 200, 4096
#: Codes of operators and dtypes have one byte in a record.
_CODES = 256
#: Bytes that an entry takes in memory, besides its texts and members; and those of each member, or of each text.
_ENTRY_BYTES, _EACH_BYTES = 600, 64
#: Most tables of the parts of a model.
_MOST_TABLES = 65
#: Most files of a process's output.
_MOST_OUTPUTS = 4
#: Most sets of replicated parameters, most checksums of a set, and characters of a parameter's name.
_MOST_SETS, _MOST_SUMS, _MOST_NAME = 1024, 1024, 200


class Learned(NamedTuple):
    """What some entries have added or changed: groups by number, and names by kind (``op``, ``dtype`` or ``parts``) and code."""

    groups: list[tuple[int, GroupInfo]]
    codes: list[tuple[str, int, str]]


class OutputFile(NamedTuple):
    """A file that is a process's standard output or error."""

    path: str
    #: Device and number of its inode: another file may get its name.
    inode: tuple[int, int]
    #: Its bytes before the process recorded it; they are of others.
    size: int


class Announced(NamedTuple):
    """A set of parameters that a rank has announced: they must be equal on all ranks of a group."""

    #: The group's number in the ring; equal for the same parameters on all ranks.
    group: int
    key: str
    #: Of each checksum: a parameter, or neighbours that share it.
    names: tuple[str, ...]


def _address(text: object) -> str:
    """Return the address of an agent; raise ``ValueError`` if it is more than scheme, host and port."""
    if isinstance(text, str) and _URL.fullmatch(text):
        return text
    raise ValueError(f"{text!r}: not an agent's address")


def _run(text: object) -> str:
    """Return the id of a run; raise ``ValueError`` if the job's store had something else in its place."""
    if isinstance(text, str) and _RUN.fullmatch(text):
        return text
    raise ValueError(f"{text!r}: not the id of a run")


def _framework(text: object) -> str:
    """Return the name of a framework; raise ``ValueError`` if it is none."""
    if isinstance(text, str) and _FRAMEWORK.fullmatch(text):
        return text
    raise ValueError(f"{text!r}: not the name of a framework")


def _text(value: object) -> str:
    """Return a text of a trainer; raise ``ValueError`` if it is too long to be a name or a path."""
    text = str(value)
    if len(text) > _MOST_TEXT:
        raise ValueError(f"a text of {len(text)} characters")
    return text


def _below(value: object, limit: int) -> int:
    """Return a number of a trainer; raise ``ValueError`` if no record can hold it."""
    number = count_of(value)
    if number >= limit:
        raise ValueError(f"{number} is out of range")
    return number


def _of_file(value: object) -> int:
    """Return a number of a file, such as its size; raise ``ValueError`` if no file has it."""
    if isinstance(value, int) and 0 <= value < 1 << 64:
        return value
    raise ValueError(f"{value!r} is out of range")


def _group(entry: dict[str, Any]) -> GroupInfo:
    """Return a group of the names file; raise ``KeyError``, ``OverflowError``, ``TypeError`` or ``ValueError`` if damaged."""
    ranks = tuple(count_of(r) for r in entry["ranks"]) if entry["ranks"] is not None else None
    name, description = str(entry["name"])[:_MOST_TEXT], str(entry["desc"])[:_MOST_TEXT]
    size = count_of(entry["size"])
    return GroupInfo(
        _text(entry["group_id"]),
        label(name, description, ranks, size),
        name,
        description,
        ranks,
        size,
        bool(entry["aligned"]),
        _text(entry["backend"]) if entry.get("backend") else None,
    )


def _bytes_of(info: GroupInfo | None) -> int:
    """Return about how many bytes a group takes in memory."""
    if info is None:
        return 0
    texts = (info.group_id, info.label, info.name, info.description)
    return _ENTRY_BYTES + sum(map(len, texts)) + _EACH_BYTES * len(info.ranks or ())


def _bytes_of_texts(texts: Iterable[str]) -> int:
    return sum(_EACH_BYTES + len(text) for text in texts)


def _bytes_of_table(text: str) -> int:
    """Return about how many bytes a table of parts takes in memory: a place in an order takes more than in its text."""
    return _ENTRY_BYTES + 8 * len(text)


class Names:
    """The names of one ring.

    Args:
        account: of the memory that they take, in bytes; default: room of their own.
    """

    def __init__(self, account: Account | None = None) -> None:
        self.account = Room(1 << 30).account() if account is None else account
        self.groups: dict[int, GroupInfo] = {}
        #: By label and ranks: ``group_id`` of the groups that have labels of their own, the first of them without torch's name.
        self._alike: dict[tuple[str, tuple[int, ...] | None], list[str]] = {}
        #: The groups in it beyond ``MOST_APART``, oldest first; and the number of groups ever announced.
        self._rest: deque[int] = deque()
        self.groups_announced = 0
        self.ops: dict[int, str] = dict(enumerate(ev.OPS, start=1))
        self.dtypes: dict[int, str] = {}
        #: Where this rank's NCCL writes its debug output, if into a file.
        self.nccl_log: str | None = None
        self.outputs: tuple[OutputFile, ...] = ()
        self.gpu: GpuPlace | None = None  # the GPU that the trainer reported
        #: The folder that NCCL Inspector dumps into.
        self.inspector: str | None = None
        #: The addresses of the agents of the job's nodes, as its ranks have found them.
        self.peers: tuple[str, ...] = ()
        #: What only the ranks of its run have, on all nodes; empty: not known.
        self.run = ""
        #: The frameworks that exchange its gradients; ``None``: not known.
        self.frameworks: tuple[str, ...] | None = None
        #: Sets of replicated parameters, by number.
        self.replicas: dict[int, Announced] = {}
        #: Tables of the parts of the model, by number.
        self.parts: dict[int, PartTable] = {}
        #: Type, place and words of the exception that ended the process; empty: none, or not known.
        self.raised = self.raised_at = self.raised_says = ""
        #: Numbers of the groups that the process has destroyed.
        self.destroyed: set[int] = set()

    def learn(self, entries: Iterable[dict[str, Any]]) -> Learned:
        """Read entries of the names file and skip damaged ones, and those without room. Returns what is new or changed."""
        learned = Learned([], [])
        for entry in entries:
            try:
                if "group" in entry:
                    learned.groups.extend(self._learn_group(_below(entry["group"], OTHER_ID), _group(entry)))
                elif "dtype" in entry:
                    self._learn_code("dtype", self.dtypes, entry, learned)
                elif "op" in entry:
                    self._learn_code("op", self.ops, entry, learned)
                elif "parts" in entry:
                    self._learn_parts(_below(entry["parts"], _MOST_TABLES), table_of(entry), learned)
                else:
                    self._learn_state(entry)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                continue
        return learned

    def _learn_code(self, kind: str, known: dict[int, str], entry: dict[str, Any], learned: Learned) -> None:
        code, name = _below(entry[kind], _CODES), str(entry["name"])[:_MOST_OP]
        before = known.get(code)
        if before != name and self.account.change(_bytes_of_texts([before] if before else []), _bytes_of_texts([name])):
            known[code] = name
            learned.codes.append((kind, code, name))

    def _learn_parts(self, number: int, table: PartTable, learned: Learned) -> None:
        before, text = self.parts.get(number), text_of(table)
        taken = 0 if before is None else _bytes_of_table(text_of(before))
        if before != table and self.account.change(taken, _bytes_of_table(text)):
            self.parts[number] = table
            learned.codes.append(("parts", number, text))

    def _learn_state(self, entry: dict[str, Any]) -> None:
        """Read an entry about the process itself."""
        if "nccl_log" in entry:
            self.nccl_log = self._path(self.nccl_log, entry["nccl_log"])
        elif "output" in entry:
            device, inode, size = (_of_file(entry[name]) for name in ("device", "inode", "size"))
            self._add_output(OutputFile(_text(entry["output"]), (device, inode), size))
        elif "gpu" in entry:
            place = place_of(entry["gpu"])
            _text(place.uuid + place.bus_id + place.mig)
            self.gpu = place
        elif "inspector" in entry:
            self.inspector = self._path(self.inspector, entry["inspector"])
        elif "peers" in entry:
            peers = tuple(dict.fromkeys(map(_address, entry["peers"][:_MOST_PEERS])))
            if self.account.change(_bytes_of_texts(self.peers), _bytes_of_texts(peers)):
                self.peers = peers
        elif "run" in entry:
            self.run = _run(entry["run"])
        elif "frameworks" in entry:
            self.frameworks = tuple(map(_framework, entry["frameworks"][:_MOST_FRAMEWORKS]))
        elif "replicas" in entry:
            self._announce(count_of(entry["replicas"]), entry)
        elif "raised" in entry:
            self.raised, self.raised_at = (str(entry.get(name, ""))[:_MOST_TYPE] for name in ("raised", "at"))
            self.raised_says = str(entry.get("says", ""))[:_MOST_SAYS]
        elif "destroyed" in entry:
            self.destroyed |= self.groups.keys() & {count_of(entry["destroyed"])}

    def _path(self, before: str | None, value: object) -> str | None:
        """Return a path of an entry; the one before where there is no room for it."""
        path = _text(value)
        return path if self.account.change(len(before or ""), len(path)) else before

    def _add_output(self, file: OutputFile) -> None:
        known = {each.inode for each in self.outputs}
        if file.inode not in known and len(known) < _MOST_OUTPUTS and self.account.take(_bytes_of_texts([file.path])):
            self.outputs = *self.outputs, file

    def _announce(self, number: int, entry: dict[str, Any]) -> None:
        names = tuple(str(name)[:_MOST_NAME] for name in entry["tensors"][:_MOST_SUMS])
        known = self.replicas.get(number)
        before = 0 if known is None else _ENTRY_BYTES + _bytes_of_texts(known.names)
        announced = Announced(count_of(entry["in"]), str(entry["key"])[:_MOST_NAME], names)
        is_allowed = known is not None or len(self.replicas) < _MOST_SETS
        if is_allowed and self.account.change(before, _ENTRY_BYTES + _bytes_of_texts(names)):
            self.replicas[number] = announced

    def _learn_group(self, small_id: int, info: GroupInfo) -> Iterator[tuple[int, GroupInfo]]:
        """Store a group, and drop the oldest of the rest if there are too many; yield the groups that are new."""
        known = self.groups.get(small_id)
        if small_id < MOST_APART:
            info = info._replace(label=self._told_apart(info))
        if known == info or not self.account.change(_bytes_of(known), _bytes_of(info)):
            return
        yield small_id, info
        self.groups_announced += known is None
        self.groups[small_id] = info
        if small_id < MOST_APART or known is not None:
            return
        if OTHER_ID not in self.groups:
            self.groups[OTHER_ID] = OTHER_GROUP
            yield OTHER_ID, OTHER_GROUP
        self._rest.append(small_id)
        if len(self._rest) > LATEST_KNOWN:
            dropped = self._rest.popleft()
            self.destroyed.discard(dropped)
            self.account.give(_bytes_of(self.groups.pop(dropped, None)))

    def _told_apart(self, info: GroupInfo) -> str:
        """Return the label of a group; with torch's name of it, which all its ranks know, if earlier ones of the same ranks have that label, but few.

        A job may make such groups anew again and again.
        """
        alike = self._alike.setdefault((info.label, info.ranks), [])
        if info.group_id not in alike and len(alike) < _MOST_ALIKE:
            alike.append(info.group_id)
        return f"{info.label} #{info.name[-MOST_NAME:]}" if info.group_id in alike[1:] else info.label

    def group(self, small_id: int) -> GroupInfo:
        """Return the group of a record; a placeholder where its name is not known."""
        return self.groups.get(small_id) or (OTHER_GROUP if MOST_APART <= small_id < ev.NO_GROUP else UNKNOWN_GROUP)

    def has_names_of(self, record: ev.Record) -> bool:
        """Whether the names of its operation, dtype and group are known, or it has none."""
        return (
            record.op in self.ops
            and (record.dtype == ev.NO_DTYPE or record.dtype in self.dtypes)
            and (record.group == ev.NO_GROUP or self.group(record.group) is not UNKNOWN_GROUP)
        )

    def op_name(self, code: int) -> str:
        """Return an op's canonical name, else the name from the names file, else ``unknown``."""
        return self.ops.get(code, "unknown")
