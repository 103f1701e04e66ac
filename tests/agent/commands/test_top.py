"""The frames of ``commwatch top``: answers in, lines out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.numbers import NUMBERS
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.commands.top import Seen, frame
from commwatch_agent.commands.top_answers import Answers, OfJob
from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.job.merging import Nodes
from commwatch_agent.model.api_views import About, Advice, Row, Summary
from commwatch_agent.model.views import InFlight, JobView, RankView, StepView
from commwatch_agent.sources.gpus import GpuView, GpuViews, RankOnGpu
from commwatch_agent.text.terminal_text import width
from commwatch_agent.text.text_table import coloured
from commwatch_agent.text.units import time_of_day
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.node.gpu import Card, Gpu, Measured
from tests.agent.text.test_text_table import plain
from tests.helpers import examples

NOW = 1_700_000_000.0


def rank(number: int, **more: Any) -> RankView:
    """A rank that runs."""
    values: dict[str, Any] = {
        "job_id": "train", "rank": number, "restart": 0, "state": "running", "host": "node1", "local_rank": number, "pid": 1,
        "hook": "native", "process": "running", "heartbeat_age_s": 0.1, "last_seq": {}, "launched_s": {}, "in_flight": [],
        "failed": [], "records": 1, "lost": 0,
    }  # fmt: skip
    return RankView(**{**values, **more})


def step(of: int, comm_s: float = 0.04, exposed_s: float | None = 0.03, **more: Any) -> StepView:
    """A step of 100 ms."""
    exposed = None if exposed_s is None else exposed_s * 10
    made = StepView("train", of, 7, NOW - 0.1, NOW, 0.1, comm_s, comm_s * 10, exposed_s, exposed, {}, None, False)
    return replace(made, **more)


def row(by: dict[str, str | int | None], **more: Any) -> Row:
    """A line of a summary: 40 operations of two ranks, 2 s of their time."""
    made = Row(by, 2, 2, 40, 4000, 2.0, 0.001, 0.002, 0.003, 1e9, 1.5e9, 0.5, None, 0, 0, 0.8, "bench")
    return replace(made, **more)


def in_flight(age_s: float, group: str = "dp", waited_s: float | None = None, op: str = "all_reduce") -> InFlight:
    """An operation that has begun."""
    return InFlight(op, group, "g1", 8, None, None, None, 4, age_s, True, waited_s, 0.001)


def of_job(**more: Any) -> OfJob:
    """Two ranks, of whom nothing is wrong: 40% communication, 30% exposed, over 10 s."""
    job = JobView("train", "running", 2, [0, 1], 0, NOW - 60, NOW, 0, None)
    by_rank = [
        row({"rank": 0, "startup": False}, ranks=1, wait_s=0.5),
        row({"rank": 1, "startup": False}, ranks=1, wait_s=2.0),
    ]
    made = OfJob(
        job=job,
        ranks=[rank(0), rank(1, in_flight=[in_flight(0.25)])],
        steps=[step(of) for of in (0, 1) for _ in range(90)],
        by_rank=Summary(NOW - 10, NOW, ["rank"], by_rank),
        by_operation=Summary(NOW - 10, NOW, ["group", "op"], [row({"group": "dp", "op": "all_reduce"})]),
        verdicts=[],
        incidents=[],
        advice=[],
        findings=[],
        nodes=Nodes(1, {}),
    )
    return replace(made, **more)


def answers(shown: OfJob | None = None, **more: Any) -> Answers:
    """What an agent said."""
    about, gpus = About("0.1.0", 1, "h.sqlite", None, None, None), GpuViews("none", None, None, None, [], [])
    return replace(Answers("http://127.0.0.1:9477", about, shown, [], [], gpus), **more)


def text(shown: OfJob | None, cells: int = 80, height: int | None = 24, **more: Any) -> str:
    """The frame of new answers, without styles."""
    return "\n".join(plain(frame(Seen(answers(shown, **more), 0.5, None), cells, height)))


def incident(kind: str, *ranks: int, says: str = "a sentence", **more: Any) -> IncidentView:
    """An open incident of the job: of ranks, for 12 s."""
    names = {"hang": "Hang", "straggler": "Late rank", "rank_lost": "Rank died"}
    title = ": ".join([names.get(kind, kind), *(f"rank {rank}" for rank in ranks)])
    values: dict[str, Any] = {
        "id": f"{kind}{ranks}", "kind": kind, "severity": "critical" if kind == "hang" else "warning", "state": "open", "job_id": "train",
        "nodes": ["node1"], "ranks": list(ranks), "waiting": [], "group": "dp", "group_id": "g1", "op": "all_reduce", "seq": None,
        "began_at": NOW - 12, "seen_at": NOW, "last_at": NOW, "ended_at": None, "outcome": None, "cost_rank_s": 24.0, "share": None,
        "cause": "", "says": says, "place": "load (train.py:88)", "title": title, "remedy": "", "consequence_of": None,
    }  # fmt: skip
    return IncidentView(**{**values, **more})


def test_over() -> None:
    """A fault that is over while its alert fires is shown as that, without what to do."""
    hang = incident("hang", 1, holds=False, remedy="Let it continue.")
    shown = text(of_job(incidents=[hang]), cells=200)
    assert "OVER Hang: rank 1" in shown
    assert "DO Let" not in shown
    assert "DO Let" in text(of_job(incidents=[replace(hang, holds=True)]), cells=200)


def test_no_rates_in_a_hang() -> None:
    """Where nothing moves for long there is no rate of steps but how long that is, and operations are counted over all the time."""
    still = replace(answers().about, at=NOW + 42)
    lines = text(of_job(), cells=110, about=still).splitlines()
    assert lines[1] == "steps    none for 42.0 s, before that median 100 ms, p95 100 ms, number 7"
    assert lines[-1].split()[3] == "0.385"  # 20 of each rank in 52 s
    moving = text(of_job(), about=replace(still, at=NOW + 2)).splitlines()
    assert moving[1].startswith("steps    10/s in 9.00 s of the last 12.0 s, median")
    ended = replace(of_job().job, state="ended", failed=True, ending="exit code 1")
    lines = text(of_job(job=ended), about=still).splitlines()
    assert lines[0].startswith("commwatch top: train, failed at ")
    assert "steps    in its last 30 s: median 100 ms, p95 100 ms, number 7" in lines
    assert "FAILED exit code 1" in lines


def test_time_of_the_rate_of_steps() -> None:
    """The rate of steps names the time that it is of, unless that is nearly all of the time of the operations' counts, or not all steps were read."""

    def pace(each_s: float, steps: int) -> str:
        made = [replace(step(of), duration_s=each_s) for of in (0, 1) for _ in range(steps)]
        return text(of_job(steps=made), cells=110).splitlines()[1].partition(", median")[0]

    assert pace(0.5, 10) == "steps    2/s in 5.00 s of the last 10.0 s"
    assert pace(0.5, 17) == pace(0.5, 20) == "steps    2/s"
    assert pace(0.001, 1000) == "steps    1e+03/s"


