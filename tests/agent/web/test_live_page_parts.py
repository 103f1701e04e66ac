"""The parts of the communication share on the live page, in Chromium: transfer, waiting and exposed, of a job that runs meanwhile."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.helpers import MS, PATIENCE_S, agent
from tests.live import PERIOD_MS, HandMade, opened

if TYPE_CHECKING:
    from tests.browser import Chromium


GROUPS = ("data_parallel_group_of_the_first_stage", "tensor_parallel_group_of_the_first_stage")


def test_parts_of_the_share(chromium: Chromium, tmp_path: Path) -> None:
    """Once a whole slot is known, the plot has transfer, waiting and exposed beside communication; until then it says that they are not known."""
    directory = tmp_path / "run"
    with agent(directory) as running, HandMade(directory, "late", 4, late=2, ago_s=1, group=GROUPS) as job:
        end_ns = time.monotonic_ns()
        job.run(3, end_ns)
        with opened(chromium, running, job) as visit:
            said = visit.page.locator("#shares-said")
            expect(said).to_contain_text("Its parts, transfer and waiting, are not known.")
            last = time.monotonic() + PATIENCE_S
            while "Latest known parts" not in (said.text_content() or "") and time.monotonic() < last:
                end_ns += 2 * PERIOD_MS * MS
                visit.page.wait_for_timeout(max(0, (end_ns - time.monotonic_ns()) / MS))
                job.run(2, end_ns)
            # Of each 120 ms three of four ranks wait 40.
            expect(said).to_have_text(re.compile(r"parts: transfer 1[0-5]%, waiting 2[2-7]%\."))
            legend = visit.page.locator("#shares .u-legend")
            expect(legend).to_contain_text(re.compile("communication.*transfer.*waiting.*exposed"))
            visit.assert_readable()
            for width in (1280, 400):
                visit.page.set_viewport_size({"width": width, "height": 900})
                visit.assert_readable()
                visit.picture(f"live-parts-{width}")
            # In the narrow window, no finger has to move a table for who is late and what waits.
            for table, heads in (("ranks", ("comm", "exposed", "waits")), ("operations", ("busbw", "time", "waits"))):
                for head in heads:
                    found = visit.page.locator(f"#{table} thead th", has_text=re.compile(rf"^{head}"))
                    place = found.bounding_box()
                    assert place is not None, head
                    assert place["x"] + place["width"] <= 400, (table, head, place)
