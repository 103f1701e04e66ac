"""NCCL's RAS: a client for its socket, and parsers of its answers. The parsers are pure.

RAS is a thread in each process of a job (NCCL 2.24 and later, on by default). A query to one of them collects from all of them how
many collectives each rank of each communicator has launched, which ranks do not answer, and which processes are dead.

Source: NVIDIA/nccl, docs/userguide/source/troubleshooting/ras.rst, src/ras/client.cc (protocol), src/ras/client_support.cc (answers).
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from commwatch.wire import bounded
from commwatch_collectors.spans import gaps

#: NCCL's operation -> canonical name.
_OPS = {
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
}
#: Longest answer: ten thousand ranks in a few communicators take some tens of megabytes.
MOST_BYTES = 64 << 20
#: Limits of an answer: values in JSON; in text, ranks by operation that are counted but not named, which takes little text.
_MOST_VALUES, _MOST_CONTAINERS, MOST_UNNAMED = 1 << 22, 1 << 20, 1 << 19
#: Seconds: for a whole answer (RAS stops collecting after 10 s), and for the connection and the first line, which come at once.
_MOST_S, _FIRST_S = 12.0, 2.0
_MOST_LINE = 4096
#: States of a rank.
RUNNING, INIT, ENDING, ERROR, SILENT, DEAD, ABSENT = "running", "init", "ending", "error", "silent", "dead", "absent"
_SUCCESS, _IN_PROGRESS = 0, 7


#: Versions in which a query can end the job, from the first to before the second, and where that is reported.
_CRASHES = (
    ((2, 24), (2, 28), "#1669, #1718, #1762, #1996"),
    ((2, 29), (2, 31), "#2346"),
)


def refusal(version: str) -> str | None:
    """Return why this version of NCCL is not to be queried; ``None``: no reason is known.

    >>> refusal("2.27.5")
    'a query can crash NCCL 2.27.5 (NVIDIA/nccl #1669, #1718, #1762, #1996)'
    """
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    reports = next((reports for first, until, reports in _CRASHES if first <= parts < until), None)
    return None if reports is None else f"a query can crash NCCL {version} (NVIDIA/nccl {reports})"


class RasError(ValueError):
    """The answer is not from RAS, or has no known form; the message gives the details."""


class Member(NamedTuple):
    """One rank of a communicator."""

    rank: int
    #: As the process itself sees it; ``None`` if not known.
    pid: int | None
    #: ``running``, ``init``, ``ending``, ``error``, ``silent`` (does not answer), ``dead``, or ``absent`` (answers, but is no member).
    state: str
    #: Collectives launched by operation; ``None`` if not known.
    counts: dict[str, int] | None


class Communicator(NamedTuple):
    """One communicator over all nodes."""

    #: NCCL's hash, with the secondary one if there is one.
    comm: str
    size: int | None
    members: tuple[Member, ...]


class Status(NamedTuple):
    """One parsed answer."""

    nccl_version: str | None
    #: ``json`` or ``text``.
    form: str
    communicators: tuple[Communicator, ...]
    #: Pids of processes that RAS considers dead.
    dead: tuple[int, ...]


def ask(host: str, port: int, most_s: float = _MOST_S) -> str:
    """Return the status from the RAS at an address, as JSON if RAS can, within ``most_s`` seconds.

    Raises:
        OSError: no connection, or no answer in time.
        RasError: another service answers, or the answer is too long.
    """
    end = time.monotonic() + most_s
    with socket.create_connection((host, port), timeout=min(_FIRST_S, most_s)) as connection:
        hello = _command(connection, "CLIENT PROTOCOL 2", min(end, time.monotonic() + _FIRST_S))
        if not hello.upper().startswith("SERVER PROTOCOL "):
            raise RasError(f"the answer is not from NCCL's RAS: {hello[:80]!r}")
        _command(connection, "SET FORMAT json", end)  # before 2.28.7 an error, and then the answer is text
        connection.sendall(b"VERBOSE STATUS\n")
        answer = bytearray()
        for piece in _pieces(connection, end):
            answer += piece
            if len(answer) > MOST_BYTES:
                raise RasError(f"its answer is longer than {MOST_BYTES >> 20} MiB")
    return answer.decode("utf-8", "replace")


def _command(connection: socket.socket, command: str, end: float) -> str:
    """Send a command and return the line that answers it."""
    connection.sendall(f"{command}\n".encode())
    line = bytearray()
    for piece in _pieces(connection, end):
        line += piece
        if b"\n" in line:
            return line.split(b"\n")[0].decode("utf-8", "replace")
        if len(line) > _MOST_LINE:
            break
    raise RasError(f"the answer is not from NCCL's RAS: no line in answer to {command}")


def _pieces(connection: socket.socket, end: float) -> Iterator[bytes]:
    """Yield received bytes until the other side closes; raise ``TimeoutError`` at ``end``."""
    while True:
        rest = end - time.monotonic()
        if rest <= 0:
            raise TimeoutError("it did not send its answer in time")
        connection.settimeout(rest)
        piece = connection.recv(1 << 16)
        if not piece:
            return
        yield piece


def parse(answer: str) -> Status:
    """Parse an answer in either form; raise ``RasError`` if it has none."""
    return _parse_json(answer) if answer.lstrip()[:1] == "{" else _parse_text(answer)


# -- JSON -----------------------------------------------------------------------------------------


def _parse_json(answer: str) -> Status:
    try:
        parsed = bounded.load(answer, _MOST_VALUES, _MOST_CONTAINERS)
    except (ValueError, RecursionError) as error:
        raise RasError(f"its answer is not valid JSON: {str(error)[:100]}") from None
    raw = parsed.get("communicators")
    if not isinstance(raw, list):
        raise RasError("its answer has no communicators")
    found = [each for each in map(_communicator, raw) if each is not None]
    dead = {m.pid for comm in found for m in comm.members if m.state == DEAD and m.pid is not None}
    version = parsed.get("nccl_version")
    return Status(version[:40] if isinstance(version, str) else None, "json", tuple(found), tuple(sorted(dead)))


def _communicator(parsed: Any) -> Communicator | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("hash"), str):
        return None
    second = parsed.get("secondary_hash")
    members = [_member(each) for each in _listed(parsed.get("ranks"))]
    members += [_missing(each) for each in _listed(parsed.get("missing_ranks"))]
    known = {member.rank: member for member in members if member is not None}
    name = f"{parsed['hash'][:40]}{f' {second[:80]}' if isinstance(second, str) else ''}"
    return Communicator(name, _number(parsed.get("size")), tuple(known[rank] for rank in sorted(known)))


def _listed(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _member(parsed: dict[str, Any]) -> Member | None:
    rank, status, counts = _number(parsed.get("rank")), parsed.get("status"), parsed.get("collective_counts")
    if rank is None or not isinstance(status, dict):
        return None
    by_op = {}
    for name, count in counts.items() if isinstance(counts, dict) else ():
        number = _number(count)
        if number is not None:
            by_op[_OPS.get(name, name[:40])] = number
    return Member(rank, _number(parsed.get("pid")), _state(status), by_op if isinstance(counts, dict) else None)


def _state(status: dict[str, Any]) -> str:
    """Return the state, by the rules of RAS's own text form."""
    init, wrong = status.get("init_state"), status.get("async_error")
    if status.get("abort_flag") is True or status.get("finalize_called") is True or status.get("destroy_flag") is True:
        return ENDING
    if init not in (_SUCCESS, _IN_PROGRESS) or wrong not in (_SUCCESS, _IN_PROGRESS, None):
        return ERROR
    return RUNNING if init == _SUCCESS else INIT


