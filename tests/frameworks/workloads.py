"""The workloads that use the frameworks' own packages, and a function that runs one of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.torchjob import UPSTREAM_FLAKE, torchrun
from tests.helpers import clean_env, free_port

JOBS = Path(__file__).parent / "jobs"
#: Limit of one run in seconds. On a busy machine, the import of a framework alone may take all ranks a minute.
PATIENCE_S = 900
#: Text that differs between any two runs: times of day, durations, process ids.
VARIES = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]?\d*|'(train_runtime|train_\w+_per_second)': '[^']*'"
    r"|[\d.]+ (ms|s|seconds|sec)\b|(time|Time|latency|pid|SamplesPerSec|\w*PerSec)\W+[\d.]+"
)


def python(script: str, *arguments: str) -> Callable[[], list[str]]:
    """Return a function that makes the command for a script that starts its ranks itself."""
    return lambda: [sys.executable, str(JOBS / script), *arguments]


def by_torchrun(ranks: int, script: str, *arguments: str) -> Callable[[], list[str]]:
    """Return a function that makes the command for a script that torchrun starts."""
    return lambda: torchrun(str(JOBS / script), ranks, *arguments)


def by_accelerate(script: str, *arguments: str) -> Callable[[], list[str]]:
    """Return a function that makes the command for a script that ``accelerate launch`` starts on two ranks."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(JOBS / "accelerate.yaml")]
    return lambda: [*launch, "--main_process_port", str(free_port()), str(JOBS / script), *arguments]


@dataclass(frozen=True)
class Workload:
    """One line of the table in docs/support.md."""

    name: str
    #: Makes the command, anew for each run, because it contains a free port.
    command: Callable[[], list[str]]
    ranks: int = 2
    #: Number of jobs that commwatch sees.
    jobs: int = 1


WORKLOADS = [
    Workload("mnist", by_torchrun(2, "plain_loops.py", "mnist")),
    Workload("imagenet", python("plain_loops.py", "imagenet")),
    Workload("nanogpt", by_torchrun(2, "plain_loops.py", "nanogpt")),
    Workload("pipelining", by_torchrun(2, "plain_loops.py", "pipelining")),
    *(
        Workload(f"lightning-{kind}", python("with_lightning.py", kind))
        for kind in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp2")
    ),
    Workload("lightning-gan", python("with_lightning.py", "gan")),
    Workload("transformers-gpt2", by_torchrun(2, "with_transformers.py", "gpt2", "1")),
    Workload("transformers-llama-accumulate", by_torchrun(2, "with_transformers.py", "llama", "2")),
    *(
        Workload(f"transformers-zero{stage}", by_torchrun(2, "with_transformers.py", "gpt2", "1", stage))
        for stage in "23"
    ),
    Workload("accelerate-launch", by_accelerate("with_accelerate.py", "launch")),
    Workload("accelerate-notebook", python("with_accelerate.py", "notebook")),
    *(Workload(f"deepspeed-zero{stage}", by_torchrun(2, "with_deepspeed.py", stage, "2")) for stage in "0123"),
    Workload("deepspeed-zero1-one-group", by_torchrun(2, "with_deepspeed.py", "1", "1")),
    Workload("deepspeed-pipeline", by_torchrun(2, "with_deepspeed.py", "pipe", "1")),
    Workload("megatron", by_torchrun(4, "with_megatron.py"), ranks=4),
    Workload("torchrec", by_torchrun(2, "with_torchrec.py")),
    Workload("torchft", python("with_torchft.py"), jobs=2),
    Workload("ray", python("with_ray.py")),
]


@dataclass(frozen=True)
class Run:
    """The result of a run of a workload."""

    code: int
    #: The sorted lines of its standard output, so that their order does not depend on timing.
    output: list[str]
    errors: str
    #: By process id: the report that each rank wrote for the test (``tell`` in jobs/common.py).
    witnesses: dict[int, dict[str, Any]]
    #: Its run directory.
    directory: Path


def run(workload: Workload, where: Path, **env: str) -> Run:
    """Run a workload to its end, with the run directory and the folder of the ranks' reports under ``where``."""
    directory, reports = where / "run", where / "reports"
    reports.mkdir(parents=True)
    environment = clean_env(
        COMMWATCH_DIR=str(directory),
        WITNESS_DIR=str(reports),
        TORCH_FR_BUFFER_SIZE="20000",
        MASTER_PORT=str(free_port()),
        DS_ACCELERATOR="cpu",
        HF_HUB_OFFLINE="1",
        RUST_LOG="error",
        PYTHONWARNINGS="ignore",
        **env,
    )
    command = workload.command()
    done = subprocess.run(
        command, env=environment, cwd=where, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    left = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    flaked = UPSTREAM_FLAKE in done.stderr and len(left) == workload.ranks
    output = sorted(VARIES.sub("…", line) for line in done.stdout.splitlines())
    witnesses = {witness["pid"]: witness for witness in left}
    return Run(0 if flaked else done.returncode, output, done.stderr, witnesses, directory)
