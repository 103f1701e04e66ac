"""Jobs with the frameworks' own packages: commwatch records them correctly and does not change them (``make frameworks``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CACHE
from tests.e2e.recorder import compare
from tests.e2e.torchjob import digest, read_rings
from tests.frameworks.workloads import PATIENCE_S, WORKLOADS, Run, Workload, run
from tests.helpers import BOTH_HOOKS, clean_env

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(3 * PATIENCE_S)]
ANY_TIME = 2**62


@pytest.fixture(scope="session", autouse=True)
def _extensions() -> None:
    """Compile the operator that DeepSpeed builds at its first communication here, and not in the jobs."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(CACHE / "torch_extensions")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", build], env=clean_env(DS_ACCELERATOR="cpu"), timeout=1000, check=True)


@pytest.fixture(scope="session")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Workload], Run]:
    """Return a function that runs a workload without commwatch, once for both hooks."""
    runs: dict[str, Run] = {}

    def ran(workload: Workload) -> Run:
        if workload.name not in runs:
            runs[workload.name] = run(workload, tmp_path_factory.mktemp(workload.name), COMMWATCH="0")
        return runs[workload.name]

    return ran


@BOTH_HOOKS
@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_framework(workload: Workload, without: Callable[[Workload], Run], tmp_path: Path) -> None:
    """Recorded operations match the Flight Recorder, steps match the framework's count, and the job runs as without commwatch."""
    plain, watched = without(workload), run(workload, tmp_path, COMMWATCH="1")
    assert plain.code == 0, plain.errors[-4000:]
    assert watched.code == 0, watched.errors[-4000:]
    assert watched.output == plain.output
    assert "commwatch" not in watched.errors
    assert len(watched.witnesses) == len(plain.witnesses) == workload.ranks
    assert not plain.directory.exists()

    ranks = {rank.identity["pid"]: rank for rank in read_rings(watched.directory)}
    assert ranks.keys() == watched.witnesses.keys()
    agent, _ = digest(watched.directory)
    for pid, witness in watched.witnesses.items():
        rank = ranks[pid]
        assert rank.lost == 0
        compare(rank, witness["entries"])
        for op, number in witness["messages"].items():
            assert len(rank.of(op)) == number
        # The first step has no start, because the first mark ends it.
        steps = agent.steps(0, ANY_TIME, rank.identity["job"], rank.rank, 10_000)
        assert len(steps) == witness["steps"] - 1
    assert len({rank.identity["job"] for rank in ranks.values()}) == workload.jobs