def test_p95_of_few_steps() -> None:
    """The p95 of few steps is by nearest rank, as in the report: never below their median."""
    steps = [step(0), replace(step(0), duration_s=0.3)]
    assert "median 200 ms, p95 300 ms" in text(of_job(steps=steps))


def test_steps_of_several_optimizers() -> None:
    """A step of two optimizers counts once, on top and in the rows."""
    lines = text(
        of_job(steps=[replace(step(of), seq=2 * number) for number in (44, 43, 42) for of in (0, 1)])
    ).splitlines()
    assert lines[1].endswith(", number 44")
    assert [line.split()[2] for line in lines if line.split()[:1] in (["0"], ["1"])] == ["44", "44"]


def test_golden() -> None:
    """A whole frame of 80 cells: shares against the 30% line, ranks, operations, and that they are sums over 10 s."""
    assert text(of_job()).splitlines() == [
        "commwatch top: train, running, 2 of 2 ranks                              q quits",
        "steps    10/s, median 100 ms, p95 100 ms, number 7",
        "comm     ████████│█················  40%",
        "         27% transfer, 13% waiting for late ranks; above 30% only because ranks",
        "         wait for one another",
        "exposed  ████████│·················  30%",
        "",
        "rank  state    step  step p50  comm  exposed  wait  in flight         age  host",
        "   0  running     7    100 ms   40%      30%    5%  –                   –  node1",
        "   1  running     7    100 ms   40%      30%   20%  all_reduce dp  250 ms  node1",
        "",
        "group  op          ranks  count/s   p50   p99   algbw     busbw  eff  time  wait",
        "dp     all_reduce      2        2  1 ms  3 ms  1 GB/s  1.5 GB/s  80%   10%    3%",
    ]


