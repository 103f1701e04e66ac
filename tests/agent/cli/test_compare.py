"""`commwatch compare` as people call it: text, JSON, a page, exit codes, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from socket import gethostname

import pytest

from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.stored import row_of
from tests.agent.compare.test_runs import STEPS, watched
from tests.agent.test_config import one_line
from tests.helpers import EPOCH_NS, clean_env, commwatch, elsewhere


def incident(job: str, run: str) -> Incident:
    """Rank 1 was late in the job ``before``, and hung in the other one."""
    kind, cause = ("straggler", "late") if job == "before" else ("hang", "stopped")
    at = EPOCH_NS / 1e9
    return Incident(
        job, kind, "warning", "ended", job, run, ("1",), at, at, at + 2, at + 2, cause=cause, says=f"rank 1: {cause}",
        ranks=(1,), cost_rank_s=2.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two state directories: one with the job ``before``, one with ``after``, which is 20% slower and has another hook."""
    places = []
    for name, slower, hook in (("before", 1.0, "python"), ("after", 1.2, "native")):
        place = tmp_path_factory.mktemp(name)
        watch = watched(place, name, slower=slower, hook=hook)
        watch.store.incident(row_of(incident(name, watch.agent.stored(name).key), "/run"))
        watch.store.commit()
        (place / "h.sqlite").rename(place / f"history-{gethostname()}.sqlite")
        for rest in place.glob("h.sqlite-*"):
            rest.rename(place / rest.name.replace("h.sqlite", f"history-{gethostname()}.sqlite"))
        places.append(place)
    return places[0], places[1]


def words(states: tuple[Path, Path], *more: str | Path) -> tuple[str | Path, ...]:
    """The arguments that compare the two jobs."""
    return ("compare", "--state", states[0], "--state-b", states[1], "before", "after", *more)


def test_text(states: tuple[Path, Path]) -> None:
    """The text begins with the result, and has both jobs, figures, operations and the settings that differ."""
    done = commwatch(*words(states), env=clean_env(COLUMNS="200"))
    assert (done.returncode, done.stderr) == (0, "")
    _, headline, _, side_a, side_b, *lines = done.stdout.splitlines()
    assert (
        headline
        == "Job B compared with job A: step time slower by 20%; new: Hang: rank 1; no longer: Late rank: rank 1"
    )
    assert "  Hang: rank 1: rank 1: stopped" in lines
    assert side_a.startswith("  A  before (failed), began 2023-11-14 ")
    assert side_b.endswith(f"; {STEPS} steps compared, 0 of warm-up and 0 long ones left out")
    rows = {line[:24].strip(): line.split() for line in lines}
    assert rows["step time, median"][-4:] == ["100", "ms", "120", "ms"]
    assert ["hook", "python", "native"] in [line.split() for line in lines]
    (operations,) = (line for line in lines if "all_reduce" in line)
    assert "≤ 1 MiB" in operations
    assert operations.split()[-4:] == ["none", "found", "none", "found"]


def test_json_and_page(states: tuple[Path, Path], tmp_path: Path) -> None:
    """JSON has the same, and the page is one file that loads nothing."""
    found = json.loads(commwatch(*words(states, "--json")).stdout)
    assert found["figures"][0]["change"] == pytest.approx(0.2)
    assert found["settings"] == {"hook": ["python", "native"]}
    assert [(each["title"], each["change"], each["says"]) for each in found["incidents"]] == [
        ("Hang: rank 1", "new", "rank 1: stopped"),
        ("Late rank: rank 1", "gone", "rank 1: late"),
    ]
    assert (found["a"]["job"]["job_id"], found["b"]["job"]["job_id"]) == ("before", "after")
    page = tmp_path / "compare.html"
    done = commwatch(*words(states, "--html", page))
    assert (done.returncode, done.stdout) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert "step time slower by 20%" in text
    assert elsewhere(text) == []
    assert str(tmp_path / "no") in one_line(commwatch(*words(states, "--html", tmp_path / "no" / "x.html")))


@pytest.mark.parametrize(
    ("conditions", "code", "said"),
    [
        (["step_p50 > +25%"], 0, []),
        (["step_p50 > +5%"], 1, ["commwatch: compare: step_p50 > +5%: met: slower by 20%"]),
        (["step_p95 > +5%"], 3, ["commwatch: compare: step_p95 > +5%: cannot be decided: too few samples for an interval, or a job lacks this figure"]),
        (["step_p95 > +5%", "step_p50 > +5%"], 1, None),
        (["incidents"], 1, ["commwatch: compare: incidents: met: new: Hang: rank 1"]),
    ],
)  # fmt: skip
def test_gate(states: tuple[Path, Path], conditions: list[str], code: int, said: list[str] | None) -> None:
    """Exit code 1: a condition is met, also beside one that cannot be decided; 3: one cannot be decided; 0: none is met."""
    done = commwatch(*words(states, *(word for each in conditions for word in ("--fail-if", each))))
    assert done.returncode == code
    assert said is None or done.stderr.splitlines() == said


def test_wrong_usage(states: tuple[Path, Path], tmp_path: Path) -> None:
    """A job that is not there, a history that is not there, and a condition that is none are named, each in one line."""
    said = one_line(commwatch("compare", "--state", states[0], "before", "after"))
    assert "no job 'after'" in said
    assert "it has before" in said
    assert str(tmp_path) in one_line(commwatch(*words((states[0], tmp_path))))
    done = commwatch(*words(states, "--fail-if", "step > 5%"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "no figure step; choose from step_p50, step_p95, step_mean, comm_share, exposed_share, wait_share"
    )
