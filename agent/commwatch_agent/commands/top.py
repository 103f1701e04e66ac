"""``commwatch top``: the state of a job as lines for a terminal of a given size. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from statistics import mean, median

from rich.text import Text

from commwatch.wire.numbers import latest
from commwatch_agent.analysis.advice_facts import BOTTLENECK_SHARE, WORTH
from commwatch_agent.analysis.calls.differences import CERTAIN_S
from commwatch_agent.analysis.headline import bottleneck, first, mean_core_wait, of_some, split
from commwatch_agent.analysis.rank_state import begun, oldest, state
from commwatch_agent.analysis.verdict import Verdict, awaited_ranks, for_others, stragglers, waited_for, why_late
from commwatch_agent.analysis.waits.wait_graph import age
from commwatch_agent.commands.top_answers import MOST_STEPS, WINDOW_S, Answers, OfJob
from commwatch_agent.commands.top_notices import STYLES, notices, worth_showing, wrapped
from commwatch_agent.incidents.answers import whys_of
from commwatch_agent.incidents.families import families
from commwatch_agent.incidents.words import is_over
from commwatch_agent.ingest.step_accounting import comm_share, exposed_share, is_rate_stale, of_known, p95, step_number
from commwatch_agent.job.merging import covered
from commwatch_agent.model.api_views import Row, Summary
from commwatch_agent.model.endings import state_in_words
from commwatch_agent.model.views import ITERATIONS, InFlight, RankView, StepView
from commwatch_agent.reference.missing import SHORT, lack_reference
from commwatch_agent.report.report_text import job_state
from commwatch_agent.report.what_happened import late_within
from commwatch_agent.text.terminal_text import clean, cut, width
from commwatch_agent.text.text_table import NOT_KNOWN, Column, TableRow, left_out, table, wrap
from commwatch_agent.text.units import counted, percent, rate, seconds, time_of_day
from commwatch_alerts.model import INFO

#: Age in seconds from which answers are marked as old.
STALE_S = 5.0
#: Width in cells from which the two tables are drawn side by side, to save lines of a screen.
_WIDE = 150
_MOST_BAR = 40
#: Width of the names of what is above the tables.
_NAME = 9
#: Part of the time, 0 to 1, from which on it is named as all of it.
_NEARLY_ALL = 0.8
_STATES = {"gone": 0, "stopped": 1, "zombie": 1, "silent": 2, "running": 3, "left": 4, "ended": 5}
_RANKS = (
    Column(""), Column("rank"), Column("state", right=False), Column("step", drop=3), Column("step p50", drop=6),
    Column("comm"), Column("exposed", drop=1), Column("wait", drop=2), Column("gpu", drop=4),
    Column("in flight", right=False, least=22), Column("age"), Column("host", right=False, drop=5),
)  # fmt: skip
_OPERATIONS = (
    Column("group", right=False, least=16), Column("op", right=False, least=10), Column("ranks", drop=5), Column("count/s"),
    Column("p50", drop=3), Column("p99"), Column("algbw", drop=6), Column("busbw"), Column("eff", drop=1),
    Column("time", drop=4), Column("wait", drop=2),
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The content of one frame."""

    #: The latest answers; ``None``: none yet.
    answers: Answers | None
    #: Age of the answers in seconds.
    age_s: float
    #: Why there are no newer answers; ``None``: no problem.
    trouble: str | None


def frame(seen: Seen, cells: int, height: int | None = None) -> list[Text]:
    """Return at most ``height`` lines (``None``: no limit) of at most ``cells`` cells, the worst ranks first."""
    lines = _stale(seen, cells, height)
    if seen.answers is not None:
        body = _body(seen.answers, cells, None if height is None else max(0, height - len(lines) - 1))
        old = seen.trouble is not None or seen.age_s > STALE_S
        body = [Text(line.plain, "dim") for line in body] if old else body
        lines = [*_title(seen.answers, cells, height is not None), *lines, *body]
    lines = lines[:height]
    for line in lines:
        line.truncate(cells, overflow="ellipsis")
    return lines


