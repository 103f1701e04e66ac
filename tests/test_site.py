"""The documents as a site: every page is in it, every link leads somewhere, and it needs no other host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs.repository_links import in_repository, in_site, outside, rewritten
from tests.helpers import clean_env

if TYPE_CHECKING:
    from tests.browser import Chromium

TREE = Path(__file__).parents[1]


def build(tree: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of ``tree`` as ``make docs`` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)],
        cwd=tree,
        env=clean_env(NO_MKDOCS_2_WARNING="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site."""
    to = tmp_path_factory.mktemp("site")
    done = build(TREE, to)
    assert (done.returncode, "WARNING" in done.stdout) == (0, False), done.stdout
    return to


def test_every_document_is_a_page(site: Path) -> None:
    """Every file of docs, the README, the runbook and the changelog is a page, and the search has it."""
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    names = [path.stem for path in (TREE / "docs").glob("*.md")]
    names += [
        f"repository/{name}" for name in ("alerts/commwatch_alerts/runbook", "CHANGELOG", "CONTRIBUTING", "SECURITY")
    ]
    for name in names:
        assert (site / name / "index.html").is_file(), name
        assert f'"location":"{name}/"' in index, name
    assert "<h1" in (site / "index.html").read_text(encoding="utf-8")


def test_no_other_host(site: Path) -> None:
    """No page loads a script, a style, a font or a picture from another host."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>", text)
        assert loaded == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_search(site: Path, chromium: Chromium) -> None:
    """The search finds a word of a page, without a request to another host."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium.visit(f"http://127.0.0.1:{server.server_port}/") as visit:
            visit.page.get_by_role("textbox", name="Search").click()
            visit.page.keyboard.type("straggler")
            visit.page.locator(".md-search-result a[href*='verdicts/#stragglers']").first.wait_for()
    finally:
        server.shutdown()
        server.server_close()


def test_markdown_is_read_as_on_github(site: Path) -> None:
    """No list, table or block of code is left as plain text, which happens where only GitHub takes it for one."""
    for page in site.rglob("*.html"):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        assert not re.search(r"(?:<p>|\n)\s*(?:[-*] |\d{1,2}\. |\|[ -]|```)", prose), page


def test_missing_page_is_an_error(tmp_path: Path) -> None:
    """The build fails if a page of docs is not in the navigation, and names it."""
    shutil.copytree(TREE / "docs", tmp_path / "docs")
    shutil.copy(TREE / "mkdocs.yml", tmp_path)
    shutil.copy(TREE / "README.md", tmp_path)
    (tmp_path / "docs" / "forgotten.md").write_text("# Forgotten\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert re.search(r"not included in the \"nav\".*\n\s*- forgotten.md", done.stdout), done.stdout


def test_links_of_the_site() -> None:
    """Links between files inside and outside ``docs`` are right from where the site has the files."""
    text = "[a](../alerts/commwatch_alerts/runbook.md#x) [b](metrics.md) [c](https://example.com) [d](#y) ![e](images/e.png) [f](../README.md#z)"
    assert rewritten(text, "docs/alerts.md") == (
        "[a](repository/alerts/commwatch_alerts/runbook.md#x) [b](metrics.md) [c](https://example.com) [d](#y) ![e](images/e.png) [f](index.md#z)"
    )
    assert (
        rewritten("[a](docs/api.md#b) [c](CHANGELOG.md)", "README.md") == "[a](api.md#b) [c](repository/CHANGELOG.md)"
    )
    assert rewritten("[a](../docs/api.md)", "bench/README.md") == "[a](../../api.md)"
    for path in ("README.md", "docs/api.md", "alerts/commwatch_alerts/runbook.md"):
        assert in_repository(in_site(path)) == path


def test_files_outside_docs(tmp_path: Path) -> None:
    """A file belongs to the site if a document links to it, or a document of another folder that the site has."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "README.md").write_text("[](docs/a.md)")
    (tmp_path / "docs" / "a.md").write_text("[](../other/b.md#c) [](../missing.md) [](../other)")
    (tmp_path / "other" / "b.md").write_text("[](data.json) [](../docs/a.md)")
    (tmp_path / "other" / "data.json").write_text("{}")
    assert outside(["docs/a.md"], tmp_path) == ["README.md", "other/b.md", "other/data.json"]