def test_waiting_for_late_ranks() -> None:
    """Where more than half of the communication is waiting for late ranks (here 5 s of 10), the network is not blamed."""
    waits = Summary(
        NOW - 10,
        NOW,
        ["rank"],
        [
            row({"rank": 0, "startup": False}, ranks=1, wait_s=5.0),
            row({"rank": 1, "startup": False}, ranks=1, wait_s=0.5),
        ],
    )
    line = text(of_job(by_rank=waits), cells=200).splitlines()[2]
    assert line.endswith(
        "40%: 12% transfer, 28% waiting for late ranks; above 30%: late ranks are the bottleneck, not the network"
    )


def test_sums_of_other_times() -> None:
    """What the ranks waited is divided by the time of their own sums: a slot began after those of the operations had been asked for."""
    steps = [step(of) for of in (0, 1) for _ in range(190)]
    waits = Summary(
        NOW - 20,
        NOW,
        ["rank"],
        [
            row({"rank": 0, "startup": False}, ranks=1, wait_s=5.0),
            row({"rank": 1, "startup": False}, ranks=1, wait_s=3.0),
        ],
    )
    lines = text(of_job(by_rank=waits, steps=steps), cells=200).splitlines()
    assert "20% transfer, 20% waiting for late ranks" in lines[2]
    waited = [line.split()[7] for line in lines if line.startswith("   ") and " running " in line]
    assert waited == ["25%", "15%"]


@pytest.mark.parametrize("since_s", [0.0, 42.0])
def test_waits_in_steps(since_s: float) -> None:
    """The split of a communication share and the waits of the ranks are of the time in steps: neither that before the first of them nor a standstill
    counts.
    """
    rows = [
        row({"rank": n, "startup": at_first}, ranks=1, wait_s=4.0 if at_first else 0.2)
        for n in (0, 1)
        for at_first in (True, False)
    ]
    steps = [step(of, start_at=NOW - 1) for of in (0, 1) for _ in range(10)]
    shown = of_job(steps=steps, by_rank=Summary(NOW - 30, NOW, ["rank", "startup"], rows))
    lines = text(shown, cells=200, about=replace(answers().about, at=NOW + since_s)).splitlines()
    assert "20% transfer, 20% waiting for late ranks" in lines[2]  # 0.2 s of 1 s
    waited = [line.split()[7] for line in lines if line.startswith("   ") and " running " in line]
    assert waited == ["20%", "20%"]
    if not since_s:  # before the first step ends: 4.2 s of 30 s
        assert text(replace(shown, steps=[]), cells=200).count(" 14% ") == 2
    many = replace(shown, steps=steps * 100)  # not all since the first one
    assert "waiting for late ranks is not known" in text(many, cells=200)


def test_steps_that_take_long() -> None:
    """Of steps that take nearly as long as the time of the sums, the waits are divided by all of that time, however many of them have ended."""
    rows = [row({"rank": n, "startup": False}, ranks=1, wait_s=6.0) for n in (0, 1)]
    by_rank = Summary(NOW - 30, NOW, ["rank", "startup"], rows)
    for number in (1, 2):
        long = [step(of, duration_s=20.0, comm_s=9.0) for of in (0, 1) for _ in range(number)]
        assert "25% transfer, 20% waiting" in text(of_job(steps=long, by_rank=by_rank), cells=200)


def test_waits_of_a_rank() -> None:
    """A rank's wait is that for late ranks and for messages together; one of the two that is not known is left out."""
    known = ((0.5, 2.0), (None, 2.0), (0.5, None), (None, None))
    rows = [
        row({"rank": n, "startup": False}, ranks=1, wait_s=late, p2p_wait_s=messages)
        for n, (late, messages) in enumerate(known)
    ]
    sums = Summary(NOW - 10, NOW, ["rank"], rows)
    shown = of_job(ranks=[rank(n) for n in range(4)], steps=[step(n) for n in range(4)], by_rank=sums)
    lines = [line.split() for line in text(shown, cells=110).splitlines() if " running " in line and "node1" in line]
    assert [cells[7] for cells in lines] == ["25%", "20%", "5%", "–"]


