"""Every query of every dashboard, sent to a real Prometheus that scrapes a real agent with our rules during a real job of two ranks.

What this machine lacks is played: cards by the stand-in for NVML, RDMA ports by a recorded host behind the agent's own
exporter (a second target), NCCL's log and a rank on a card by a second job, and a hang by a third, both written by hand.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.sources.host import HostWatch
from commwatch_collectors.registry import Reading
from commwatch_dashboards.common import rank_map
from tests.agent.sources.test_nccl import lines
from tests.agent.web.routes.test_jobs import rings_of
from tests.alerts.promtool import exported
from tests.dashboards.grafana import NAMES, Target, Values, choices, load, substituted, targets
from tests.e2e.torchjob import preforked
from tests.gpus import UUIDS, Script, build
from tests.helpers import (
    MS,
    PATIENCE_S,
    Trainer,
    agent,
    clean_env,
    free_port,
    group_entry,
    identity,
    operation,
    wait_for,
)
from tests.live import HandMade
from tests.prometheus import Prometheus, prometheus
from tests.trees import procfs, say, unpack

Series = list[tuple[dict[str, str], list[float]]]
LOOK_S, SECOND_NS = 20, 1_000_000_000
#: Labels of alerts that have to hold for minutes; those that fire at once here have others.
_OF_LATER_ALERTS = {"rank", "group"}


@pytest.fixture(scope="module")
def prom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen all there is to see."""
    place = tmp_path_factory.mktemp("dashboards")
    settings = place / "commwatch.toml"
    settings.write_text('[links]\nlate = "eth-10g"\n[[receivers]]\nkind = "webhook"\nurl = "http://127.0.0.1:9/hook"\n')
    nvml, script = build(place).parent, Script(place / "script.txt")
    script.say("event 1 1 79", "1.field.197", "1.field.198")
    script.say("1.nvmlDeviceGetPcieThroughput.0 250000", "1.nvmlDeviceGetPcieThroughput.1 1250")
    env = clean_env(LD_LIBRARY_PATH=str(nvml), FAKE_NVML=str(script.path))
    with ExitStack() as stack:
        running = stack.enter_context(agent(place / "run", "--config", str(settings), env=env))
        stack.enter_context(_gloo_job(place))
        stack.enter_context(_job_on_a_card(place))
        # A wait at a place that is new is a stall after a minute.
        stuck = stack.enter_context(HandMade(place / "run", "stuck", ago_s=80))
        stuck.run(3, time.monotonic_ns() - 70 * SECOND_NS)
        stuck.hang(0, age_ms=61_000)
        recorded = stack.enter_context(_recorded_host(place))
        yield stack.enter_context(prometheus(place, [running.url, recorded], (exported(place),)))


@contextmanager
def _gloo_job(place: Path) -> Iterator[None]:
    """Two real ranks."""
    stop = place / "stop"
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(place / "run"), COMMWATCH_JOB="train")
    with open(place / "job.log", "wb") as log:
        job = subprocess.Popen(preforked("busy.py", 2, str(stop)), env=env, stdout=log, stderr=log)
    try:
        yield
    finally:
        stop.touch()
        try:
            job.wait(PATIENCE_S)
        finally:
            job.kill()
            job.wait()
    assert (place / "job.log").read_text().count("job done") == 2


@contextmanager
def _job_on_a_card(place: Path) -> Iterator[None]:
    """A rank on a GPU, with a log of NCCL that reports a fault."""
    log = place / "nccl.log"
    about = identity(job="cards", host="host", hook="native")
    with Trainer(rings_of(place / "run") / "cards.r0.0.ring", about) as rank:
        pid = rank.process.pid
        wrong = f"host:{pid}:{pid} [0] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'"
        log.write_text("\n".join([*lines(0, pid, "aa", (0, 1)), wrong, wrong, ""]))
        card = {"uuid": UUIDS[0].removeprefix("GPU-"), "bus_id": "", "index": 0}
        rank.call("name", [(group_entry(),), ({"gpu": card},), ({"nccl_log": str(log)},)])
        rank.write([operation(start_ns=MS, end_ns=2 * MS)])
        yield


@contextmanager
def _recorded_host(place: Path) -> Iterator[str]:
    """A node with RoCE ports as recorded, whose counters move: its address."""
    tree = unpack("roce", place / "roce")
    watch = HostWatch(JobTable(), threading.RLock(), time.monotonic_ns, tree / "sys")
    counter = "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data"

    def readings() -> Iterable[tuple[str, list[Reading] | None]]:
        say(tree, counter, int((tree / counter).read_text()) + 1_000_000)
        watch.tick()
        return watch.readings()

    registry = CollectorRegistry()
    registry.register(Exporter(JobTable(), threading.RLock(), time.monotonic_ns, readings))
    port = free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        with procfs(tree / "proc"):
            yield f"127.0.0.1:{port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("name", NAMES)
def test_every_query_is_answered(prom: Prometheus, name: str) -> None:
    """For some choice of its variables each query has a series with a finite value and the labels that the panel names; for none an error."""
    dashboard = load(name)
    left = set(targets(dashboard))
    assert len(left) >= len(dashboard["panels"]) - 8

    def all_answered() -> bool:
        nonlocal left
        for chosen in choices(dashboard, lambda selector, label: _values(prom, selector, label)):
            left = {target for target in left if not _answered(_ask(prom, target, chosen), target)}
        return not left

    try:
        wait_for(all_answered, "answers")
    except AssertionError:
        pytest.fail("not answered:\n" + "\n".join(sorted(map(str, left))))


def test_ranks_in_order(prom: Prometheus) -> None:
    """Rows of a map of ranks, which are sorted by their texts, are in the order of ranks; none is lost, however many there are."""
    ranks = ["0", "2", "10", "1024", "98765"]
    expr = " or ".join(f'label_replace(vector({rank}), "rank", "{rank}", "", "")' for rank in ranks)
    panel: Any = rank_map("title", "description", "s", f"({expr})").build()
    rows = sorted((labels["row"], value) for labels, value in prom.query(panel.targets[0].expr))
    assert [value for _, value in rows] == [float(rank) for rank in ranks]


def _values(prom: Prometheus, selector: str, label: str) -> list[str]:
    found: list[str] = prom.get(f"label/{label}/values?{urllib.parse.urlencode({'match[]': selector})}")
    return found


def _ask(prom: Prometheus, target: Target, chosen: Values) -> Series:
    expr = substituted(target.expr, chosen)
    if target.instant:
        return [(labels, [value]) for labels, value in prom.query(expr)]
    now = time.time()
    window = {"query": expr, "start": f"{now - LOOK_S:.3f}", "end": f"{now:.3f}", "step": "1"}
    found = prom.get(f"query_range?{urllib.parse.urlencode(window)}")["result"]
    return [(each["metric"], [float(value) for _, value in each["values"]]) for each in found]


def _answered(found: Series, target: Target) -> bool:
    finite = [labels for labels, values in found if any(map(math.isfinite, values))]
    there = {label for labels in finite for label in labels}
    if "ALERTS" in target.expr:
        there |= _OF_LATER_ALERTS
    return bool(finite) and set(target.labels) <= there
