"""The page of a comparison as people open it: from disk, in Chromium, wide and narrow, in the dark and in the light."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commwatch_agent.compare.comparison import compare
from commwatch_agent.compare.pages import html
from tests.agent.compare.test_incidents import incident
from tests.agent.compare.test_runs import run_of, watched

if TYPE_CHECKING:
    from tests.browser import Chromium


#: Tables that are wider than what shows them.
CUT = "[...document.querySelectorAll('main div:has(> table)')].filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerText)"
#: Markup, another direction, and no place to break.
HOSTILE = '<img src="x" onerror="alert(1)">\u202e' + 90 * "x"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_readable(chromium: Chromium, tmp_path: Path, width: int, dark: bool) -> None:
    """Everything can be read, whatever the names of jobs and settings are; the page loads nothing else."""
    before = run_of(watched(tmp_path / "a", HOSTILE), HOSTILE)
    after = run_of(watched(tmp_path / "b", "after", slower=1.2, hook=HOSTILE), "after")
    before, after = (
        replace(run, incidents=[incident(kind, says=HOSTILE, group=HOSTILE, ranks=())])
        for run, kind in ((before, "straggler"), (after, "hang"))
    )
    page = tmp_path / "compare.html"
    page.write_text(html(compare(before, after)), encoding="utf-8")
    with chromium.visit(page.as_uri(), width=width, dark=dark) as visit:
        visit.picture(f"compare-{width}-{'dark' if dark else 'light'}")
        visit.assert_readable()
        assert "step time slower by 20%" in visit.page.inner_text("main")
        assert visit.page.evaluate(CUT) == []
    assert visit.requests == [page.as_uri()]
