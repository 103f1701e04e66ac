"""Makes the pictures of ``docs/images`` from real jobs with faults (``make pictures``): page, ``top`` and report, wide and on a phone.

It takes seven minutes longer with the argument ``alerts``, because these wait for so long.
"""

from __future__ import annotations

import html
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import Chromium, launched
from tests.faults.run import Place, job
from tests.faults.scenarios import Scenario
from tests.helpers import RunningAgent, agent, clean_env, commwatch, wait_for

#: By name of the pictures: the job, and the kind of its incident.
FAULTS = {
    "straggler": (Scenario("ddp4", "late", (2,), options=("--after", "20")), "straggler"),
    "hang": (Scenario("ddp4", "stop", (2,), options=("--after", "40")), "hang"),
    "lost": (Scenario("ddp4", "fail", (2,), options=("--after", "40")), "rank_lost"),
}
#: Seconds until an incident has a place, and until both alerts of a straggler fire.
PATIENT_S = 480.0
WIDE, PHONE = 1280, 400


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


def photographed(chromium: Chromium, name: str, text: str) -> None:
    """Take a picture of what a terminal shows."""
    print(text)
    with tempfile.TemporaryDirectory() as made:
        page = Path(made) / f"{name}.html"
        page.write_text(terminal(text))
        with chromium.visit(page.as_uri(), width=1200, height=100) as visit:
            visit.picture(name)


def of_page(chromium: Chromium, url: str, name: str, part: str) -> None:
    """Take pictures of the live page, or of a report, once it has a part."""
    for width, suffix in ((WIDE, ""), (PHONE, "-400")):
        with chromium.visit(url, width=width, dark=name == "hang-page") as visit:
            visit.page.locator(part).first.wait_for()
            visit.picture(f"{name}{suffix}")


def of_fault(chromium: Chromium, name: str, *, alerts: bool) -> None:
    """Run a job until its incident is known, and take the pictures in it and after the end."""
    scenario, kind = FAULTS[name]

    def known() -> bool:
        found = [each for each in running.get("/api/v1/incidents?state=open") if each["kind"] == kind]
        return any(each["place"] for each in found)

    with tempfile.TemporaryDirectory() as made, agent(Path(made)) as running:
        with job(scenario, [Place(Path(made))] * scenario.size, "pretrain"):
            wait_for(known, "the incident", PATIENT_S)
            of_page(chromium, running.url, f"{name}-page", "#wrong li")
            shown = commwatch("top", "--once", "--address", running.url, env=clean_env(COLUMNS="136"))
            photographed(chromium, f"{name}-top", shown.stdout)
            if alerts and name == "straggler":
                wait_for(lambda: len(firing(running)) == 2, "the alerts", PATIENT_S)
                photographed(chromium, f"{name}-alert", "\n".join(map(in_words, firing(running))))
        wait_for(running.job_has_ended, "the end of the job")
        with chromium.visit(running.url, width=WIDE) as visit:
            visit.page.locator("#happened li").first.wait_for()
            visit.picture(f"{name}-ended")
        report = Path(made) / "report.html"
        done = commwatch("report", "pretrain", "--dir", made, "--html", str(report))
        assert done.returncode == 0, done.stderr
        of_page(chromium, report.as_uri(), f"{name}-report", "h3")
        photographed(chromium, f"{name}-report-text", commwatch("report", "pretrain", "--dir", made).stdout)


def main(pictures: Path, *words: str) -> None:
    """Run the jobs, and take the pictures; ``words``: ``alerts``, and names of faults, by default all."""
    with launched() as browser:
        chromium = Chromium(browser, pictures)
        for name in FAULTS:
            if name in words or not {*words} & {*FAULTS}:
                of_fault(chromium, name, alerts="alerts" in words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