def test_room_is_used() -> None:
    """On 200 cells both tables stand side by side, with more columns; on 80 they are below one another."""
    lines = text(of_job(), 200).splitlines()
    head = next(line for line in lines if "rank  " in line and "group" in line)
    assert all(column in head for column in ("step p50", "host", "algbw", "time"))
    assert not any("rank  " in line and "group" in line for line in text(of_job(), 80).splitlines())


SINCE = f"since {time_of_day(NOW - 12)}, for 12.0 s so far; cost 24.0 s of rank time"


def test_culprits_are_marked() -> None:
    """A late rank is marked in its row and named on top, with place, time and cost; a hang, which is worse, comes first and in red; what is over marks none."""
    shown = of_job(
        incidents=[incident("straggler", 0, says="late by 50 ms"), incident("hang", 1, says="its process is stopped")]
    )
    lines = text(shown, 140).splitlines()
    assert [line for line in lines if line.split(" ")[0].isupper()] == [
        f"CRITICAL Hang: rank 1 in load (train.py:88), {SINCE}: its process is stopped",
        f"WARNING Late rank: rank 0 in load (train.py:88), {SINCE}: late by 50 ms",
    ]
    assert [line[:20].split() for line in lines if line.startswith("!")] == [
        ["!", "0", "straggler"],
        ["!", "1", "hang"],
    ]
    over = text(of_job(incidents=[incident("hang", 1, holds=False)]), 140)
    assert "OVER Hang: rank 1" in over
    assert not any(line.startswith("!") for line in over.splitlines())
    styled = coloured(frame(Seen(answers(shown), 0.5, None), 80, 24))
    assert any("\x1b[1;31mCRITICAL" in line for line in styled)
    assert any("\x1b[33mWARNING" in line for line in styled)


def test_consequences() -> None:
    """A consequence comes below its cause, shortly; a lost rank is marked, and its state stays: it is gone."""
    lost = incident("rank_lost", 1, says="rank 1 died", place="", id="lost", cost_rank_s=None)
    hang = incident("hang", 1, says="process dead", place="", consequence_of="lost")
    shown = of_job(ranks=[rank(0), rank(1, state="gone")], incidents=[hang, lost])
    lines = text(shown, 140).splitlines()
    (at,) = [n for n, line in enumerate(lines) if line.startswith("WARNING Rank died: rank 1, at ")]
    assert lines[at].endswith(": rank 1 died")
    assert lines[at + 1] == f"Consequence: Hang: rank 1, {SINCE}"
    assert [line[:20].split() for line in lines if line.startswith("!")] == [["!", "1", "died"]]


def test_after_the_end() -> None:
    """Of an ended job the incidents that it had are shown, in the order in which they began, and no rank is marked."""
    ended = replace(of_job().job, state="ended", failed=True, ending="exit code 1")
    over: dict[str, Any] = {"state": "ended", "ended_at": NOW, "outcome": "job_ended"}
    early = incident("straggler", 0, began_at=NOW - 60, **over)
    pending = incident("comm_bound", state="pending")
    lines = text(of_job(job=ended, incidents=[incident("hang", 1, **over), early, pending]), 140).splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith(("CRITICAL", "WARNING", "not yet"))] == [
        "WARNING Late rank: rank 0 in load (train.py:88)",
        "CRITICAL Hang: rank 1 in load (train.py:88)",
    ]
    assert "FAILED Hang: rank 1" in lines  # as in its report
    assert not any(line.startswith("!") for line in lines)


