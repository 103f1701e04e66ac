"""Makes the pictures of ``docs/images`` (``make pictures``).

Of a real job with a late rank: page, ``top``, report and alert. Of one in which a rank is stopped: the page in the hang, and after the end.

It takes seven minutes: the alerts wait for so long.
"""

from __future__ import annotations

import html
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import Chromium, launched
from tests.faults.run import Place, job
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.helpers import RunningAgent, agent, clean_env, commwatch, wait_for

SCENARIO = "ddp4x4 late 2"
#: Seconds until both alerts fire.
PATIENT_S = 480.0
WIDTH = 1100


def firing(running: RunningAgent) -> list[dict[str, Any]]:
    """The alerts on the straggler, and on the communication that is waiting for it."""
    active = running.get("/api/v1/alerts?state=firing")["active"]
    return [each for each in active if each["name"] in ("StragglerRank", "CommShareHigh")]


def terminal(text: str) -> str:
    """A page that looks like a terminal."""
    style = "background: #16181d; color: #e6e6e6; margin: 0; padding: 16px; font: 14px/1.35 monospace; white-space: pre-wrap"
    return f'<!doctype html><title>terminal</title><body style="{style}">{html.escape(text)}'


def in_words(alert: dict[str, Any]) -> str:
    """An alert as a notification has it."""
    texts = alert["annotations"]
    labels = ", ".join(f"{name}={value}" for name, value in alert["labels"].items())
    return "\n".join(
        (f"[{alert['severity'].upper()}] {alert['name']}  {labels}", texts["summary"], texts["description"], "")
    )


def hang(pictures: Path) -> None:
    """Run a job in which a rank is stopped, and take the pictures of its page, in the hang and after its end."""
    scenario = Scenario("ddp4", "stop", (2,), frozenset({"hang"}), 4, options=("--after", "40"))
    with tempfile.TemporaryDirectory() as made, launched() as browser:
        chromium = Chromium(browser, pictures)
        with agent(Path(made)) as running:
            with job(scenario, [Place(Path(made))] * scenario.size, "pretrain"):
                with chromium.visit(running.url, dark=True) as visit:
                    visit.page.locator("#wrong .links", has_text="alert").first.wait_for(timeout=PATIENT_S * 1000)
                    visit.picture("live-hang")
                with chromium.visit(running.url, width=400) as visit:
                    visit.page.locator("#wrong .links").first.wait_for()
                    visit.picture("live-400")
            with chromium.visit(running.url) as visit:
                visit.page.locator("#happened li").first.wait_for()
                visit.picture("live-ended")


def main(pictures: Path) -> None:
    """Run the jobs, and take the pictures."""
    hang(pictures)
    late_rank(pictures)


def late_rank(pictures: Path) -> None:
    """Run the job until its alerts fire, and take the pictures."""
    scenario = next(each for each in SCENARIOS if each.name == SCENARIO)
    with tempfile.TemporaryDirectory() as made, agent(Path(made)) as running, launched() as browser:
        chromium = Chromium(browser, pictures)
        with job(scenario, [Place(Path(made))] * scenario.size, "pretrain"):
            wait_for(lambda: len(firing(running)) == 2, "the alerts", PATIENT_S)
            with chromium.visit(running.url, width=WIDTH) as visit:
                visit.page.locator("#advice details").first.wait_for()
                visit.page.locator("#advice summary").first.click()
                visit.picture("straggler-page")
            report = Path(made) / "report.html"
            done = commwatch("report", "pretrain", "--dir", made, "--html", str(report))
            assert done.returncode == 0, done.stderr
            shown = commwatch("top", "--once", "--address", running.url, env=clean_env(COLUMNS="140"))
            alerts = "\n".join(map(in_words, firing(running)))
        for name, text in (("straggler-top", shown.stdout), ("straggler-alert", alerts)):
            page = Path(made) / f"{name}.html"
            page.write_text(terminal(text))
            print(text)
            with chromium.visit(page.as_uri(), width=1200, height=100) as visit:
                visit.picture(name)
        with chromium.visit(report.as_uri(), width=WIDTH) as visit:
            visit.picture("straggler-report")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
