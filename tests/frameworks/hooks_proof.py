"""A DDP job with the hook of the wheel, in environments without a compiler: ``python -m tests.frameworks.hooks_proof WHEEL PYTHON ...``.

Each PYTHON is one with its own torch. Prints a line for each; exits with code 1 if a job was not recorded by the native hook.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.torchjob import read_rings
from tests.helpers import clean_env, free_port

TREE = Path(__file__).parents[2]
STEPS = 20
TRAIN = f"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def proved(python: str, wheel: str) -> bool:
    """Install commwatch and the wheel in an empty folder, run the job with it, and return whether the native hook recorded it."""
    with tempfile.TemporaryDirectory() as made:
        where = Path(made)
        site, run = where / "site", where / "run"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(TREE), wheel]
        subprocess.run(pip, capture_output=True, check=True)
        env = clean_env(
            PATH=str(where), PYTHONPATH=str(site), XDG_CACHE_HOME=str(where / "cache"), COMMWATCH="1", COMMWATCH_DIR=str(run),
            COMMWATCH_HOOK="native", OMP_NUM_THREADS="1",
        )  # fmt: skip
        launcher = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        (where / "train.py").write_text(TRAIN)
        done = subprocess.run(
            [*launcher, str(where / "train.py")], env=env, cwd=where, capture_output=True, text=True, check=False
        )
        ranks = read_rings(run)
    hooks = [rank.identity["hook"] for rank in ranks]
    lost, operations = sum(rank.lost for rank in ranks), sum(len(rank.operations) for rank in ranks)
    about = f"{ranks[0].identity['torch']}: " if ranks else f"{python}: "
    print(f"{about}exit code {done.returncode}, hooks {hooks}, {operations} operations, {lost} lost", flush=True)
    if not ranks:
        print(done.stderr[-2000:], flush=True)
    return hooks == ["native"] * 2 and operations >= 2 * STEPS and lost == 0


if __name__ == "__main__":
    sys.exit(not all(proved(python, sys.argv[1]) for python in sys.argv[2:]))
