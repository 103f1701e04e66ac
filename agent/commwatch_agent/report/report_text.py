"""The report of a job in words: as text for a terminal, and the tables that its page shares. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from commwatch_agent.analysis.headline import awaited, bottleneck, of_some, split, with_late
from commwatch_agent.analysis.verdict import for_others
from commwatch_agent.incidents.answers import whys_of
from commwatch_agent.ingest.why_late import common_why
from commwatch_agent.job.merging import Nodes
from commwatch_agent.model.api_views import Advice, Row
from commwatch_agent.model.endings import state_in_words
from commwatch_agent.model.views import ITERATIONS, JobView
from commwatch_agent.reference.missing import how_to_judge
from commwatch_agent.report import slowest_parts
from commwatch_agent.report.report import MOST_UNJOINED, RankLine, Report
from commwatch_agent.report.what_happened import culprits, ending, happened, lines, scarce_cores
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import CELLS, columns, paragraph
from commwatch_agent.text.units import counted, moment, percent, rank_time, rate, seconds, size

_MOST_ADVICE = 5
#: What of ranks and of operations is left out in a narrow terminal, the least important first.
_LESS_OF_RANKS, _LESS_OF_OPERATIONS = ("p2p wait",), ("algbw", "ranks", "bytes", "p99", "count")
OPERATION_HEAD = ("group", "op", "ranks", "count", "bytes", "p50", "p99", "algbw", "busbw", "wait", "efficiency")
LEGEND = (
    "Count, bytes, wait: sums over ranks. Wait: for late ranks in collectives, for the peer in send and recv. algbw and busbw: over the whole "
    "duration, waiting included; efficiency: without it, of sizes for which the reference has a time."
)
_REFERENCES = {
    "bench": "bench",
    "nccl_tests": "nccl-tests",
    "catalogue": "link",
    "hardware": "rated link",
    "own_best": "own best",
}
_NO_CYCLE = ", and the operations repeat no cycle"
#: What an iteration is, in the words of the report.
_ITERATION = "nothing marks steps, so each is one turn of the cycle of operations (commwatch.step() marks steps)"


def rank_head(report: Report) -> tuple[str, ...]:
    """Return the head of the table of ranks."""
    return ("rank", "state", f"{_unit(report)}s", f"{_unit(report)} p50", "comm", "exposed", "wait", "p2p wait")


def _unit(report: Report) -> str:
    """Return what the steps are called."""
    return "iteration" if report.job.step_source == ITERATIONS else "step"


def operation_cells(row: Row) -> tuple[str, ...]:
    count = (
        f"{row.count}"
        + (f" +{row.failed} failed" if row.failed else "")
        + (f" ({row.untimed} untimed)" if row.untimed else "")
    )
    no_size = row.by["op"] == "barrier"
    wait = row.wait_s if row.wait_s is not None else row.p2p_wait_s
    return (
        str(row.by["group"]), str(row.by["op"]), str(row.ranks), count, "–" if no_size else size(row.bytes),
        seconds(row.p50_s), seconds(row.p99_s), rate(row.algbw), rate(row.busbw), seconds(wait),
        "–" if row.efficiency is None else f"{percent(row.efficiency)} of {_REFERENCES[str(row.reference)]}",
    )  # fmt: skip


def rank_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the rows of the ranks; those to blame for what happened are marked."""
    blamed = culprits(happened(report.incidents))
    return [_rank_cells(line, is_blamed=line.rank in blamed) for line in report.ranks]


def _rank_cells(line: RankLine, *, is_blamed: bool) -> tuple[str, ...]:
    state = f"raised {line.raised}" if line.raised else state_in_words(line.state)
    return (
        f"{'! ' if is_blamed else ''}{line.rank}", state, str(line.steps), seconds(line.step_p50_s), percent(line.comm_share),
        percent(line.exposed_share), seconds(line.wait_s), seconds(line.p2p_wait_s),
    )  # fmt: skip


def heading(report: Report) -> list[tuple[str, str]]:
    """Return which job the report is on, and how that ended, as (name, text)."""
    job = report.job
    facts = [("job", f"{job.job_id} ({job_state(job)}), began {moment(job.started_at)}, {seconds(report.duration_s)}")]
    how = ending(job, report.incidents)
    return [*facts, ("how", how)] if how else facts