def test_split_after_the_end() -> None:
    """After its end, a job's split is of the time up to its last step, and names the ranks that were late then: a moment later it is the same."""
    late = incident(
        "straggler", 1, state="ended", ended_at=NOW, outcome="job_ended", began_at=NOW - 10, cost_rank_s=1.0
    )
    late = replace(late, waiting=[0], why_code="")
    ended = replace(of_job().job, state="ended", started_at=NOW - 10, last_seen_at=NOW + 4)
    rows = [row({"rank": n, "startup": False}, ranks=1, wait_s=1.0) for n in (0, 1)]
    sums = Summary(NOW - 10, NOW + 8, ["rank", "startup"], rows)  # its last slot
    for more, split in (({}, "10% waiting for late ranks"), ({"incidents": [late]}, "10% waiting for rank 1")):
        shown = of_job(job=ended, by_rank=sums, **more)
        for at in (NOW + 5, NOW + 500):
            assert f"30% transfer, {split}" in text(shown, cells=200, about=replace(answers().about, at=at))
    hung = replace(shown, job=replace(ended, last_seen_at=NOW + 46))
    assert "30% transfer, 10% waiting for rank 1" in text(hung, cells=200)
    none = text(of_job(job=ended, steps=[]), about=replace(answers().about, at=NOW + 5))
    assert "no step has ended in its last 30 s" in none


def test_words_on_top() -> None:
    """Incidents of the job and the node, findings, lost cards, the first advice, an agent in trouble, what is not certain, and other jobs are in words."""
    finding = Finding("ib_off", "warning", "InfiniBand is not used", "NET/Socket", "", "", [])
    advice = [
        Advice("accumulate", "accumulate gradients", [], "", "saves 12%", 0.12),
        Advice("x", "second", [], "", "", 0),
    ]
    lost = GpuView(Gpu(Card(3, "u", "b", "H100"), Measured(), "has fallen off the bus"), [], [])
    said = text(
        of_job(findings=[finding], advice=advice, incidents=[incident("exposed_comm", state="pending")]),
        incidents=[incident("gpu_fault", job_id="", says="GPU 3 no longer responds", place="")],
        about=About("0.1.0", 1, "h", "disk full", None, None),
        gpus=GpuViews("up", None, None, NOW, [lost], []),
        others=["eval"],
        cells=140,
    ).splitlines()
    at = said.index("agent: disk full")
    assert said[at + 1 : at + 7] == [
        f"WARNING gpu_fault, {SINCE}: GPU 3 no longer responds",
        "GPU 3: has fallen off the bus",
        "NCCL InfiniBand is not used: NET/Socket",
        "TRY accumulate gradients: saves 12%",
        "not yet certain: exposed_comm",
        "other jobs run here: eval (--job)",
    ]


def test_advice_is_on_what_the_headline_names() -> None:
    """Advice that was asked for before a rank was late, or is of a longer time, does not contradict the headline."""
    cores, late = (Advice(rule, rule, [], "", "saves 12%", 0.12) for rule in ("scarce_cores", "straggler"))
    verdict = Verdict(
        "straggler", "late", "train", "g1", "dp", None, "", [1], [0], 9.0, "", cost_share=0.47, why_code="waits"
    )
    starved = [rank(0, core_wait_share=0.3), rank(1, core_wait_share=0.3)]
    for verdicts, advice, shown in (
        ([verdict], [cores, late], "TRY straggler"),
        ([verdict], [cores], None),
        ([], [late, cores], "TRY scarce_cores"),
    ):
        lines = text(of_job(verdicts=verdicts, advice=advice, ranks=starved), 200)
        assert ("rank 1 is the bottleneck" if verdicts else "look first at the CPUs") in lines
        assert next((line.partition(":")[0] for line in lines.splitlines() if line.startswith("TRY")), None) == shown


def test_what_to_do_comes_before_what_to_try() -> None:
    """While a job stands still, what to do about that is shown in place of advice on speed; not of what is pending, or over."""
    advice = [Advice("accumulate", "accumulate gradients", [], "", "saves 12%", 0.12)]
    hang = incident("hang", 1, remedy="Let the process go on: kill -CONT 3406")
    assert "DO Let the process go on: kill -CONT 3406" in text(of_job(advice=advice, incidents=[hang]), 140)
    assert "TRY" not in text(of_job(advice=advice, incidents=[hang]), 140)
    for state in ("pending", "ended"):
        assert "TRY accumulate" in text(of_job(advice=advice, incidents=[replace(hang, state=state)]), 140)


