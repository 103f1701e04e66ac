"""The verdicts on corrupt data that alerts have kept, in the report."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from commwatch_agent.alerting.marks import corruption_of
from commwatch_agent.analysis.corruption import PastCorruption
from commwatch_agent.core.runs import Stored
from commwatch_agent.report import charts, report, report_page
from tests.helpers import Watch, group_entry, identity, operation, write_ring

#: A run that is the only one of its name.
ALL = Stored("", "job", 0.0, inf)
FIRST, LATER = "corruption: the weights of rank 2 differ: <a>", "corruption: the result of rank 1 differs"


def keep(directory: Path, name: str, job: str, fired_at: float, *says: str, kind: str = "corruption") -> None:
    """Write the evidence of an alert."""
    about = {"labels": {"job_id": job}, "fired_at": fired_at, "annotations": {}}
    verdicts = [{"kind": kind, "ranks": [2], "says": each} for each in says]
    (directory / f"{name}.json").write_text(
        json.dumps({"alert": about, "taken_at": fired_at + 1, "verdicts": verdicts})
    )


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """Evidence of some alerts about two jobs, and a damaged file."""
    keep(tmp_path, "a", "job", 2000.0, FIRST, LATER)
    keep(tmp_path, "b", "job", 1000.0, FIRST)
    keep(tmp_path, "c", "other", 500.0, LATER)
    keep(tmp_path, "d", "job", 600.0, "hang: rank 1", kind="hang")
    (tmp_path / "e.json").write_text('{"alert": {"labels": {"job_id": "job"}}, "verdicts": [{}]}')
    return tmp_path


def test_kept(evidence: Path) -> None:
    """Each verdict on a job's data is there once, with the time of its first alert, the earliest first; damaged files are left out."""
    assert corruption_of(evidence, ALL) == [PastCorruption(1000.0, FIRST), PastCorruption(2000.0, LATER)]
    assert corruption_of(evidence, ALL._replace(name="quiet")) == []
    assert corruption_of(evidence / "missing", ALL) == []
    assert corruption_of(evidence, ALL._replace(from_s=1500.0)) == [
        PastCorruption(2000.0, FIRST),
        PastCorruption(2000.0, LATER),
    ]
    assert corruption_of(evidence, ALL._replace(until_s=1500.0)) == [PastCorruption(1000.0, FIRST)]


def test_in_report(evidence: Path, tmp_path: Path) -> None:
    """Text, page and JSON of the report have them; without any, none of them has the section."""
    watch = Watch(tmp_path / "watch")
    write_ring(watch.rings, [operation(start_ns=0, end_ns=1)], [group_entry(0, (0,))], **identity())
    watch.tick(10**9)
    (job,) = watch.agent.jobs()
    found = corruption_of(evidence, ALL)
    for corruption in (found, []):
        built = report.build(watch.agent, job.job_id, watch.path, "again", corruption=corruption)
        assert built is not None
        page = report_page.html(built, charts.gather(watch.agent, job.job_id))
        text = report.text(built)
        assert ("corrupt data" in text, FIRST in text, LATER in text) == (bool(corruption),) * 3
        assert ("Corrupt data" in page, "differ: &lt;a&gt;" in page) == (bool(corruption),) * 2
        assert [each["says"] for each in json.loads(report.as_json(built))["corruption"]] == [
            each.says for each in corruption
        ]
