"""`commwatch whatif` and its route: the same prediction on one node and over all nodes, and errors in one line."""

from __future__ import annotations

import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from commwatch_agent.history.soundness import row_checksum
from commwatch_agent.reference.references import Measured, directory, save
from tests.agent.test_config import one_line
from tests.agent.test_job_reports import BASE, NODES, STEPS, Site
from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import (
    MS,
    RunningAgent,
    agent,
    clean_env,
    commwatch,
    end_rank,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

#: Milliseconds of a step: compute, the exchange, the optimizer; and how late rank 1 is.
COMPUTE, EXCHANGE, OPTIMIZER, LATE = 60, 40, 10, 30
STEP = COMPUTE + LATE + EXCHANGE + OPTIMIZER


def _rank(rings: Path, rank: int, job: str = "train", ranks: int = 2, exchange: int = EXCHANGE) -> object:
    """A rank that reduces gradients of 8 MiB in each of 30 steps."""
    step_ms = STEP - EXCHANGE + exchange
    records = [mark(0, MS)]
    for step in range(30):
        begin = (1 + step * step_ms) * MS
        launch = begin + (COMPUTE + LATE * (rank == 1)) * MS
        end = begin + (COMPUTE + LATE + exchange) * MS
        records.append(operation("all_reduce", start_ns=launch, end_ns=end, seq=step, size=8 << 20))
        records.append(mark(step + 1, begin + step_ms * MS, exposed_ns=end - launch))
    group = [group_entry(0, tuple(range(ranks)), "default_pg")]
    return write_ring(rings, records, group, job=job, rank=rank, world_size=ranks, wall_offset_ns=BASE * 1000 * MS)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that has read a job of two ranks."""
    directory = tmp_path_factory.mktemp("whatif")
    writers: list[Any] = [_rank(rings_of(directory), rank) for rank in range(2)]
    with agent(directory) as running:
        wait_for(lambda: len(running.get("/api/v1/steps?job=train&limit=1000")) == 2 * 30, "the steps")
        yield running
    for writer in writers:
        end_rank(writer)


@pytest.mark.parametrize(
    ("flags", "query", "step_ms"),
    [
        (["--link", "2x"], "link=2x", STEP - EXCHANGE / 2),
        (["--no-late"], "no_late=true", STEP - LATE),
        (["--no-late-rank", "1", "--link", "4x"], "no_late_rank=1&link=4x", STEP - LATE - EXCHANGE * 3 / 4),
        (["--compress", "fp16"], "compress=fp16", STEP - EXCHANGE / 2),
        (["--compute", "0.5x"], "compute=0.5x", STEP - (COMPUTE + LATE + OPTIMIZER) / 2),
        (["--compute", "1=2x"], "compute=1%3D2x", STEP + COMPUTE + LATE + OPTIMIZER),
        (["--accumulate", "3"], "accumulate=3", STEP + 2 * (COMPUTE + LATE / 2) + LATE),
        (["--ranks", "4"], "ranks=4", STEP + EXCHANGE / 2),
    ],
)
def test_known_changes(asked: RunningAgent, flags: list[str], query: str, step_ms: float) -> None:
    """The command and the route answer alike, and as the known job does."""
    done = commwatch("whatif", "train", *flags, "--json", "--dir", asked.directory)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found == asked.get(f"/api/v1/whatif?job=train&{query}")
    assert found["measured_s"] == pytest.approx(STEP / 1e3) == found["replayed_s"]
    (answer,) = found["answers"]
    assert answer["predicted"]["step_s"] == pytest.approx(step_ms / 1e3, rel=0.02)


def test_usual_questions(asked: RunningAgent) -> None:
    """Without a change, the usual questions are answered, with how the job scales, and with what was assumed."""
    done = commwatch("whatif", "--dir", asked.directory, env=clean_env(COLUMNS="250"))
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "what if, job train: the latest 30 steps of 2 ranks replayed",
        "no rank is late",
        "twice the ranks",
        "too much alike",
    ):
        assert part in done.stdout, done.stdout
    found = asked.get("/api/v1/whatif")
    assert [each["changes"] for each in found["answers"]][:2] == [["no rank is late"], ["twice the bandwidth"]]
    assert found["unanswered"] == {
        "half the latency": "the recorded operations are too much alike to tell latency from bandwidth",
        "buckets of 25 MiB": "it changes nothing in the recorded steps",
    }
    for question, why in found["unanswered"].items():
        assert f"  - {question}: {why}\n" in done.stdout
    shares = [point["comm_share"] for point in found["forecast"]["points"]]
    assert shares == sorted(shares)
    assert found["forecast"]["limit_ranks"] == 2


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("link", "fast", "link: no link 'fast'; choose from"),
        ("link", "0x", "link: 0x: give a factor above 0, such as 2x"),
        ("latency", "1ms", "latency: 1ms: give a factor above 0, such as 0.5x"),
        (
            "latency",
            "0.5x",
            "the recorded operations are too much alike to tell latency from bandwidth",
        ),
        ("group", "tp", "group: tp: give link or latency, too"),
        ("compute", "fast", "compute: fast: give a factor above 0, such as 0.5x, or 3=0.5x for rank 3"),
        ("compute", "7=0.5x", "rank 7 has no recorded steps; ranks with steps: 0, 1"),
        ("no-late-rank", "7", "rank 7 has no recorded steps; ranks with steps: 0, 1"),
        ("buckets", "25", "buckets: 25: give a size of at least 1 KiB, such as 25MB or 25MiB"),
        ("buckets", "1KiB", "buckets: a step would have 8192 of them; at most 1000 are replayed"),
        (
            "compress",
            "zip",
            "compress: zip: give fp16, bf16, int8, or the part of the bytes that is left, such as 0.25",
        ),
        ("accumulate", "0", "accumulate: 0: give a number of micro-steps from 1 to 64"),
        ("ranks", "0", "ranks: 0: give a number from 1 to"),
    ],
)
def test_wrong_questions(asked: RunningAgent, flag: str, value: str, says: str) -> None:
    """A wrong change is one line and exit code 2 for the command, and problem details for the route."""
    assert says in one_line(commwatch("whatif", "train", f"--{flag}", value, "--dir", asked.directory))
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{asked.url}/api/v1/whatif?job=train&{flag.replace('-', '_')}={quote(value)}")
    with caught.value as answer:
        problem = json.loads(answer.read())
        assert (answer.code, problem["status"]) == (HTTPStatus.BAD_REQUEST, HTTPStatus.BAD_REQUEST)
    assert says in problem["detail"]


def test_measured_link(asked: RunningAgent) -> None:
    """The link can be a measured one, by the name of its file."""
    points = {"all_reduce": {size: 2e-3 + size / 1e9 for size in (1 << 20, 8 << 20, 64 << 20)}}
    one = Measured("bench", "new link", "gloo", 2, (), 0.0, points, "a test")
    name = save(directory(asked.directory), one).stem
    found = asked.get(f"/api/v1/whatif?job=train&link={name}")
    done = commwatch("whatif", "train", "--link", name, "--json", "--dir", asked.directory)
    assert json.loads(done.stdout) == found
    assert found["answers"][0]["changes"] == [f"link {name}"]
    step_s = (STEP - EXCHANGE) / 1e3 + 2e-3 + (8 << 20) / 1e9
    assert found["answers"][0]["predicted"]["step_s"] == pytest.approx(step_s, rel=1e-3)


def test_nothing_to_replay(asked: RunningAgent) -> None:
    """A change of what the job does not do, and a period without steps, each give a one-line error."""
    known = "whatif", "train", "--dir", asked.directory
    assert "replication: the job exchanges whole gradients already" in one_line(commwatch(*known, "--replicate"))
    assert "too few steps of all ranks were recorded: " in one_line(commwatch(*known, "--last", "0.1s"))
    assert "no job 'other'" in one_line(commwatch("whatif", "other", "--dir", asked.directory))


def test_several_runs(tmp_path: Path) -> None:
    """With another run, the forecast is that of the link of both, and has both recorded steps; an unknown run is a one-line error."""
    # α = 2 ms, and the bytes take 36 ms on a link: 4 + 36 ms among two ranks, 28 + 63 ms among eight.
    runs = {"train": (2, EXCHANGE), "wide": (8, 91)}
    writers: list[Any] = [
        _rank(rings_of(tmp_path), rank, job, ranks, exchange)
        for job, (ranks, exchange) in runs.items()
        for rank in range(ranks)
    ]
    with agent(tmp_path) as running:
        wait_for(lambda: len(running.get("/api/v1/steps?limit=1000")) == 10 * 30, "the steps")
        done = commwatch("whatif", "train", "--with", "wide", "--json", "--dir", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found == running.get("/api/v1/whatif?job=train&with=wide")
        points = {point["ranks"]: point for point in found["forecast"]["points"]}
        assert {ranks: point["measured_s"] for ranks, point in points.items() if point["measured_s"] is not None} == {
            2: pytest.approx(STEP / 1e3),
            8: pytest.approx((STEP - EXCHANGE + 91) / 1e3),
        }
        for ranks in (4, 16, 64):
            exchange = 4 * (ranks - 1) + 72 * (ranks - 1) / ranks
            assert points[ranks]["step_s"] == pytest.approx((STEP - EXCHANGE + exchange) / 1e3, rel=0.01)
        text = commwatch("whatif", "train", "--with", "wide", "--dir", tmp_path, env=clean_env(COLUMNS="250")).stdout
        assert "ranks    step  communication  efficiency  measured step" in text
        for query, says in (
            ("with=other", "no job 'other'"),
            ("with=wide&scope=job", "commwatch whatif --with"),
            ("compress_cost=5", "compress-cost: needs compress"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{running.url}/api/v1/whatif?job=train&{query}")
            assert says in json.load(refused.value)["detail"]
        assert "no job 'other'" in one_line(commwatch("whatif", "train", "--with", "other", "--dir", tmp_path))
    for writer in writers:
        end_rank(writer)


def test_gains_of_advice(asked: RunningAgent) -> None:
    """The gain of advice is the one that its parameters of ``/api/v1/whatif`` give, in the API and in the report; that on late ranks is what was measured."""
    found = asked.get("/api/v1/advice?job=train")
    done = commwatch("report", "train", "--json", "--dir", asked.directory)
    assert _replayed(json.loads(done.stdout)["advice"]) == _replayed(found)
    late = next(each for each in found if each["rule"] == "straggler")
    assert (late["gain_source"], late["saves_share"]) == ("bound", pytest.approx(LATE / STEP, abs=0.006))
    assert late["gain"] == f"would save {100 * LATE / STEP:.0f}% of a step as measured"
    for each in _replayed(found):
        for remedy in each["remedies"]:
            (answer,) = asked.get(f"/api/v1/whatif?job=train&{urlencode(remedy['whatif'], doseq=True)}")["answers"]
            assert remedy["saves_share"] == pytest.approx(answer["saves_share"], abs=0.006), each
        share = f"{100 * each['saves_share']:.0f}%"
        assert f"a replay of the recorded steps gives {share}" in each["gain"]
    text = commwatch("report", "train", "--dir", asked.directory, env=clean_env(COLUMNS="250")).stdout
    assert "(“up to”: a bound by a formula)" in text
    assert late["gain"] in text


def _replayed(advice: list[Any]) -> list[Any]:
    """Advice with predicted gains, without the numbers that led to it, which the report has of the whole job."""
    return [each | {"because": []} for each in advice if each["gain_source"] == "replay"]


def test_ranks_without_cores(tmp_path: Path) -> None:
    """Where the ranks lacked cores, the table, its JSON, the page and the advice of a report have which share of the time they waited for one."""
    writers: list[Any] = [_rank(rings_of(tmp_path), rank) for rank in range(2)]
    with agent(tmp_path) as running:
        wait_for(lambda: len(running.get("/api/v1/steps?job=train&limit=1000")) == 2 * 30, "the steps")
        for writer in writers:
            end_rank(writer)
        wait_for(lambda: running.get("/api/v1/jobs")[0]["state"] == "ended", "the end")
    (history,) = tmp_path.rglob("history*.sqlite")
    with closing(sqlite3.connect(history)) as db, db:
        for (ring,) in db.execute("SELECT id FROM ring").fetchall():
            row = (ring, "core_wait", 0, "0.340")
            db.execute("INSERT OR REPLACE INTO name VALUES (?,?,?,?,?)", (*row, row_checksum(row)))
    wide = clean_env(COLUMNS="250")
    cores = "that the ranks have CPU cores, for which their main threads waited 34% of the time"
    assert f"\nthese estimates assume {cores}\n" in commwatch("whatif", "train", "--dir", tmp_path, env=wide).stdout
    assert json.loads(commwatch("whatif", "train", "--dir", tmp_path, "--json").stdout)["core_wait_share"] == 0.34
    commwatch("report", "train", "--dir", tmp_path, "--html", tmp_path / "report.html", env=wide)
    assert f"; this assumes {cores}" in commwatch("report", "train", "--dir", tmp_path, env=wide).stdout
    assert f"<p>These estimates assume {cores}.</p>" in (tmp_path / "report.html").read_text()


def test_over_all_nodes(tmp_path: Path) -> None:
    """With ``scope=job`` any agent, and the command, answer as one agent does that has the records of all nodes."""
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        expected = site.whole.get("/api/v1/whatif?job=train&link=2x&last=all")
        assert expected["ranks"] == 6
        for node in site.nodes:
            assert _rounded(wait_for(partial(_of_all, node), "an answer of all agents")) == _rounded(expected)
        done = commwatch("whatif", "train", "--link", "2x", "--last", "all", "--json", "--dir", site.nodes[0].directory)
        assert _rounded(json.loads(done.stdout)) == _rounded(expected)
        alone = site.nodes[0].get("/api/v1/whatif?job=train&link=2x&last=all")
        assert alone["ranks"] == 2
        assert any(each.startswith("only 2 of 6 ranks are known here") for each in alone["assumed"])
        assert 3 < expected["steps"] <= STEPS
    for writer in site.writers:
        end_rank(writer)


def _of_all(node: RunningAgent) -> Any:
    """The answer over all nodes; ``None`` while an agent on a busy machine takes too long for its part."""
    found = node.get("/api/v1/whatif?job=train&link=2x&last=all&scope=job")
    assert found["nodes"]["answered"] + len(found["nodes"]["silent"]) == len(NODES)
    return None if found["nodes"]["silent"] else found["data"]


def _rounded(found: Any) -> Any:
    """Numbers to 1 %, because the clocks of nodes are compared only so well."""
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_rounded(each) for each in found]
    return float(f"{found:.2g}") if isinstance(found, float) else found
