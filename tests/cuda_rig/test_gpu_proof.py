"""``commwatch doctor --gpu-proof`` on the played driver: what it compares there holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_rig.job import GPUS
from tests.helpers import clean_env

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(2000)]

#: The driver does not play CUPTI, and there is no nvidia-smi. The time of a step depends on what else the machine does.
NOT_CHECKED = {"durations: torch.profiler", "gpu"}
STEP = {"ddp: step"}


@pytest.mark.usefixtures("native")
def test_gpu_proof(libraries: Path, tmp_path: Path) -> None:
    """All rows hold but those of torch.profiler and nvidia-smi, which there are not, and the time of a step."""
    env = clean_env(
        LD_LIBRARY_PATH=str(libraries), LD_PRELOAD=str(libraries / "libcuda.so.1"), FAKE_NVML=str(GPUS), PLAYED_DATA="0"
    )
    command = [sys.executable, "-m", "commwatch", "doctor", "--gpu-proof", "result.json"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert {row["what"] for row in result["rows"] if not row["ok"]} - STEP == NOT_CHECKED, done.stdout
    assert {row["what"] for row in result["rows"] if row["ok"] is False} <= STEP, done.stdout
    assert len(result["rows"]) == 21
    assert (result["hook"], result["driver"]) == ("native", "550.54.15")
    assert result["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