def test_worst_come_first() -> None:
    """Incidents and findings are in the order critical, warning, info: those that are cut off are the least severe."""
    incidents = [incident(name, severity=name) for name in ("info", "critical", "warning")]
    found = [Finding(each, each, each, "", "", "", []) for each in ("error", "warning", "info")]
    lines = text(of_job(findings=found, incidents=incidents), height=None).splitlines()
    starts = ("CRITICAL", "WARNING", "INFO", "NCCL")
    assert [line.split(":")[0].split(" in ")[0] for line in lines if line.startswith(starts)] == [
        "CRITICAL critical", "WARNING warning", "INFO info", "NCCL error", "NCCL warning", "NCCL info",
    ]  # fmt: skip


def test_part_is_recorded() -> None:
    """That operations are only counted, which leaves shares and waits unknown, is said."""
    shown = text(of_job(ranks=[rank(0, probe_mode="full"), rank(1, probe_mode="sampling")]), cells=200)
    assert "recorded in part: one in sixteen operations of rank 1" in shown
    assert "recorded in part" not in text(of_job(ranks=[rank(0, state="ended", probe_mode="sampling")]), cells=200)


def test_too_many_words() -> None:
    """Words never push out the tables: how many more there are is said."""
    said = text(of_job(incidents=[incident("hang", n, says="word " * 60) for n in range(30)]))
    assert "and 27 more: commwatch diagnose train" in said
    assert "1.5 GB/s" in said
    assert len(said.splitlines()) <= 24


def test_the_key_sentence_is_whole() -> None:
    """In a terminal of 80 by 24 the worst incident is not cut off before why it is there, even with others below it."""
    says = (
        "rank 1 is late by 27.9 ms a step (mean of 146 steps) in group default_pg; in 10.0 s the others waited 81% of the time for it; its main "
        "thread waited 68% of the time for a core, those of the others 0%"
    )
    late = incident("straggler", 1, says=says)
    for more in ([], [incident(kind, severity="info", says="word " * 60) for kind in ("comm_bound", "exposed_comm")]):
        lines = text(of_job(incidents=[late, *more])).splitlines()
        assert says in " ".join(line.rstrip() for line in lines)
        assert len(lines) <= 24
        assert "1.5 GB/s" in "".join(lines)


def test_gpus() -> None:
    """Cards that can be read have a line, and each rank shows its own."""
    cards = [
        GpuView(Gpu(Card(n, "u", "b", "H100"), Measured(utilization=0.87, power_watts=312.4)), [], on)
        for n, on in ((0, []), (1, [RankOnGpu("train", 0, None, None, None), RankOnGpu("other", 1, None, None, None)]))
    ]
    said = text(of_job(ranks=[rank(0, gpu=1), rank(1, gpu=1)]), 100, gpus=GpuViews("up", None, None, NOW, cards, []))
    assert "gpus     0: 87% 312 W  1: 87% 312 W" in said
    mine, elsewhere = (
        next(line for line in said.splitlines() if line.strip().startswith(start))
        for start in ("0  running", "1  running")
    )
    assert "1: 87%  " in mine
    assert "1: –  " in elsewhere


def test_many_gpus() -> None:
    """Cards that one line has no room for continue below; none is cut off."""
    cards = [
        GpuView(Gpu(Card(n, "u", "b", "H100"), Measured(utilization=1.0, power_watts=700.0)), [], []) for n in range(8)
    ]
    lines = text(of_job(), cells=80, gpus=GpuViews("up", None, None, NOW, cards, [])).splitlines()
    (at,) = [n for n, line in enumerate(lines) if line.startswith("gpus")]
    assert lines[at : at + 2] == [
        "gpus     0: 100% 700 W  1: 100% 700 W  2: 100% 700 W  3: 100% 700 W",
        "         4: 100% 700 W  5: 100% 700 W  6: 100% 700 W  7: 100% 700 W",
    ]
    assert "7: 100% 700 W" in text(of_job(), cells=24, height=None, gpus=GpuViews("up", None, None, NOW, cards, []))


def test_several_nodes() -> None:
    """The title has how many nodes answered; each that did not is named with its reason; a node alone is not counted."""
    assert "nodes" not in text(of_job()).splitlines()[0]
    assert (
        text(of_job(nodes=Nodes(4, {})), 100)
        .splitlines()[0]
        .startswith("commwatch top: train, running, 2 of 2 ranks, 4 nodes")
    )
    said = text(of_job(nodes=Nodes(3, {"http://node4:9477": "timed out"})), 120)
    assert "3 of 4 nodes" in said.splitlines()[0]
    assert "no answer from http://node4:9477 (timed out): ranks of its node are missing below" in said


