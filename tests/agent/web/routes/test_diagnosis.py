"""What a real agent concludes from records written by hand: efficiency, pipelines, shares by group, advice, and all of it in the report."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.wire.ring import RingWriter
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    RunningAgent,
    agent,
    clean_env,
    commwatch,
    elsewhere,
    end_rank,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

STEPS, SIZE = 30, 4_000_000
#: On the link that the agent is told of, 1 Gbit/s, among two: the bytes alone; the two messages take next to nothing.
EXPECTED_S = SIZE / 125e6


def _rank(rings: Path, rank: int, now_ns: int) -> RingWriter:
    """Steps of 100 ms, of which rank 1 is 64 ms in an all_reduce and rank 0, which waits for it, 70; and 5 ms in a message."""
    began = now_ns - (STEPS + 1) * 100 * MS
    names = [
        group_entry(0, (0, 1), "data", backend="gloo"),
        group_entry(1, (0, 1), "pipe"),
        {"dtype": 1, "name": "float32"},
    ]
    records = [mark(0, began)]
    for n in range(STEPS):
        at = began + n * 100 * MS
        late = rank * 6 * MS
        records += [
            operation("all_reduce", start_ns=at + 10 * MS + late, end_ns=at + 80 * MS, seq=n, size=SIZE, dtype=1),
            operation(("send", "recv")[rank], start_ns=at + 82 * MS, end_ns=at + 90 * MS, group=1, peer=1 - rank, waited_us=5000),
            mark(n + 1, at + 100 * MS, exposed_ns=70 * MS),
        ]  # fmt: skip
    about = {"wall_offset_ns": time.time_ns() - time.monotonic_ns(), "started_ns": began}
    return write_ring(rings, records, names, job="train", rank=rank, **about)


@pytest.fixture(scope="module")
def trainers() -> list[RingWriter]:
    """The ranks, once ``asked`` has made them."""
    return []


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, trainers: list[RingWriter]) -> Iterator[RunningAgent]:
    """An agent that knows the link of the groups, and watches a job of two ranks."""
    directory = tmp_path_factory.mktemp("concluded")
    rings = rings_of(directory)
    (directory / "commwatch.toml").write_text('[links]\n"*" = "eth-1g"\n')
    with agent(directory, "--config", str(directory / "commwatch.toml")) as running:
        now = time.monotonic_ns()
        trainers += [_rank(rings, rank, now) for rank in (0, 1)]
        # The process of the test stands for the trainers, and must not end before the agent has looked.
        wait_for(lambda: running.samples().get('commwatch_steps_total{job_id="train",rank="1"}') == STEPS, "the steps")
        yield running
        while trainers:
            end_rank(trainers.pop())


def test_efficiency(asked: RunningAgent) -> None:
    """Efficiency is expected over transfer by the link that was named, without the waiting; it is below the link, and in /metrics."""
    found = asked.get("/api/v1/efficiency?job=train")
    (one,) = [each for each in found["operations"] if each["op"] == "all_reduce"]
    assert (one["group"], one["reference"], one["reference_name"], one["measured"]) == (
        "data",
        "catalogue",
        "eth-1g",
        "transfer",
    )
    assert one["measured_s"] == pytest.approx(0.064)
    assert one["expected_s"] == pytest.approx(EXPECTED_S, rel=0.01)
    assert one["efficiency"] == pytest.approx(EXPECTED_S / 0.064, rel=0.01)
    assert one["verdict"] == "below the link"
    assert found["fits"] == []  # of one size there is no curve
    labels = 'group="data",job_id="train",op="all_reduce",reference="catalogue"'
    name = f"commwatch_collective_efficiency_ratio{{{labels}}}"
    assert wait_for(lambda: asked.samples().get(name), "the gauge") == pytest.approx(one["efficiency"], rel=0.01)


def test_shares_by_group(asked: RunningAgent) -> None:
    """A step has the share of each group, and its waits for messages."""
    step = asked.get("/api/v1/steps?job=train&rank=0&limit=1")[0]
    assert step["comm_share"] == pytest.approx(0.75)
    assert step["group_shares"] == {"data": pytest.approx(0.7), "pipe": pytest.approx(0.05)}
    assert step["p2p_wait_s"] == pytest.approx(0.005)
    assert step["long"] is False


def test_pipelines(asked: RunningAgent) -> None:
    """The pipeline of the job, its stages with what they waited, and the bubble."""
    (pipeline,) = asked.get("/api/v1/pipelines?job=train")
    assert (pipeline["group"], pipeline["complete"], pipeline["micro_batches"]) == ("pipe", True, 1)
    assert pipeline["bubble_share"] == pytest.approx(0.05)
    assert [stage["forward_wait_s"] for stage in pipeline["stages"]] == [pytest.approx(0.005 * STEPS)] * 2


def test_advice(asked: RunningAgent) -> None:
    """Advice names the rule, the numbers that led to it, what to do and what it brings; the latest job is the default."""
    found = asked.get("/api/v1/advice")
    assert found == asked.get("/api/v1/advice?job=train") == asked.get("/api/v1/advice?last=all")
    with pytest.raises(urllib.error.HTTPError) as error:
        asked.get("/api/v1/advice?last=soon")
    assert error.value.code == 400
    assert "last=soon: give an age such as 90s, 5m or 2h, or all" in error.value.read().decode()
    by_rule = {each["rule"]: each for each in found}
    assert {"accumulate_gradients", "compression", "below_the_link"} <= set(by_rule)
    accumulate = by_rule["accumulate_gradients"]
    # Of the mean step 3 ms are waiting. Without them it has 97 ms: 64 of gradients, 5 of messages, 28 of compute.
    assert "transfer from 69%" in accumulate["gain"]
    assert "transfer takes 69% of a step" in accumulate["because"][0]
    assert "beside 3% of waiting for late ranks" in accumulate["because"][0]
    assert "all_reduce of group data: 64% of a step" in accumulate["because"][1]
    assert "gradients are sent as float32 (the time to convert them is left out)" in by_rule["compression"]["because"]
    assert "its efficiency is 50% against catalogue" in by_rule["below_the_link"]["because"]
    # The headline calls communication the bottleneck: the others wait 3% of the time for rank 1.
    assert found[0]["rule"] != "straggler"
    shares = [each["saves_share"] for each in found]
    assert shares == sorted(shares, reverse=True)


def test_no_such_job(asked: RunningAgent) -> None:
    """For an unknown job, every conclusion is a 404 that names it."""
    for route in ("efficiency", "pipelines", "advice"):
        with pytest.raises(urllib.error.HTTPError) as error:
            asked.get(f"/api/v1/{route}?job=nobody")
        assert error.value.code == 404
        assert "no job 'nobody'" in error.value.read().decode()


def test_report(asked: RunningAgent, trainers: list[RingWriter], tmp_path: Path) -> None:
    """The report of the ended job has shares by group and what to try, as text, JSON and one HTML file that loads nothing."""
    while trainers:
        end_rank(trainers.pop())
    wait_for(asked.job_has_ended, "the end of the job")
    places = ("--dir", asked.directory, "--config", asked.directory / "commwatch.toml")
    text = commwatch("report", *places, "train", env=clean_env(COLUMNS="250"))
    assert text.returncode == 0, text.stderr
    split = "72% of step time: 64% transfer, 3% waiting for rank 1, 5% waiting for messages"
    assert f"comm share  {split}; above 30%: communication is the bottleneck" in text.stdout
    assert "by group    data 67%, pipe 5% (they may overlap)" in text.stdout
    assert "send, recv  5% of step time spent waiting for them" in text.stdout
    assert "what to try" in text.stdout
    assert "  * exchange gradients less often: " in text.stdout
    report = json.loads(commwatch("report", *places, "train", "--json").stdout)
    assert report["group_shares"] == {"data": pytest.approx(0.67), "pipe": pytest.approx(0.05)}
    assert report["wait_share"] == pytest.approx(0.03)
    assert report["long_steps"] is None
    assert {each["rule"] for each in report["advice"]} == {each["rule"] for each in asked.get("/api/v1/advice")}
    page = tmp_path / "report.html"
    assert commwatch("report", *places, "train", "--html", page).returncode == 0
    html = page.read_text()
    assert "<h2>What to try</h2>" in html
    assert elsewhere(html) == []