def _missing(parsed: dict[str, Any]) -> Member | None:
    rank, status = _number(parsed.get("rank")), parsed.get("status")
    if rank is None or not isinstance(status, dict):
        return None
    dead, silent = status.get("considered_dead") is True, status.get("unresponsive") is True
    return Member(rank, _number(parsed.get("pid")), DEAD if dead else SILENT if silent else ABSENT, None)


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


# -- text -----------------------------------------------------------------------------------------

_VERSION = re.compile(r"NCCL version (\S{1,40}) compiled with")
_TABLE = re.compile(r" *(\d{1,6}) +\d{1,9} +\d{1,9} +[\d-]{1,20} +(\d{1,9}) +\d{1,9} +([A-Z]+) +[A-Z,]+")
_BLOCK = re.compile(r"#(\d{1,6})-\d{1,6} \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_COUNTS = re.compile(r"  Communicator ranks have different (\S{1,40}) operation counts")
_STATUSES = "  Communicator ranks have different status"
_MANY_STATUS = re.compile(r"  \d{1,9} ranks have status ([A-Z]{1,20})")
#: In the text -> state of a rank.
_STATES = {"RUNNING": RUNNING, "INIT": INIT, "FINALIZE": ENDING, "ABORT": ENDING, "NOCOMM": ABSENT, "UNKNOWN": ABSENT}
_MANY = re.compile(r"  (\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)")
_OF = r" -- (?:GPU [^-]{0,60}managed by process (\d{1,10}) on node .{0,80}|\[process .{0,60})"
_ONE = re.compile(
    rf"  Rank (\d{{1,9}})(?: has (?:launched up to operation (\d{{1,18}})|(not) launched any operations))?{_OF}"
)
_ONE_STATUS = re.compile(rf"  Rank (\d{{1,9}})(?: has status ([A-Z]{{1,20}}))?{_OF}")
#: Before NCCL 2.26.
_LISTED = re.compile(r"  The missing ranks?: ([\d, ]{1,4000})")
_PROCESS = re.compile(r"  Process (\d{1,10}) on node .{0,120}")


class _Block:
    """The text's entries on one communicator, which list only problems."""

    def __init__(self, comm: str, size: int | None, state: str) -> None:
        self.comm, self.size = comm, size
        #: That of the table, and those that the entry counts: each with its ranks, where they are named.
        self.state = state
        self.states: list[tuple[str, list[int]]] = []
        self.silent: dict[int, int | None] = {}
        self.pids: dict[int, int | None] = {}
        #: By operation: (count, ranks that have it, those of them that are named).
        self.counts: dict[str, list[tuple[int, int, list[int]]]] = {}

    def communicator(self, dead: set[int]) -> Communicator:
        """Return what is known of its ranks; a single count without named ranks belongs to all other ranks."""
        by_rank: dict[int, dict[str, int]] = {}
        for op, lots in self.counts.items():
            named = {rank: count for count, _, ranks in lots for rank in ranks}
            unnamed = [(count, many) for count, many, ranks in lots if not ranks]
            if len(unnamed) == 1 and self.size is not None:
                others = gaps([*named, *self.silent], self.size)
                if sum(map(len, others)) == unnamed[0][1]:
                    named.update(dict.fromkeys(chain.from_iterable(others), unnamed[0][0]))
            for rank, count in named.items():
                by_rank.setdefault(rank, {})[op] = count
        members = self._members(by_rank)
        members += [Member(rank, pid, DEAD if pid in dead else SILENT, None) for rank, pid in self.silent.items()]
        return Communicator(self.comm, self.size, tuple(sorted(members, key=lambda member: member.rank)))

    def _members(self, counts: dict[int, dict[str, int]]) -> list[Member]:
        """Return the ranks that answer, with their states; none where ranks without a name have several."""
        states = {rank: state for state, ranks in self.states for rank in ranks if rank not in self.silent}
        unnamed = {state for state, ranks in self.states if not ranks}
        if len(unnamed) > 1:
            return []
        others = unnamed.pop() if unnamed else RUNNING if self.states else self.state
        return [
            Member(rank, self.pids.get(rank), states.get(rank, others), counts.get(rank))
            for rank in states.keys() | counts.keys()
        ]


def _parse_text(answer: str) -> Status:
    version = _VERSION.search(answer[:2000])
    if version is None and "Job summary" not in answer:
        raise RasError("its answer has an unknown format")
    groups: dict[str, tuple[int, str]] = {}
    blocks: dict[str, _Block] = {}
    dead: set[int] = set()
    block: _Block | None = None
    section, op = "", ""
    for line in answer.split("\n"):
        row, head, counts = _TABLE.fullmatch(line), _BLOCK.fullmatch(line), _COUNTS.fullmatch(line)
        if row is not None and not blocks:
            groups[row[1]] = min(int(row[2]), 1 << 20), _STATES.get(row[3], ABSENT)
        elif head is not None:
            block = blocks.setdefault(head[2], _Block(head[2], *groups.get(head[1], (None, RUNNING))))
            section, op = head[3], ""
        elif line and not line.startswith(" "):
            block, section, op = None, line, ""
        elif block is not None and counts is not None:
            section, op = "MISMATCH", _OPS.get(counts[1], counts[1])
        elif block is not None and line == _STATUSES:
            section = "STATUS"
        elif block is not None and section == "STATUS":
            _read_status(block, line)
        elif block is not None:
            _read(block, section, op, line)
        elif section == "DEAD" and (process := _PROCESS.fullmatch(line)) is not None:
            dead.add(int(process[1]))
    lots = chain.from_iterable(lots for each in blocks.values() for lots in each.counts.values())
    if sum(many for _, many, ranks in lots if not ranks) > MOST_UNNAMED:
        raise RasError(f"its answer counts more than {MOST_UNNAMED} ranks without their names")
    communicators = tuple(each.communicator(dead) for each in blocks.values())
    return Status(version[1] if version else None, "text", communicators, tuple(sorted(dead)))


def _read(block: _Block, section: str, op: str, line: str) -> None:
    many, one, listed = _MANY.fullmatch(line), _ONE.fullmatch(line), _LISTED.fullmatch(line)
    if listed is not None:
        block.silent.update(dict.fromkeys((int(rank) for rank in re.findall(r"\d{1,9}", listed[1])), None))
    if many is not None and op:
        block.counts.setdefault(op, []).append((int(many[2] or 0), int(many[1]), []))
        return
    if one is None:
        return
    rank, pid = int(one[1]), int(one[4]) if one[4] else None
    if section == "INCOMPLETE":
        block.silent[rank] = pid
    elif op:
        block.pids[rank] = pid
        lots = block.counts.setdefault(op, [])
        if one[2] or one[3]:
            lots.append((int(one[2] or 0), 1, [rank]))
        elif lots:
            lots[-1][2].append(rank)


def _read_status(block: _Block, line: str) -> None:
    many, one = _MANY_STATUS.fullmatch(line), _ONE_STATUS.fullmatch(line)
    if many is not None:
        block.states.append((_STATES.get(many[1], ABSENT), []))
    elif one is not None:
        rank = int(one[1])
        block.pids[rank] = int(one[3]) if one[3] else None
        if one[2]:
            block.states.append((_STATES.get(one[2], ABSENT), [rank]))
        elif block.states:
            block.states[-1][1].append(rank)
