"""Keeps what was concluded of each job of the fault matrix, one file for each, so that a matrix that was interrupted goes on where it was.

``python -m tests.faults.results FILE`` writes the tables of the results into a document, between its comments ``results: WORD`` and
``end of results``; each table has the jobs of the list of ``LISTS`` with that name.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.faults.judging import Outcome, expected
from tests.faults.scenarios import LISTS, Scenario

TREE = Path(__file__).parents[2]
#: Folders of what is judged; the results of other states of it have folders of their own.
PRODUCT = ("agent", "alerts", "collectors")
#: Results of one run.
Run = Mapping[Scenario, Outcome]
HEADER = "| job, fault, ranks at fault | expected | right | after | steady | also said |\n|---|---|---|---|---|---|"


def state(files: Mapping[str, bytes]) -> str:
    """A name for what files hold, by their paths."""
    held = hashlib.sha256()
    for path, content in sorted(files.items()):
        held.update(f"{path}\0{len(content)}\0".encode() + content)
    return held.hexdigest()[:12]


def folder() -> Path:
    """Of the results of the product as it is now, with changes that are not committed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PRODUCT]
    names = subprocess.run(listed, cwd=TREE, check=True, capture_output=True, text=True).stdout.split("\0")
    files = {name: (TREE / name).read_bytes() for name in names if (TREE / name).is_file()}
    return TREE / "build" / "faults" / state(files)


def _path(run: Path, scenario: Scenario) -> Path:
    return run / f"{scenario.name.replace(' ', '_')}.json"


def keep(run: Path, outcome: Outcome) -> None:
    """Write a result to the folder of a run."""
    run.mkdir(parents=True, exist_ok=True)
    about = {"after_s": outcome.after_s, "steady": outcome.steady, "wrong": outcome.wrong}
    _path(run, outcome.scenario).write_text(json.dumps(about))


def kept(run: Path, scenarios: Iterable[Scenario]) -> Run:
    """The results of a run, of those of the jobs that have one."""
    there = [each for each in scenarios if _path(run, each).exists()]
    about = {each: json.loads(_path(run, each).read_text()) for each in there}
    return {
        each: Outcome(each, found["after_s"], found["steady"], tuple(found["wrong"])) for each, found in about.items()
    }


def line(outcomes: Sequence[Outcome]) -> str:
    """One row of a table: the results of one job in one run or several."""
    scenario, right = outcomes[0].scenario, sum(each.right for each in outcomes)
    verdict = ("right" if right else "WRONG") if len(outcomes) == 1 else f"{right} of {len(outcomes)}"
    named = [each for each in outcomes if each.after_s is not None]
    after = ", ".join(f"{each.after_s:.1f}" for each in named)
    steady = f"{min(each.steady for each in named):.0%}" if named else "–"
    wrong = "; ".join(dict.fromkeys(text for each in outcomes for text in each.wrong))
    return f"| {scenario.name} | {expected(scenario)} | {verdict} | {after + ' s' if after else '–'} | {steady} | {wrong or '–'} |"


def total(outcomes: Iterable[Outcome]) -> str:
    """How many are right, and the seconds to their verdicts."""
    every = list(outcomes)
    right = [each for each in every if each.right]
    after = [each.after_s for each in right if each.after_s is not None]
    seconds = f"; {median(after):.1f} s (median), {max(after):.1f} s (longest)" if after else ""
    return f"{len(right)} of {len(every)} right{seconds}"


def table(scenarios: Iterable[Scenario], runs: Mapping[str, Run]) -> str:
    """All results of these jobs, one row for each job that has some; and what each run comes to, by its name."""
    chosen = list(scenarios)
    found = [[run[each] for run in runs.values() if each in run] for each in chosen]
    totals = [f"{name}: {total(run[each] for each in chosen if each in run)}" for name, run in runs.items()]
    return "\n".join((HEADER, *(line(outcomes) for outcomes in found if outcomes), "", *totals))


def filled(document: str, word: str, text: str) -> str:
    """A document with another text between its comments.

    Raises:
        ValueError: it has no such comments.
    """
    begin, end = f"<!-- results: {word} -->\n", "<!-- end of results -->"
    before, found, rest = document.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"no place for {word}")
    return f"{before}{begin}{text}\n{rest[rest.index(end) :]}"


def main(document: Path) -> None:
    """Write the tables."""
    runs = sorted(folder().glob("run-*"))
    text = document.read_text(encoding="utf-8")
    for word, scenarios in LISTS.items():
        if f"<!-- results: {word} -->" in text:
            day = time.strftime("%Y-%m-%d", time.localtime(max(run.stat().st_mtime for run in runs)))
            found = {run.name: kept(run, scenarios) for run in runs}
            text = filled(text, word, f"Runs of {day}:\n\n{table(scenarios, found)}\n")
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
