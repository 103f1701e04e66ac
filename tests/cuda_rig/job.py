"""Starts the scenes on the played driver: two ranks of the real PyTorch and NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cuda_rig.build import TREE
from tests.helpers import clean_env, free_port

SCENES = Path(__file__).with_name("scenes.py")
GPUS = TREE / "tests" / "collectors" / "fake_nvml" / "two_h100.txt"


def environment(libraries: Path | None, directory: Path, **settings: str) -> dict[str, str]:
    """Return the environment of a job under commwatch, with this run directory.

    Args:
        libraries: the folder of the played driver; ``None``: the job runs on a real GPU, which both ranks share if there is only one.
    """
    return clean_env(
        **{
            "COMMWATCH": "1",
            "COMMWATCH_DIR": str(directory),
            "TORCH_FR_BUFFER_SIZE": "20000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000",
            "PYTHONWARNINGS": "ignore",
            **(_REAL if libraries is None else _played(libraries)),
            **settings,
        }
    )


#: Since 2.30, NCCL allows several ranks on a GPU. Its kernels wait for each other, so those of all jobs that run at once must fit on the GPU.
#: Layers are large, so that communication takes time.
_REAL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "TRACED": "1",
    "WIDTH": "4096",
    "SHARED_LOG2": "26",
    "STUCK_MS": "60000",
}


def _played(libraries: Path) -> dict[str, str]:
    preloaded = str(libraries / "libcuda.so.1")
    return {"LD_LIBRARY_PATH": str(libraries), "LD_PRELOAD": preloaded, "FAKE_NVML": str(GPUS)}


def command_of(scene: str, directory: Path, restarts: int = 0) -> list[str]:
    """Return the command that runs a scene, which writes its files into ``directory``; a job that fails runs again so often."""
    # A job that starts again needs a rendezvous of its own; with a fixed port, NCCL would find the address of the first life.
    meeting = ["--standalone"] if restarts else [f"--master-port={free_port()}"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
        *meeting,
    ]
    return [*launcher, str(SCENES), scene, str(directory)]
