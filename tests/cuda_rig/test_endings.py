"""Jobs on the played driver that do not end well, and drivers that are in trouble: they end as without us, and nothing recorded is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from commwatch.wire import events as ev
from tests.cuda_rig.job import command_of, environment
from tests.e2e.torchjob import read_rings

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600), pytest.mark.usefixtures("native")]


def ends(libraries: Path, directory: Path, scene: str, **settings: str) -> tuple[int, str]:
    """Exit code and output of a job that may fail; `restarted` starts again once."""
    env = environment(libraries, directory, **settings)
    command = command_of(scene, directory, restarts=int(scene == "restarted"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("hook", ["native", "python"])
def test_lost_device(libraries: Path, tmp_path: Path, hook: str) -> None:
    """Where the devices are lost, the job fails with CUDA's error as without us, and we say at most one line for each rank."""
    for watched in ("0", "1"):
        place = tmp_path / watched
        place.mkdir()
        settings = {"COMMWATCH": watched, "COMMWATCH_HOOK": hook, "PLAYED_LOST": str(place / "lost")}
        code, output = ends(libraries, place, "lost", **settings)
        assert (code, "CUDA error: " in output) == (1, True), output
        assert output.count("commwatch: ") <= 2 * int(watched), output


@pytest.mark.parametrize("hook", ["native", "python"])
def test_destroyed_in_flight(libraries: Path, tmp_path: Path, hook: str) -> None:
    """A job that destroys its group with asynchronous operations in flight ends well, and the native hook's threads do not ask NCCL for errors.

    PyTorch asks for them when a Work is asked whether it is over. If the group is destroyed at that moment, NCCL crashes.
    """
    code, output = ends(
        libraries, tmp_path, "destroyed", COMMWATCH_HOOK=hook, PLAYED_REPORT=str(tmp_path / "played-%r.json")
    )
    assert (code, output.count("is done"), "commwatch: " in output) == (0, 2, False), output
    for rank, records in enumerate(read_rings(tmp_path)):
        assert (len(records.operations), records.lost) == (51, 0)
        functions = json.loads((tmp_path / f"played-{rank}.json").read_text())["functions"]
        asked = functions["ncclCommGetAsyncError"]["threads"]
        if hook == "native":
            assert sum(asked.values()) > 0
            assert not any(thread.startswith("commwatch") for thread in asked)


def queries(report: Path) -> int:
    """Number of event queries by the training thread."""
    made = json.loads(report.read_text())
    by_thread = made["functions"]["cuEventQuery"]["threads"].items()
    return sum(count for thread, count in by_thread if thread.endswith(f"/{made['pid']}"))


@pytest.mark.parametrize("hook", ["native", "python"])
def test_slow_driver(libraries: Path, tmp_path: Path, hook: str) -> None:
    """With a driver that takes two seconds for a query, the job ends well, and its training thread queries no more than for PyTorch's timing."""
    found = []
    for watched in ("0", "1"):
        place = tmp_path / watched
        place.mkdir()
        settings = {"COMMWATCH": watched, "COMMWATCH_HOOK": hook, "TORCH_NCCL_ENABLE_TIMING": "1"}
        reports = {"PLAYED_SLOW": str(place / "slow"), "PLAYED_REPORT": str(place / "played-%r.json")}
        code, output = ends(libraries, place, "slow", **settings, **reports)
        assert (code, output.count("is done"), "commwatch: " in output) == (0, 2, False), output
        found.append([queries(place / f"played-{rank}.json") for rank in range(2)])
    assert max(found[1]) <= max(found[0])
    # With the backend of torch 2.15, a process may end while the query of its last operation is under way.
    least = 5 if torch.__version__ >= torch.torch_version.TorchVersion("2.15") else 6
    assert all(least <= len(rank.of("all_reduce")) <= 6 for rank in read_rings(tmp_path / "1"))


@pytest.mark.parametrize("hook", ["native", "python"])
def test_aborted(libraries: Path, tmp_path: Path, hook: str) -> None:
    """A collective that times out ends the job with PyTorch's own error, and the operations before it are in the rings of both ranks."""
    code, output = ends(libraries, tmp_path, "aborted", COMMWATCH_HOOK=hook)
    own = any(words in output for words in ("collective operation timeout", "Operation timed out after"))  # since 2.15
    assert (code, own, "commwatch: " in output) == (1, True, False), output
    for ring in read_rings(tmp_path):
        timed = {record.seq for record in ring.of("all_reduce") if not record.flags & ev.UNTIMED}
        assert timed >= {1, 2, 3, 4}  # the first makes the communicator


@pytest.mark.parametrize("hook", ["native", "python"])
def test_elastic_restart(libraries: Path, tmp_path: Path, hook: str) -> None:
    """Both lives of a job that torchrun starts again are recorded, each in a ring of its own."""
    # Otherwise both lives have one store, and a rank of the second may find NCCL's address of the first there, with and without us.
    stores = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, output = ends(libraries, tmp_path, "restarted", COMMWATCH_HOOK=hook, **stores)
    assert (code, output.count("is done"), "commwatch: " in output) == (0, 2, False), output
    rings = {(ring.rank, ring.identity["restart"]): len(ring.of("all_reduce")) for ring in read_rings(tmp_path)}
    assert rings == {(0, 0): 3, (1, 0): 3, (0, 1): 5, (1, 1): 5}