def headlines(report: Report) -> list[tuple[str, str]]:
    """Return the figures at the top of the report as (name, text)."""
    job = report.job
    ranks = f"{len(job.ranks)} of {job.world_size} ranks on {', '.join(report.hosts)}, hook {', '.join(report.hooks)}"
    facts = [("ranks", ranks)]
    if report.nodes is not None:
        facts.append(("nodes", _nodes(report.nodes)))
    if job.restarts:
        facts.append(("restarts", str(job.restarts)))
    unclear = "" if job.steps_unavailable is None else f"; others are not counted: {job.steps_unavailable}"
    if report.standstill_hours:
        unclear = f"; the standstill is not in them{unclear}"
    if report.latest_steps is not None:
        unclear = f"; only the latest {report.latest_steps} were read for medians and shares{unclear}"
    units = f"{_unit(report)}s"
    if job.step_source == ITERATIONS:
        unclear = f"; {_ITERATION}{unclear}"
    if report.steps and report.step_p50_s is None:
        facts.append((units, f"{report.steps}, too few for {_unit(report)} statistics{unclear}"))
    elif report.steps:
        length = f"median {seconds(report.step_p50_s)}, p95 {seconds(report.step_p95_s)}"
        facts.append((units, f"{report.steps}, {length}{unclear}"))
        if report.long_steps is not None:
            long = report.long_steps
            where = f"the longest {seconds(long.longest_s)}, number {long.longest_seq} of rank {long.longest_rank}"
            what = f"over three times as long as the steps near them, {where}"
            facts.append(("long steps", f"{long.count} on one rank, {what}; not in the median, p95 and shares"))
        facts.append(("comm share", _share(report)))
        if len(report.group_shares) > 1:
            shares = ", ".join(f"{label} {percent(share)}" for label, share in report.group_shares.items())
            facts.append(("by group", f"{shares} (they may overlap)"))
        if report.p2p_wait_share is not None:
            facts.append(
                ("send, recv", f"{percent(report.p2p_wait_share)} of {_unit(report)} time spent waiting for them")
            )
        facts.append(("exposed", _exposed(report)))
        if report.nodes is not None and (report.unjoined_share or 0) > MOST_UNJOINED:
            facts.append(
                ("waiting", f"not known for {percent(report.unjoined_share)} of the collectives; see docs/api.md")
            )
    else:
        facts.append(
            (
                "steps",
                f"none: {job.steps_unavailable or f'fewer than two optimizer steps or commwatch.step() calls were seen{_NO_CYCLE}'}",
            )
        )
    facts += report.missing.items()
    facts.append(("cost", _cost(report)))
    lost = (
        "none lost"
        if not report.lost
        else f"{report.lost} lost; a larger ring (COMMWATCH_SLOTS) or an agent that starts with the job loses less"
    )
    return [*facts, ("recorded", f"{counted(report.records, 'record')}, {lost}")]


def _nodes(nodes: Nodes) -> str:
    """Return how many nodes the report covers, and which agents did not answer."""
    if not nodes.silent:
        return str(nodes.answered)
    silent = "; ".join(f"{url} does not answer: {why}" for url, why in nodes.silent.items())
    return f"{nodes.answered} of {nodes.answered + len(nodes.silent)}; {silent}"


def job_state(job: JobView) -> str:
    """Return ``running``, ``ended``, or ``failed`` if the job is known to have failed."""
    return "failed" if job.failed else job.state


def _share(report: Report) -> str:
    """Return the communication share with its parts and meaning as text, or why it is not known."""
    if report.comm_share is None:
        untimed = sum(row.untimed for row in report.operations) / max(1, sum(row.count for row in report.operations))
        why = "have no times; see docs/hooks.md (COMMWATCH_BUDGET, COMMWATCH_TIMING)"
        return f"not known: {percent(untimed)} of the operations {why}" if untimed else "not known"
    others = len(report.ranks) - len(report.late)
    waiting = with_late((cost * others / len(report.ranks) for cost in report.late.values()), report.wait_share)
    messages = for_others(report.p2p_wait_share, waiting, report.wait_share)
    late = awaited(report.late, waiting)
    waits = waiting, messages, late
    made_of = split(report.comm_share, *waits)
    reason = common_why(whys_of(report.incidents).late, late)
    why = bottleneck(
        report.comm_share, report.exposed_share, *waits,
        why=reason, cores=report.core_wait_share, iterations=report.job.step_source == ITERATIONS, stragglers=report.late,
    )  # fmt: skip
    of_ranks = of_some(report.comm_ranks, _with_steps(report))
    meaning = "; ".join(filter(None, (made_of, why)))
    return ": ".join(filter(None, (f"{percent(report.comm_share)} of {_unit(report)} time{of_ranks}", meaning)))


#: How exposed time was measured, by its source.
_MEASURED = {
    "thread_cpu": "at most: the time in which the training thread did not compute while operations ran",
    "stream_waits": "the time in which the compute stream of the GPU waited for communication",
}


def _exposed(report: Report) -> str:
    if report.exposed_share is None:
        return "not known: only steps that are marked have it" if report.job.step_source == ITERATIONS else "not known"
    of_ranks = of_some(report.exposed_ranks, _with_steps(report))
    how = "; ".join(_MEASURED.get(source, source) for source in report.exposed_sources)
    return f"{percent(report.exposed_share)} of step time{of_ranks}{how and f' ({how})'}"