def test_many_ranks() -> None:
    """Of 64 ranks the worst come first, by incident, by state, by exposed share; the rest is one line. With room they are by number."""
    ranks = [rank(n, in_flight=[in_flight(0.001 * n)]) for n in range(64)]
    ranks[40] = rank(40, process="stopped")
    ranks[50] = rank(50, heartbeat_age_s=60.0)
    steps = [step(n, comm_s=0.02, exposed_s=0.05 if n == 9 else 0.01) for n in range(64)]
    shown = of_job(ranks=ranks, steps=steps, incidents=[incident("straggler", 33)])
    table = [line.lstrip("! ").split() for line in text(shown, height=24).splitlines() if "exposed" not in line]
    numbers = [
        cells[0] for cells in table if len(cells) > 2 and cells[1] in ("straggler", "stopped", "silent", "running")
    ]
    assert numbers[:6] == ["33", "40", "50", "9", "0", "1"]
    assert (
        f"and {64 - len(numbers)} more: {64 - len(numbers)} running, comm 20% to 20%, oldest in flight 63 ms"
        in text(shown)
    )
    assert "more" not in text(shown, height=None)
    assert len(text(shown, height=None).splitlines()) > 70


def test_unknown_is_absent() -> None:
    """A share that some ranks know has their number; one that no rank knows has neither bar nor column. Without steps the reason is there."""
    (exposed,) = [
        line
        for line in text(of_job(steps=[step(0, exposed_s=None), step(1)])).splitlines()
        if line.startswith("exposed")
    ]
    assert exposed.endswith(" 30% (1 of 2 ranks)")
    assert "exposed" not in text(of_job(steps=[step(0, exposed_s=None), step(1, exposed_s=None)]))
    job = replace(of_job().job, steps_unavailable="two optimizers alternate")
    assert "steps    two optimizers alternate" in text(of_job(steps=[], job=job))
    assert "steps    no step has ended in the last 30 s" in text(of_job(steps=[]))
    began = replace(answers().about, at=NOW - 40)
    assert "steps    no step has ended yet" in text(of_job(steps=[]), about=began)
    nothing = Summary(None, None, ["group", "op"], [])
    assert "no operation has ended in the last 30 s" in text(of_job(by_operation=nothing, by_rank=nothing))


def test_hidden_communication_is_no_alarm() -> None:
    """A share above 30% that is hidden behind compute is labelled as hidden, and is not red."""
    lines = coloured(frame(Seen(answers(of_job(steps=[step(0, exposed_s=0.005)] * 90)), 0.5, None), 120, 24))
    (at,) = [n for n, line in enumerate(lines) if "comm  " in line and "│" in line]
    assert "\x1b[32m" in lines[at]
    assert lines[at + 1].endswith("above 30%, but hidden behind compute")


def test_oldest_wait_is_shown() -> None:
    """Of several operations in flight the one that keeps somebody waiting is shown, not a message that was only posted early."""
    shown = of_job(ranks=[rank(0, in_flight=[in_flight(90, op="recv"), in_flight(2.5)])])
    assert "all_reduce 8 dp +1  2.50 s" in text(shown, 120)
    shown = of_job(ranks=[rank(0, in_flight=[in_flight(90, waited_s=4.0, op="recv"), in_flight(2.5)])])
    assert "recv 8 dp +1  4.00 s" in text(shown, 120)


def test_job_began_within_the_window() -> None:
    """Rates of a job that has run for 5 s are over these 5 s, not over the 10 s of the sums."""
    job = replace(of_job().job, started_at=NOW - 5)
    assert next(line for line in text(of_job(job=job)).splitlines() if line.startswith("dp")).split()[3] == "4"


