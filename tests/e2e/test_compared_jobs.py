"""`commwatch compare` of real Gloo jobs on two network namespaces: the same job twice, on a slower link, with larger buckets."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts import joined_hosts
from tests.e2e.torchjob import run_on
from tests.helpers import agent, commwatch, wait_for

pytestmark = pytest.mark.by_the_clock
STEPS = 140
#: Megabytes of a bucket, and the rate of the slower link.
SMALL_MB, LARGE_MB, RATE = 0.25, 8, "400mbit"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Path:
    """The history of an agent that has stopped: ``same`` and ``again`` have run beside one another, so that they had the same machine."""
    place = tmp_path_factory.mktemp("compared")

    def run(name: str, bucket_mb: float, port: int) -> str:
        return run_on(hosts, place, "compared.py", str(STEPS), str(bucket_mb), job=name, port=port)

    with joined_hosts(2) as hosts, agent(place) as running, ThreadPoolExecutor() as both:
        list(both.map(run, ("same", "again"), (SMALL_MB, SMALL_MB), (29701, 29702)))
        for host in hosts:
            host.shape(RATE)
        list(both.map(run, ("slow", "large"), (SMALL_MB, LARGE_MB), (29704, 29703)))
        wait_for(
            lambda: [job["state"] for job in running.get("/api/v1/jobs")] == ["ended"] * 4, "the jobs to be taken in"
        )
    return place


def compared(directory: Path, a: str, b: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the comparison as JSON, and standard error."""
    done = commwatch("compare", "--dir", directory, a, b, "--json", *words)
    return done.returncode, json.loads(done.stdout), done.stderr


def figure(found: dict[str, Any], name: str) -> dict[str, Any]:
    """One figure of a comparison."""
    (one,) = (each for each in found["figures"] if each["name"] == name)
    return dict(one)


def test_same_job_twice(directory: Path) -> None:
    """No difference is found, no setting differs, and the gate is open."""
    code, found, said = compared(directory, "same", "again", "--fail-if", "step_p50 > +5%")
    assert (code, said) == (0, "")
    assert figure(found, "step_p50")["differs"] is False
    assert found["headline"].startswith("Job B compared with job A: step time no difference found (")
    assert found["settings"] == {}
    assert found["too_few"] == ""


def test_slower_link(directory: Path) -> None:
    """On a link held to a rate, steps are slower, the share of communication is higher, bandwidths are lower; the gate is closed."""
    code, found, said = compared(
        directory, "same", "slow", "--fail-if", "step_p50 > +5%", "--fail-if", "comm_share > +2pp"
    )
    assert code == 1
    assert [line.split(": ")[2:4] for line in said.splitlines()] == [
        ["step_p50 > +5%", "met"],
        ["comm_share > +2pp", "met"],
    ]
    step = figure(found, "step_p50")
    assert step["low"] > 0.05
    assert step["change"] == pytest.approx(step["b"] / step["a"] - 1, rel=1e-6)
    assert figure(found, "comm_share")["low"] > 0.02
    kind = max(found["kinds"], key=lambda kind: kind["count_a"])
    assert kind["busbw"]["high"] < 0
    assert kind["p50"]["low"] > 0
    assert found["settings"] == {}
    code, _, said = compared(directory, "slow", "same", "--fail-if", "step_p50 > +5%")
    assert (code, said) == (0, ""), "faster"


def test_larger_buckets(directory: Path) -> None:
    """Larger buckets are in the settings that differ, and their operations are of kinds that only one job has, but for its first step."""
    code, found, _ = compared(directory, "same", "large")
    assert code == 0
    (name,) = found["settings"]
    assert name == "all_reduce in default_pg, each step"
    assert found["settings"][name] == ["8 × 256 KiB", "1 × 2 MiB"]
    # DDP has one bucket in the first step, which is compared if the agent has seen the job begin early enough.
    often = {kind["size"]: (kind["count_a"] > STEPS, kind["count_b"] > STEPS) for kind in found["kinds"]}
    assert {size: sides for size, sides in often.items() if any(sides)} == {
        1 << 18: (True, False),
        1 << 21: (False, True),
    }
