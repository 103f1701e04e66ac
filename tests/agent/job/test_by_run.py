"""Parts of jobs of several nodes, put together by run: nodes may give a run different names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch_agent.job.merging import by_run, merged_jobs
from commwatch_agent.model.views import JobView

PART = JobView("train", "running", 4, [0, 1], 0, 100.0, 200.0, 0, None, run="a")


def ended(part: JobView) -> JobView:
    """A part that no longer runs."""
    return replace(part, state="ended")


UNKNOWN = replace(PART, run="", ranks=[2, 3])


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        pytest.param([PART, replace(PART, ranks=[2, 3])], {"train": [0, 1]}, id="one run"),
        pytest.param([replace(PART, job_id="train#2"), PART], {"train#2": [0, 1]}, id="the name here counts"),
        pytest.param([PART, replace(PART, run="b")], {"train": [0], "train#2": [1]}, id="two runs of one name"),
        pytest.param(
            [PART, replace(PART, job_id="train#2", run="b"), replace(PART, run="b"), replace(PART, job_id="train#2")],
            {"train": [0, 3], "train#2": [1, 2]},
            id="two runs that another node names the other way round",
        ),
        pytest.param([UNKNOWN, UNKNOWN], {"train": [0, 1]}, id="ids that are not known"),
        pytest.param([PART, UNKNOWN], {"train": [0, 1]}, id="one that is not known yet"),
        pytest.param([PART, replace(PART, run="b"), UNKNOWN], {"train": [0], "train#2": [1], "train#3": [2]}, id="of which of two"),
        pytest.param([ended(PART), UNKNOWN], {"train": [0], "train#2": [1]}, id="not of one that has ended"),
        pytest.param([PART, ended(UNKNOWN)], {"train": [0], "train#2": [1]}, id="one that has ended"),
    ],
)  # fmt: skip
def test_by_run(parts: list[JobView], names: dict[str, list[int]]) -> None:
    """Parts with the same id are one run, whatever their nodes call it; others of that name have a name of their own."""
    found = by_run(list(enumerate(parts)), lambda part: part[1])
    assert {name: [number for number, _ in of_run] for name, of_run in found.items()} == names


def test_merged() -> None:
    """The jobs of all nodes have each run once, with the ranks of its parts."""
    other = replace(PART, run="b", world_size=1, ranks=[0], started_at=50.0)
    found = merged_jobs([PART, replace(PART, job_id="train#2", ranks=[2, 3]), other])
    assert [(job.job_id, job.run, job.ranks) for job in found] == [
        ("train", "a", [0, 1, 2, 3]),
        ("train#2", "b", [0]),
    ]