def _with_steps(report: Report) -> int:
    """Return the number of ranks with steps."""
    return sum(line.steps > 0 for line in report.ranks)


def _cost(report: Report) -> str:
    """Return the time of ranks as text: it is GPU time if each rank has a GPU."""
    parts = []
    if report.exposed_hours is not None:
        parts.append(f"{rank_time(report.exposed_hours)} of exposed communication")
    if report.wait_hours is not None:
        parts.append(f"{rank_time(report.wait_hours)} of waiting for late ranks{_of_it(report)}")
    if report.standstill_hours:
        parts.append(f"{rank_time(report.standstill_hours)} of standstill")
    whole = f"{rank_time(report.rank_hours)} of rank time (GPU time if each rank has a GPU)"
    return f"{whole}, including {_listed(parts)}" if parts else whole


def _of_it(report: Report) -> str:
    """Return which part of the waiting late ranks have cost by their incidents, which have the same figure; empty: there are none, or they have more."""
    costs = whys_of(report.incidents).costs
    if not costs or sum(costs.values()) > 3600 * (report.wait_hours or 0.0):
        return ""
    each = (f"{seconds(spent_s)} for rank {rank}" for rank, spent_s in sorted(costs.items()))
    return f" ({', '.join(each)} by {'its incident' if len(costs) == 1 else 'their incidents'})"


def _listed(parts: list[str]) -> str:
    """Return texts as a list in words."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def judging(report: Report) -> str:
    """Return how to find out whether the bandwidths are good, as ``how_to_judge``."""
    ranks_per_host = max(1, len(report.ranks) // max(1, len(report.hosts)))
    return how_to_judge(report.operations, ranks_per_host, has_links=not report.on_one_cpu)


def text(report: Report, cells: int = CELLS) -> str:
    """Return the report as text for a terminal of ``cells`` columns.

    The rest of a long line is indented further than any other, so that a part of a foreign name cannot pass for a line of ours.
    """
    longest = max(len(name) for name, _ in headlines(report))

    def named(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
        return chain.from_iterable(paragraph(value, cells, first=f"  {name:<{longest}}  ") for name, value in facts)

    shown = ["", "commwatch report", "", *named(heading(report)), ""]
    found = happened(report.incidents)
    scarce = scarce_cores(report.core_wait_share, found)
    shown += lines(found, cells, failed=bool(report.job.failed), scarce=scarce)
    shown += [*named(headlines(report)), ""]
    if report.ranks and report.steps:
        shown += [*columns(rank_head(report), rank_rows(report), 2, cells, optional=_LESS_OF_RANKS), ""]
    shown += (
        [
            *columns(
                OPERATION_HEAD,
                [operation_cells(row) for row in report.operations],
                2,
                cells,
                optional=_LESS_OF_OPERATIONS,
            ),
            *("", *paragraph(LEGEND, cells, first="  "), ""),
        ]
        if report.operations
        else ["  no operations", ""]
    )
    if unjudged := judging(report):
        shown += [*paragraph(unjudged, cells, first="  "), ""]
    if report.slowest_parts:
        shown += ["  slowest parts of the model", ""]
        shown += [*columns(*slowest_parts.table(report.slowest_parts), cells, optional=slowest_parts.LESS), ""]
        shown += [*paragraph(slowest_parts.LEGEND, cells, first="  "), ""]
    if report.advice:
        basis = f"what to try{' once it runs' if report.job.failed else ''}, {about(report.advice_last_s)}"
        shown += [*paragraph(f"{basis} (“up to”: a bound by a formula)", cells, first="  "), ""]
    for each, because in zip(report.advice[:_MOST_ADVICE], reasons(report.advice), strict=False):
        shown += paragraph(f"{each.title}: {each.gain}", cells, first="  * ", rest="      ")
        shown += paragraph(each.do, cells, first="    ")
        shown += [*paragraph(f"because {because}", cells, first="    ", rest="      "), ""]
    if len(report.advice) > _MOST_ADVICE:
        shown += [f"  {len(report.advice) - _MOST_ADVICE} more with --json", ""]
    shown += [f"  earlier   {', '.join(report.job.earlier)}"] if report.job.earlier else []
    shown += [f"  history   {report.history}", f"  again     {report.command}", ""]
    return terminal_text.lines(shown)


def reasons(advice: Iterable[Advice]) -> Iterator[str]:
    """Yield why each advice is given, without the reasons that an earlier one has, too."""
    told: set[str] = set()
    for each in advice:
        new = [text for text in each.because if text not in told]
        yield "; ".join(["of the same figures as above", *new] if len(new) < len(each.because) else new)
        told.update(each.because)


def about(last_s: float | None) -> str:
    """Return as text which part of the job the advice is based on; ``None``: the whole job."""
    return "based on the whole job" if last_s is None else f"based on the job's last {seconds(last_s)}"
