"""Reads dumps of PyTorch's Flight Recorder: each rank's last operations, and which ranks have not entered which operation.

The dumps of several ranks become the views that ``verdicts`` judges, so that verdicts read alike whatever their source.
Clocks of different nodes are not compared: ages are within one dump, up to the time when its file was written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from commwatch.wire import crossing
from commwatch.wire.crossing import ANYBODY, Trust
from commwatch_agent.model.views import GroupView, InFlight, RankView
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import folded
from commwatch_agent.text.terminal_text import MOST_CELLS
from commwatch_agent.text.units import counted, seconds
from commwatch_collectors.node.flight_recorder import MOST_BYTES, BadDump, Dump, Entry, load
from commwatch_collectors.spans import spans

#: The job in verdicts, because dumps do not name theirs.
JOB = "the dumps"
SOURCE = "flight_recorder"
_UNNAMED = ("", "undefined")


@dataclass(frozen=True)
class RankDump:
    """The dump of one rank."""

    file: str
    rank: int
    #: Unix time in ns at which it was written.
    at_ns: int
    dump: Dump


@dataclass(frozen=True)
class LastOperation:
    """The position of a rank in one group: its oldest collective that has not ended, else its latest."""

    group: str
    op: str
    seq: int
    #: ``scheduled``, ``started`` or ``completed``; with Gloo always the first.
    state: str
    done: bool
    #: Seconds from its call until the dump was written.
    age_s: float
    #: Collectives of the group that wait behind it.
    behind: int
    where: str | None


def take(path: Path, rank: int | None = None, *, trust: Trust = ANYBODY, start: int | None = None) -> RankDump:
    """Read a dump; without ``rank``, its rank is the number at the end of the file name, as PyTorch writes it.

    Args:
        trust: whose file it is.
        start: as for ``crossing.open_file``.

    Raises:
        BadDump: the file is not a dump, or its rank is not known.
        OSError: the file cannot be read.
    """
    try:
        fd = crossing.open_file(path if start is not None else Path(os.path.realpath(path)), trust, start=start)
    except crossing.Refused as error:
        raise BadDump(error.strerror) from None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        dump = load(file.read(MOST_BYTES + 1))
    if rank is None:
        number = re.search(r"(\d{1,9})(\.[A-Za-z]+)?$", path.name)
        if number is None:
            raise BadDump("its name does not end with the rank's number")
        rank = int(number[1])
    newest = max((max(each.created_ns, each.completed_ns or 0) for each in dump.entries), default=0)
    return RankDump(str(path), rank, max(about.st_mtime_ns, newest), dump)


def take_all(paths: Iterable[Path]) -> tuple[list[RankDump], dict[str, str]]:
    """Return one dump per rank, and by file why others were skipped."""
    dumps: dict[int, RankDump] = {}
    damaged = {}
    for path in paths:
        try:
            taken = take(path)
        except (BadDump, OSError) as error:
            damaged[str(path)] = getattr(error, "strerror", None) or str(error)
            continue
        if taken.rank in dumps:
            damaged[str(path)] = f"a second dump of rank {taken.rank}, after {dumps[taken.rank].file}"
        dumps.setdefault(taken.rank, taken)
    return list(dumps.values()), damaged


def label(group: tuple[str, str]) -> str:
    """Return the label of a group for people: its description, or its name if there is none."""
    name, desc = group
    return name if desc in _UNNAMED else desc


def last_operations(taken: RankDump) -> list[LastOperation]:
    """Return the rank's position in each of its groups, the longest wait first."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in taken.dump.entries:
        if not entry.is_p2p:
            groups.setdefault(entry.group, []).append(entry)
    found = []
    for group, entries in groups.items():
        waiting = [entry for entry in entries if not entry.done]
        entry = waiting[0] if waiting else entries[-1]
        age_s = max(0, taken.at_ns - entry.created_ns) / 1e9
        behind = max(0, len(waiting) - 1)
        found.append(
            LastOperation(label(group), entry.op, entry.seq, entry.state, entry.done, age_s, behind, entry.frame)
        )
    return sorted(found, key=lambda op: (op.done, -op.age_s))


# -- the views that are judged --------------------------------------------------------------------


def views(dumps: Iterable[RankDump]) -> tuple[list[RankView], list[GroupView]]:
    """Return the ranks of the dumps and their groups, as they are judged.

    A rank without a dump is blamed only if a dump lists it as a member of a group.
    """
    by_rank = {taken.rank: taken for taken in dumps}
    groups = _groups(by_rank)
    return [_rank(taken, groups) for taken in by_rank.values()], list(groups.values())


def _groups(by_rank: dict[int, RankDump]) -> dict[tuple[str, str, tuple[int, ...] | None], GroupView]:
    """Return the groups by name, description and known members, because a mesh has several groups of one name."""
    users: dict[tuple[str, str, tuple[int, ...] | None], set[int]] = {}
    for rank, taken in by_rank.items():
        for group in {entry.group for entry in taken.dump.entries}:
            users.setdefault((*group, taken.dump.members.get(group)), set()).add(rank)
    views = {}
    for (name, desc, members), ranks in users.items():
        everybody = members or tuple(sorted(by_rank if desc == "default_pg" else ranks))
        group_id = f"{name}:{desc}:{spans(everybody)}"
        about = (label((name, desc)), name, desc, len(everybody), list(everybody), sorted(ranks))
        views[name, desc, members] = GroupView(JOB, group_id, *about, aligned=True)
    return views