def _stale(seen: Seen, cells: int, height: int | None) -> list[Text]:
    """Return a warning that the answers are missing or old; empty if they are current."""
    most = None if height is None else max(1, height // 4)
    if seen.answers is None:
        return wrap(clean(seen.trouble or "waiting for the agent"), cells, most, "warn")
    if seen.trouble is None and seen.age_s <= STALE_S:
        return []
    why = clean(seen.trouble or "The agent answers slowly")
    return wrap(f"OLD: the data below is {seconds(seen.age_s)} old. {why}. Trying again.", cells, most, "bad")


def _title(answers: Answers, cells: int, live: bool) -> list[Text]:
    """Return of which job the frame is; live, this is one line, and a long name is cut."""
    shown, begin = answers.shown, "commwatch top: "
    if shown is None:
        name, rest = f"no job yet at {clean(answers.url)}", ""
    else:
        job = shown.job
        ended = "" if job.state == "running" else f" at {time_of_day(job.last_seen_at)}"
        name, rest = clean(job.job_id), f", {job_state(job)}{ended}, {len(job.ranks)} of {job.world_size} ranks"
        rest += f", {counted(job.restarts, 'restart')}" if job.restarts else ""
        of_nodes = covered(shown.nodes)
        rest += f", {of_nodes}" if of_nodes else ""
    if not live:
        return wrap(f"{begin}{name}{rest}", cells, style="title")
    hint = " q quits"
    title = Text.assemble((begin + cut(name, max(8, cells - len(begin) - width(rest) - len(hint))) + rest, "title"))
    title.truncate(max(1, cells - len(hint)), overflow="ellipsis", pad=True)
    return [title.append(hint, "dim")]


def _body(answers: Answers, cells: int, height: int | None) -> list[Text]:
    """Return the lines below the title."""
    shown = answers.shown
    if shown is None:
        start = wrap("Start a job with commwatch run, or with COMMWATCH=1.", cells)
        return [*wrapped(notices(answers), cells, height), *start]
    shares, first_rule = _shares(answers, shown, cells)
    said = notices(answers, first_rule)
    top = shares + _cards(answers, cells)
    room = None if height is None else max(0, height - len(top))
    # Notices get a third of the room, or more if the tables need less than the rest.
    need = (max if cells >= _WIDE else sum)((len(shown.ranks) + 2, len(shown.by_operation.rows) + 2))
    top += wrapped(said, cells, None if room is None else max(2, room // 3, room - need), shown.job.job_id)
    room = None if height is None else max(0, height - len(top) - 1)
    return [*top, Text(), *_tables(answers, shown, cells, room)]


# -- the job ----------------------------------------------------------------------------------


def _shares(answers: Answers, shown: OfJob, cells: int) -> tuple[list[Text], str]:
    """Return the lines on steps, and on the share of step time in communication, compared with the 30% limit; and the rule that they name, as
    ``headline.first``.
    """
    usual, running = [step for step in shown.steps if not step.long], shown.job.state == "running"
    if not usual:
        is_new = running and answers.about.at is not None and answers.about.at - shown.job.started_at < WINDOW_S
        none = "no step has ended yet" if is_new else f"no step has ended {_lately(shown)}"
        why = shown.job.steps_unavailable or none
        return _named_lines("steps", clean(why), cells), ""
    durations = sorted(step.duration_s for step in usual)
    seqs: dict[int, list[int]] = {}
    for step in shown.steps:
        seqs.setdefault(step.rank, []).append(step.seq)
    last = latest([number for of_rank in seqs.values() if (number := step_number(of_rank)) is not None])
    pace = _pace(answers, shown, median(durations)) if running else f"{_lately(shown)}: "
    pace += f"median {seconds(median(durations))}, p95 {seconds(p95(durations))}, number {last}"
    ranks = _by_rank(shown).values()
    (comm, comm_ranks), (exposed, exposed_ranks) = of_known(ranks, comm_share), of_known(ranks, exposed_share)
    name = "iterations" if shown.job.step_source == ITERATIONS else "steps"
    lines, rule = _named_lines(name, pace, cells), ""
    if comm is not None:
        measured, messages = _waiting(shown, _in_steps_s(answers, shown))
        found = shown.verdicts if running else _were_late(shown)
        waiting = waited_for(found, measured, len(shown.ranks))
        messages = for_others(messages, waiting, measured)
        late = awaited_ranks(found, waiting)
        made_of = split(comm, waiting, messages, late)
        reason, cores = why_late(found, late), mean_core_wait(shown.ranks)
        why = bottleneck(
            comm,
            exposed,
            waiting,
            messages,
            late,
            why=reason,
            cores=cores,
            iterations=shown.job.step_source == ITERATIONS,
            stragglers=stragglers(found),
        )
        hidden = exposed is not None and exposed < WORTH
        good = comm <= BOTTLENECK_SHARE or hidden
        rule, style = ("", "good") if good else (first(comm, waiting or 0.0, late, reason, cores), "bad")
        lines += _bar("comm", comm, style, of_ranks=of_some(comm_ranks, len(ranks)), words=[made_of, why], cells=cells)
    if exposed is not None:
        style = "good" if exposed <= WORTH else "warn"
        lines += _bar("exposed", exposed, style, of_ranks=of_some(exposed_ranks, len(ranks)), words=[], cells=cells)
    return lines, rule


def _lately(shown: OfJob) -> str:
    """Return in words which time is shown."""
    return f"in {'the' if shown.job.state == 'running' else 'its'} last {WINDOW_S} s"


def _were_late(shown: OfJob) -> list[Verdict]:
    """Return the late ranks of the time that is shown of an ended job, by its incidents."""
    until = max(step.end_at for step in shown.steps)
    since = max(shown.job.started_at, until - WINDOW_S)
    late, whys = late_within(shown.incidents, since, until), whys_of(shown.incidents).late
    of, ranks = shown.job.job_id, [view.rank for view in shown.ranks]
    return [
        Verdict(
            "straggler", "late", of, "", "", None, "", [rank], [other for other in ranks if other != rank], 0.0, "",
            cost_share=share, why_code=whys.get(rank),
        )
        for rank, share in late.items()
    ]  # fmt: skip


def _waiting(shown: OfJob, covered_s: float | None) -> tuple[float | None, float | None]:
    """Return the mean shares (0 to 1) of ``covered_s`` that ranks wait in steps, for late ranks and for messages; ``None``: not known."""
    in_steps = [row for row in shown.by_rank.rows if _is_in_steps(row)]
    late = [row.wait_s for row in in_steps if row.wait_s is not None]
    messages = [row.p2p_wait_s for row in in_steps if row.p2p_wait_s is not None]
    if not covered_s:
        return None, None
    return mean(late) / covered_s if late else None, mean(messages) / covered_s if messages else None


def _is_in_steps(row: Row) -> bool:
    return not row.by.get("startup")


def _pace(answers: Answers, shown: OfJob, usual_s: float) -> str:
    """Return steps per second of a running job as text, or for how long no step has ended.

    Before its first step and between two lives a job has no steps: the rate names its time if that is much less than the operations' counts have.
    """
    ended = max(step.end_at for step in shown.steps)
    since_s = 0.0 if answers.about.at is None else answers.about.at - ended
    if is_rate_stale(since_s, usual_s):
        return f"none for {seconds(since_s)}, before that "
    sum_s = sum(step.duration_s for step in shown.steps)
    of_rank_s = sum_s / len({step.rank for step in shown.steps})
    covered_s = _covered_s(answers, shown, shown.by_operation)
    is_part = covered_s is not None and of_rank_s < _NEARLY_ALL * covered_s and len(shown.steps) < MOST_STEPS
    when = f" in {seconds(of_rank_s)} of the last {seconds(covered_s)}" if is_part else ""
    return f"{len(shown.steps) / sum_s:.3g}/s{when}, "


def _in_steps_s(answers: Answers, shown: OfJob) -> float | None:
    """Return the seconds in which the waits of the ranks in steps were: those of their sums, without the time before the first step and without a
    standstill, whose waits have not ended. ``None``: not known.
    """
    covered_s, sums = _covered_s(answers, shown, shown.by_rank), shown.by_rank
    if covered_s is None or not shown.steps:
        return covered_s
    usual_s = median([step.duration_s for step in shown.steps if not step.long] or [0.0])
    if any(row.by.get("startup") for row in sums.rows):
        if len(shown.steps) >= MOST_STEPS:  # the first step may not be one of them
            return None
        covered_s -= max(0.0, min(step.start_at for step in shown.steps) - max(sums.since or 0.0, shown.job.started_at))
    running, last = shown.job.state == "running", max(step.end_at for step in shown.steps)
    if not running:  # after its last step, a job ends or stands still
        covered_s -= max(0.0, min(sums.until or 0.0, shown.job.last_seen_at) - last)
    elif answers.about.at is not None and is_rate_stale(answers.about.at - last, usual_s):
        covered_s -= answers.about.at - last
    return covered_s if covered_s > 0 else None


def _bar(name: str, share: float, style: str, *, of_ranks: str, words: list[str], cells: int) -> list[Text]:
    """Return a share (0 to 1) as a bar, with its explanation behind it, or below it if the line is too short."""
    length = max(10, min(_MOST_BAR, cells // 3))
    full, limit = round(min(1.0, share) * length), round(BOTTLENECK_SHARE * length)
    drawn = "".join("│" if i == limit else "█" if i < full else "·" for i in range(length))
    line = Text.assemble((f"{name:<{_NAME}}", "dim"), (drawn, style), (f" {percent(share):>4}", "bold"), of_ranks)
    says = "; ".join(filter(None, words))
    if line.cell_len + len(": ") + len(says) > cells:
        return [line, *(Text(" " * _NAME) + each for each in wrap(says, cells - _NAME))] if says else [line]
    return [line.append(f": {says}" if says else "")]


def _named_lines(name: str, text: str, cells: int) -> list[Text]:
    """Return a text with its name before it, in as many lines as it needs."""
    begin = f"{name:<{_NAME - 1}} "
    lines = wrap(text, cells - len(begin))
    return [Text.assemble((" " * len(begin) if n else begin, "dim"), each) for n, each in enumerate(lines)]


def _cards(answers: Answers, cells: int) -> list[Text]:
    """Return utilization and power of all GPUs that can be read, on as many lines as they need; empty if there are none."""
    parts = []
    for view in answers.gpus.gpus:
        measured = view.gpu.measured
        watts = "" if measured.power_watts is None else f" {measured.power_watts:.0f} W"
        if measured.utilization is not None:
            parts.append(f"{view.gpu.card.index}: {percent(measured.utilization)}{watts}")
    # Each part comes after two blanks, the first after nine.
    fit = max(1, (cells - 7) // (max(map(len, parts), default=0) + 2))
    rows = ["  ".join(parts[at : at + fit]) for at in range(0, len(parts), fit)]
    return [Text.assemble((" " * 9 if n else "gpus     ", "dim"), row) for n, row in enumerate(rows)]


# -- tables -----------------------------------------------------------------------------------


def _tables(answers: Answers, shown: OfJob, cells: int, height: int | None) -> list[Text]:
    ranks, operations = _worst_first(shown), shown.by_operation.rows
    if cells >= _WIDE and height is not None:
        half = (cells - 3) // 2
        left = _rank_table(answers, shown, ranks, half, height)
        right = _operation_table(answers, shown, operations, cells - 3 - half, height)
        pairs = list(zip_longest(left, right, fillvalue=Text()))
        for a, _ in pairs:
            a.truncate(half, overflow="ellipsis", pad=True)
        return [Text.assemble(a, (" │ ", "dim"), b) for a, b in pairs]
    if height is None:
        mine = None
    else:  # each table gets half, or more if the other needs less
        need = len(operations) + 2
        mine = max(height // 2, height - need)
    left = _rank_table(answers, shown, ranks, cells, mine)
    right = _operation_table(answers, shown, operations, cells, None if height is None else height - len(left) - 1)
    return [*left, Text(), *right] if right else left


def _worst_first(shown: OfJob) -> list[RankView]:
    """Sort ranks: named by an incident, then not running, then by share of exposed communication (else communication)."""
    blamed, steps = _blamed(shown), _by_rank(shown)

    def badness(rank: RankView) -> tuple[bool, int, float, int]:
        mine = steps.get(rank.rank, [])
        share = exposed_share(mine)
        share = comm_share(mine) if share is None else share
        return (rank.rank not in blamed, _STATES.get(state(rank), 3), -(share or 0.0), rank.rank)

    return sorted(shown.ranks, key=badness)


def _blamed(shown: OfJob) -> dict[int, str]:
    """Return the ranks that open incidents that hold, worse than for information, name as culprits, with the kind of the worst."""
    found = reversed([one.cause for one in families(worth_showing(shown, []))]) if shown.job.state == "running" else ()
    return {rank: each.kind for each in found if each.severity != INFO and not is_over(each) for rank in each.ranks}


def _by_rank(shown: OfJob) -> dict[int, list[StepView]]:
    """Return the steps of each rank, without unusually long ones."""
    found: dict[int, list[StepView]] = {}
    for step in shown.steps:
        if not step.long:
            found.setdefault(step.rank, []).append(step)
    return found


def _covered_s(answers: Answers, shown: OfJob, sums: Summary) -> float | None:
    """Return the seconds that a summary covers, for a running job up to now, else up to its end; ``None`` if the summary is empty.

    Each summary has its own length: of two requested one after the other, the second may cover one more rollup.
    """
    since, until = sums.since, sums.until
    if since is None or until is None:
        return None
    if shown.job.state != "running":
        until = min(until, shown.job.last_seen_at)  # its last slot is longer
    elif answers.about.at is not None:
        until = max(until, answers.about.at)
    return max(until - max(since, shown.job.started_at), 1e-3)


def _part(seconds_of_ranks: float | None, ranks: int, covered_s: float | None) -> str:
    """Return a share of the ranks' time as a percentage text."""
    if seconds_of_ranks is None or covered_s is None or not ranks:
        return NOT_KNOWN
    return percent(seconds_of_ranks / (ranks * covered_s))


def _rank_table(
    answers: Answers, shown: OfJob, worst_first: list[RankView], cells: int, height: int | None
) -> list[Text]:
    """Return the ranks as a table: sorted by number if all fit, else the worst ones and a line on the others."""
    room = len(worst_first) if height is None else max(0, height - 1)
    if not room:
        return []
    fits = len(worst_first) <= room
    ranks = sorted(worst_first, key=lambda rank: rank.rank) if fits else worst_first[: room - 1]
    rows = _rank_rows(answers, shown, ranks)
    lines = table(_RANKS, rows, cells) + ([] if fits else [_others(shown, worst_first[room - 1 :])])
    return _with_notes(lines, left_out(_RANKS, rows, cells), height)


def _rank_rows(answers: Answers, shown: OfJob, ranks: list[RankView]) -> list[TableRow]:
    named, steps, covered_s = _blamed(shown), _by_rank(shown), _in_steps_s(answers, shown)
    # The shares of a rank are of its steps, if there are some.
    sums = defaultdict[object, list[Row]](list)
    for row in shown.by_rank.rows:
        if _is_in_steps(row) or not shown.steps:
            sums[row.by["rank"]].append(row)
    # By rank, because the cards of other nodes have the same numbers.
    used = {
        on.rank: view.gpu.measured.utilization
        for view in answers.gpus.gpus
        for on in view.ranks
        if on.job_id == shown.job.job_id
    }
    rows = []
    for rank in ranks:
        word, blamed, mine = state(rank), named.get(rank.rank), steps.get(rank.rank, [])
        bad = {"running": "", "left": "dim", "ended": "dim"}.get(word, "bad")
        style = STYLES.get(blamed, "warn") if blamed else bad
        op = oldest(rank)
        shown_word = state_in_words(word) if blamed in (None, "rank_lost") else blamed
        texts = (
            "!" if blamed else "", str(rank.rank), shown_word, str(step_number([step.seq for step in mine])) if mine else NOT_KNOWN,
            seconds(median(step.duration_s for step in mine) if mine else None),
            percent(comm_share(mine)), percent(exposed_share(mine)),
            _part(_waited_of_rank(sums[rank.rank]), 1, covered_s),
            NOT_KNOWN if rank.gpu is None else f"{rank.gpu}: {percent(used.get(rank.rank))}",
            NOT_KNOWN if op is None else _named(op, len(begun(rank))),
            NOT_KNOWN if op is None else seconds(age(op)), clean(rank.host),
        )  # fmt: skip
        rows.append(TableRow(texts, style))
    return rows


def _named(op: InFlight, among: int) -> str:
    """Return an operation in words; once it takes long, with its number, as incidents have it."""
    number = f" {op.seq}" if op.age_s >= CERTAIN_S else ""
    return clean(f"{op.op}{number} {op.group}") + (f" +{among - 1}" if among > 1 else "")


def _waited(row: Row) -> float | None:
    return row.wait_s if row.wait_s is not None else row.p2p_wait_s


def _waited_of_rank(rows: Iterable[Row]) -> float | None:
    """Return how long a rank waited, for late ranks and for messages, as far as it is known."""
    known = [waited for row in rows for waited in (row.wait_s, row.p2p_wait_s) if waited is not None]
    return sum(known) if known else None


def _others(shown: OfJob, ranks: list[RankView]) -> Text:
    """Return one line that sums up the ranks without a line of their own."""
    steps = _by_rank(shown)
    states = ", ".join(f"{count} {state_in_words(word)}" for word, count in Counter(map(state, ranks)).most_common())
    shares = [share for rank in ranks if (share := comm_share(steps.get(rank.rank, []))) is not None]
    comm = f", comm {percent(min(shares))} to {percent(max(shares))}" if shares else ""
    ages = [age(op) for rank in ranks if (op := oldest(rank)) is not None]
    longest = f", oldest in flight {seconds(max(ages))}" if ages else ""
    return Text(f"and {len(ranks)} more: {states}{comm}{longest}", "dim")


def _operation_table(
    answers: Answers, shown: OfJob, operations: list[Row], cells: int, height: int | None
) -> list[Text]:
    """Return the operations as a table, with a count of those left out."""
    room = len(operations) if height is None else max(0, height - 1)
    if not operations:
        return [Text(f"no operation has ended {_lately(shown)}", "dim")] if height is None or height else []
    if not room:
        return []
    shown_rows = operations if len(operations) <= room else operations[: room - 1]
    covered_s = _covered_s(answers, shown, shown.by_operation)
    rows = [TableRow(_operation_cells(row, covered_s)) for row in shown_rows]
    lines = table(_OPERATIONS, rows, cells)
    more = len(operations) - len(shown_rows)
    lines += [Text(f"and {more} more", "dim")] if more else []
    lines = _with_notes(lines, left_out(_OPERATIONS, rows, cells), height)
    return _with_notes(lines, wrap(SHORT, cells, style="dim") if lack_reference(operations) else [], height)


def _with_notes(lines: list[Text], notes: list[Text], height: int | None) -> list[Text]:
    """Return lines with notes below them, if there is room for these."""
    return lines + notes if height is None or len(lines) + len(notes) <= height else lines


def _operation_cells(row: Row, covered_s: float | None) -> tuple[str, ...]:
    per_s = NOT_KNOWN if covered_s is None else f"{row.count / row.ranks / covered_s:.3g}"  # per rank
    return (
        clean(str(row.by["group"])), clean(str(row.by["op"])), str(row.ranks), per_s, seconds(row.p50_s), seconds(row.p99_s),
        rate(row.algbw), rate(row.busbw), percent(row.efficiency), _part(None if row.p50_s is None else row.seconds, row.ranks, covered_s),
        _part(_waited(row), row.ranks, covered_s),
    )  # fmt: skip