def test_no_agent_no_job_no_news() -> None:
    """No answer yet, an agent without a job, answers that are old, and why: each is said in plain words."""
    assert plain(frame(Seen(None, 0.0, None), 80, 24)) == ["waiting for the agent"]
    assert plain(frame(Seen(None, 9.0, "no agent watches /run/x"), 80, 24)) == ["no agent watches /run/x"]
    assert text(None).splitlines()[0].startswith("commwatch top: no job yet at http://127.0.0.1:9477")
    old = frame(Seen(answers(of_job()), 12.0, "http://h:1 does not answer: refused"), 100, 24)
    assert plain(old)[1] == "OLD: the data below is 12.0 s old. http://h:1 does not answer: refused. Trying again."
    assert {str(line.style) for line in old[2:]} == {"dim"}
    assert not any(line.spans for line in old[2:])
    assert "The agent answers slowly" in plain(frame(Seen(answers(of_job()), 6.0, None), 120, 24))[1]
    ended = replace(of_job().job, state="ended")
    assert "train, ended at " in text(of_job(job=ended))


HOSTILE = ("\x1b]0;gone\x07" * 3, "\u202eevil\u202c", "群" * 200, "x" * 5000, "a\nb\r\nc", "e" + "\u0301" * 400)


@pytest.mark.parametrize("cells", [1, 12, 40, 80, 149, 150, 200])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name: str, cells: int) -> None:
    """Whatever groups, hosts, jobs and messages are called, nothing but our own escape sequences is left, and lines keep their width."""
    shown = of_job(
        job=replace(of_job().job, job_id=name),
        ranks=[rank(0, host=name, in_flight=[in_flight(1.0, name)]), rank(1)],
        by_operation=Summary(
            NOW - 10, NOW, ["group", "op"], [row({"group": name, "op": name}), row({"group": "dp", "op": "x"})]
        ),
        incidents=[incident("hang", 0, says=name, title=name, place=name)],
    )
    for trouble in (None, name):
        lines = frame(Seen(answers(shown, others=[name], url=name), 0.5, trouble), cells, 24)
        assert len(lines) <= 24
        for line in plain(lines):
            assert width(line) <= cells
            assert line.isprintable()
    if cells == 80:
        # The columns behind the name still stand below their heads.
        table = [line for line in plain(frame(Seen(answers(shown), 0.5, None), cells, None)) if "1.5 GB/s" in line]
        assert len({width(line) for line in table}) == 1


@given(st.integers(1, 220), st.integers(0, 60), st.integers(0, 70), st.integers(0, 30), st.integers(0, 9))
@examples(60)
def test_any_size(cells: int, height: int, ranks: int, operations: int, said: int) -> None:
    """A frame never has more lines or cells than the terminal."""
    rows = [row({"group": f"group{n}", "op": "all_reduce"}) for n in range(operations)]
    shown = of_job(
        ranks=[rank(n) for n in range(ranks)],
        by_operation=Summary(NOW - 10, NOW, ["group", "op"], rows),
        incidents=[incident("hang", n, says="word " * 50) for n in range(said)],
    )
    lines = frame(Seen(answers(shown), 0.5, None), cells, height)
    assert len(lines) <= height
    assert all(width(line) <= cells for line in plain(lines))


@pytest.mark.parametrize("cells", [40, 80, 100, 160])
def test_once_loses_no_word(cells: int) -> None:
    """One frame without a limit of lines has each word above the tables in a narrow terminal, too; columns without room are named."""
    late = [
        incident("straggler", 1, says=f"rank 1 waits for {n} things " * 9, title=f"Late rank {n}") for n in range(4)
    ]
    steps = [replace(each, end_at=NOW - 4.5) for each in of_job().steps]
    shown = of_job(job=replace(of_job().job, job_id="training-" * 3), steps=steps, incidents=late)
    narrow, wide = (plain(frame(Seen(answers(shown), 0.5, None), room, None)) for room in (cells, 4000))
    above = [re.sub("[█│·]|(?<=%):", "", " ".join(lines[: lines.index("")])).split() for lines in (narrow, wide)]
    assert above[0] == above[1]
    assert "number 7" in " ".join(above[0][:40])
    gone = {head for line in wide for head in line.split()} - {head for line in narrow for head in line.split()}
    assert not gone & {"host", "p50", "ranks", "algbw", "eff"} - set(" ".join(narrow).replace(",", " ").split())
    assert all(width(line) <= cells for line in narrow)


def test_number_of_the_latest_step() -> None:
    """The number of the latest step is shown, also where numbers go on at 0."""
    steps = [replace(step(rank), seq=seq) for seq in (NUMBERS - 2, NUMBERS - 1, 0) for rank in (0, 1)]
    assert "p95 100 ms, number 0\n" in text(of_job(steps=steps))
