"""Tests of the page checks: each way for a page to be wrong is found, and a correct page passes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser import Chromium

GOOD = """<title>Good</title><style>:root { color-scheme: light dark } rect { fill: #000; fill-opacity: .05 }</style>
<h1>One</h1><h2>Two</h2><h3>Three</h3><h2>Two again</h2><button>Press</button><a href="#x">Lead</a>
<table><tr><th>a<th>b<tr><td>1<td>2</table><div style="overflow-x: auto"><pre>LONG</pre></div>
<svg role="img" width="300" height="60"><title>A drawing</title><rect width="300" height="60"/>
<text y="20" fill="currentColor">over</text><text y="40" fill="currentColor">under</text></svg>
<details><summary>more</summary><p style="color: #888; background: #777">not shown</p></details>""".replace(
    "LONG", "wide " * 200
)

#: What is wrong, and how it is said.
WRONG = {
    "<button></button>": "button without a name",
    '<a href="/"><svg></svg></a>': "link without a name",
    "<input>": "textbox without a name",
    '<p tabindex="0">text</p>': "paragraph without a name",
    "<details><summary></summary>text</details>": "DisclosureTriangle without a name",
    '<svg role="img" width="10" height="10"></svg>': "image without a name",
    "<h4>Four</h4>": "heading of level 4 after level 2: Four",
    "<table><tr><td>1<td>2</table>": "table without headers",
    "<i id=x></i><i id=x></i>": "id that is not unique: x",
    '<p style="width: 2000px">text': "wider than the window: 2",
    '<p style="color: #888">pale</p>': 'contrast 3.5: "pale"',
    '<p style="opacity: .5">pale</p>': 'contrast 4.0: "pale"',
    '<p style="color: #fff"><span style="background: #000c">right</span> wrong</p>': 'contrast 1.0: "wrong"',
    '<p style="background-image: linear-gradient(red, blue)">text</p>': "text over an image",
    '<svg width="90" height="30"><title>A</title><rect width="90" height="30"/><text y="20">black</text></svg>': "contrast 1.0",
    '<p style="font-size: 9px">small</p>': "letters of 9.0 pixels",
    '<svg width="44" height="24" viewBox="0 0 88 48"><title>A</title><text y="20">small</text></svg>': "letters of 8.0 pixels",
    '<svg width="90" height="30"><title>A</title><text y="20">one</text><text y="20">two</text></svg>': "one over the other",
    '<svg width="20" height="30"><title>A</title><text y="20">a long name</text></svg>': 'cut off: "a long name"',
}  # fmt: skip


class _Page(BaseHTTPRequestHandler):
    """Answers every address with the server's page; says nothing of it."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page.encode() if self.path == "/" else b"")  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """A server of one page, which is its attribute ``page``."""
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def serve(server: HTTPServer, body: str) -> str:
    """The address of a page."""
    server.page = f'<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="data:,">{body}'  # type: ignore[attr-defined]
    return f"http://127.0.0.1:{server.server_port}/"


@pytest.mark.parametrize("dark", [False, True])
def test_good_page(browser: Browser, server: HTTPServer, tmp_path: Path, dark: bool) -> None:
    """A page that is as it should be has no faults at 400 pixels, in the light and in the dark; its picture is kept where one is wanted."""
    from tests.browser import Chromium

    with Chromium(browser, tmp_path).visit(serve(server, GOOD), width=400, dark=dark) as visit:
        assert visit.faults() == []
        assert visit.page.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [400, dark]
        visit.picture("good")
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")
    assert visit.requests == [f"http://127.0.0.1:{server.server_port}/"]


def test_faults(chromium: Chromium, server: HTTPServer) -> None:
    """Anything that makes a page unreadable or unusable is reported, and nothing else."""
    with chromium.visit(serve(server, "<title>Wrong</title><h1>One</h1><h2>Two</h2><main></main>")) as visit:
        for wrong, said in WRONG.items():
            visit.page.evaluate("wrong => { document.querySelector('main').innerHTML = wrong }", wrong)
            found = visit.faults()
            assert [said in fault for fault in found] == [True], (wrong, found)
            with pytest.raises(AssertionError):
                visit.assert_readable()


def test_page_without_title_and_language(chromium: Chromium, tmp_path: Path) -> None:
    """A page without a title and a language has two faults."""
    (tmp_path / "page.html").write_text("<!doctype html><h1>One</h1>")
    with chromium.visit((tmp_path / "page.html").as_uri()) as visit:
        assert visit.faults()[0].startswith("RootWebArea without a name")
        assert visit.faults()[1:] == ["the page does not say its language"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<script>console.error('went wrong')</script>", "went wrong"),
        ("<script>throw new Error('thrown')</script>", "thrown"),
        ("<script>Promise.reject(new Error('rejected'))</script>", "rejected"),
        ("<script>setTimeout(() => { throw new Error('late') })</script>", "late"),
        ("<img alt='' src='/none.png'>", "404"),
        ("<meta http-equiv='Content-Security-Policy' content=\"script-src 'self'\"><script>1</script>", "Content Security"),
    ],
)  # fmt: skip
def test_errors(chromium: Chromium, server: HTTPServer, body: str, said: str) -> None:
    """An error of a script, on the console or of a request fails the visit, unless it is forgiven."""
    with pytest.raises(AssertionError, match=f"the page had errors.*{said}"), chromium.visit(serve(server, body)):
        pass
    with chromium.visit(serve(server, body), forgiven=said) as visit:
        pass
    assert len(visit.errors) == 1


@pytest.mark.parametrize(
    "body",
    [
        "<img alt='' src='http://elsewhere.test/a.png'>",
        "<script src='//elsewhere.test/a.js'></script>",
        "<script>fetch('http://192.0.2.1/').catch(() => 0)</script>",
        "<script>new EventSource('http://elsewhere.test/events')</script>",
        "<script>new WebSocket('ws://elsewhere.test/events')</script>",
        "<link rel='stylesheet' href='http://elsewhere.test/a.css'>",
    ],
)
def test_other_hosts(chromium: Chromium, server: HTTPServer, body: str) -> None:
    """A request to another host finds no server, and fails the visit even if its error is forgiven."""
    with (
        pytest.raises(AssertionError, match="the page asked somebody else"),
        chromium.visit(serve(server, body), forgiven="ERR_NAME_NOT_RESOLVED"),
    ):
        pass


def test_other_ports_and_files(chromium: Chromium, tmp_path: Path) -> None:
    """A page from disk may request nothing: neither from another port of this host, nor another file."""
    (tmp_path / "other.css").write_text("")
    for other in (f"http://127.0.0.1:{free_port()}/", (tmp_path / "other.css").as_uri()):
        (tmp_path / "page.html").write_text(f"<!doctype html><link rel='stylesheet' href='{other}'>")
        with (
            pytest.raises(AssertionError, match="the page asked somebody else"),
            chromium.visit((tmp_path / "page.html").as_uri(), forgiven="ERR_CONNECTION_REFUSED"),
        ):
            pass


def test_frameworks_need_no_browser() -> None:
    """What the tests of frameworks share with others can be imported in their environment, which has no Playwright."""
    files = (Path(__file__).parent / "frameworks").glob("test_*.py")
    lines = {line for file in files for line in file.read_text().splitlines() if line.startswith("from tests.")}
    program = "\n".join(["import sys", "sys.modules['playwright'] = None", *sorted(lines)])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)
