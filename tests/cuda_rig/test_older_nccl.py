"""NCCL 2.27, which has an older profiler interface, loads our plugin: its times are what was played."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from tests.cuda_rig.build import package
from tests.cuda_rig.played_jobs import Played, Run, pairs, wrong
from tests.cuda_rig.test_nccl_plugin import LATE, ON, counted, of_foreign, undisturbed
from tests.helpers import needs

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600)]

OLDER = "nvidia-nccl-cu13==2.27.7"
#: What PyTorch 2.11 looks for in NCCL, and 2.27 does not have. Only all_to_alls call one of them.
NEWER = "int ncclAlltoAll(void) { return 5; } int ncclDevCommCreate(void) { return 5; } int ncclDevCommDestroy(void) { return 5; }"


@pytest.fixture(scope="module")
def older(run: Run, libraries: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a scene with NCCL 2.27. PyTorch from 2.12 on needs more of a newer one."""
    import torch

    needs(torch.cuda.nccl.version() < (2, 29), "torch 2.11 (make test-cuda CUDA_TORCH=2.11.0)")
    nccl = package(OLDER) / "nccl" / "lib" / "libnccl.so.2"
    assert libraries is not None
    newer = tmp_path_factory.mktemp("newer") / "newer.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(newer)]
    subprocess.run(command, input=NEWER, text=True, check=True, timeout=60)
    preloaded = f"{libraries / 'libcuda.so.1'}:{nccl}:{newer}"

    def with_older(scene: str, **settings: str) -> Played:
        played = run(scene, LD_PRELOAD=preloaded, NCCL_DEBUG="VERSION", **settings)
        assert "NCCL version 2.27.7" in played.output
        return played

    return with_older


@pytest.mark.parametrize("scene", ["groups", "sharded", "replicated", "tensors"])
def test_operations(older: Run, scene: str) -> None:
    """The same operations are recorded as without the plugin, and most have NCCL's times, which are those of the kernels within 2% or 20 µs."""
    played = older(scene, **ON)
    for rank, same in zip(played.ranks, older(scene).ranks, strict=True):
        assert (rank.lost, counted(rank)) == (0, counted(same))
        timed = [record for record in rank.operations if record.timing == ev.BY_NCCL]
        assert len(timed) >= (1 - LATE) * len(rank.operations)
        assert all(ev.nccl_choice(record.timing, record.aux).protocol for record in timed)
    found = [
        ((record.end_ns - record.start_ns) / 1e3, (kernel["end"] - kernel["begin"]) / 1e3)
        for record, kernel in pairs(played, idle=True)
        if record.timing == ev.BY_NCCL
    ]
    assert len(found) > 10
    assert wrong(found) == []


@pytest.mark.parametrize("scene", ["coalesced", "messages", "inference", "replayed"])
def test_others(older: Run, scene: str) -> None:
    """Batches, messages and graphs are recorded as without the plugin, and no time is wrong."""
    played = older(scene, **ON)
    for rank, same in zip(played.ranks, older(scene).ranks, strict=True):
        assert (rank.lost, counted(rank)) == (0, counted(same))
    assert wrong([((r.end_ns - r.start_ns) / 1e3, (k["end"] - k["begin"]) / 1e3) for r, k in pairs(played)]) == []
    assert undisturbed(played)


def test_foreign(older: Run) -> None:
    """Operations of other libraries are not recorded, as NCCL does not report whether they are replays; captures are not disturbed."""
    played = older("foreign", **ON)
    for rank, same in zip(played.ranks, older("foreign").ranks, strict=True):
        assert (rank.lost, counted(rank)) == (0, counted(same))
        assert not of_foreign(rank)
    assert undisturbed(played)