def _rank(taken: RankDump, groups: dict[tuple[str, str, tuple[int, ...] | None], GroupView]) -> RankView:
    dump = taken.dump
    in_flight: list[InFlight] = []
    last_seq: dict[str, int] = {}
    used = set()
    of_group: dict[tuple[str, str], list[Entry]] = {}
    for entry in dump.entries:
        of_group.setdefault(entry.group, []).append(entry)
    waiting_since: dict[tuple[str, str], int] = {}
    for entry in dump.entries:
        if not entry.done and not entry.is_p2p:
            waiting_since[entry.group] = min(entry.created_ns, waiting_since.get(entry.group, entry.created_ns))
    for group, its in of_group.items():
        view = groups[(*group, dump.members.get(group))]
        used.add(view.group_id)
        entries = [entry for entry in its if not entry.is_p2p]
        ended = [entry for entry in entries if entry.done]
        if ended:
            last_seq[view.group_id] = max(entry.seq for entry in ended)
        took = [(entry.completed_ns - entry.created_ns) / 1e9 for entry in ended if entry.completed_ns]
        usual_s = max(0.0, median(took)) if took else 0.0 if ended else None
        for entry in entries:
            if not entry.done:
                in_flight.append(_in_flight(entry, view, taken.at_ns, usual_s, _is_queued(entry, waiting_since)))
    # Others may wait for an operation that has been overwritten in this dump.
    unsure = dump.cut and any(
        taken.rank in (view.members or ()) and view.group_id not in used for view in groups.values()
    )
    return RankView(
        job_id=JOB,
        rank=taken.rank,
        restart=0,
        state="running",
        host="",
        local_rank=None,
        pid=0,
        hook="",
        process=None,
        heartbeat_age_s=None,
        last_seq=last_seq,
        launched_s={},
        in_flight=in_flight,
        failed=[],
        records=len(dump.entries),
        lost=dump.unknown,
        overflow_s=0.0 if unsure else None,
    )


def _is_queued(entry: Entry, waiting_since: Mapping[tuple[str, str], int]) -> bool:
    """Return whether an operation still waits for its turn on the device, so that the rank has not joined it.

    Where the recorder does not see starts, an operation that was called after one of another group that has not ended counts as queued: on
    the GPU it nearly always waits for the other's result.

    Args:
        waiting_since: when the rank called its oldest collective that has not ended, in Unix ns, by group.
    """
    if entry.reached is not None:
        return not entry.reached
    return any(since_ns < entry.created_ns for group, since_ns in waiting_since.items() if group != entry.group)


def _in_flight(entry: Entry, group: GroupView, at_ns: int, usual_s: float | None, queued: bool) -> InFlight:
    age_s = max(0, at_ns - entry.created_ns) / 1e9
    about = (entry.op, group.group, group.group_id, entry.seq)
    return InFlight(*about, None, None, entry.dtype, entry.size_bytes, age_s, False, None, usual_s, queued=queued)


# -- output ---------------------------------------------------------------------------------------


def positions(taken: RankDump) -> list[str]:
    """Return a line on the rank's position in each group."""
    lines = []
    for op in last_operations(taken):
        how = (
            "completed, the latest"
            if op.done
            else f"{op.state}, not completed, called {seconds(op.age_s)} before the dump"
        )
        behind = f", {op.behind} more behind it" if op.behind else ""
        lines.append(f"{op.group}: {op.op} {op.seq} {how}{behind}{f' ({op.where})' if op.where else ''}")
    return lines or ["the dump has no collectives"]


def text(wrong: list[str], dumps: list[RankDump], damaged: dict[str, str], cells: int = MOST_CELLS) -> str:
    """Return what is wrong, in lines, and the positions of the ranks as text for a terminal of ``cells`` columns."""
    lines = [f"{file} is skipped: {why}" for file, why in damaged.items()]
    lines += wrong or [f"nothing wrong in the dumps of {counted(len(dumps), 'rank')}"]
    for taken in sorted(dumps, key=lambda taken: taken.rank):
        lines += ["", f"rank {taken.rank}, {taken.file}:", *(f"  {line}" for line in positions(taken))]
    return terminal_text.lines(folded(lines, cells))


def as_json(wrong: Mapping[str, object], dumps: list[RankDump], damaged: dict[str, str]) -> str:
    """Return what is wrong and the positions of the ranks as JSON."""
    ranks = [
        {"rank": each.rank, "file": each.file, "groups": [asdict(op) for op in last_operations(each)]} for each in dumps
    ]
    return json.dumps({**wrong, "ranks": ranks, "damaged": damaged}, indent=2)
