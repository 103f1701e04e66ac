"""What `import commwatch` takes in a Python that has nothing else, in ms: against a start of Python without it, in turn.

It is the import that a trainer pays for when its path has commwatch: the package from the folder of `commwatch probe install`. And what
commwatch adds to `import torch` in an environment where it is installed, switched off and on, against an import that does not see its entry point.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, scratch
from commwatch_agent.deploy.probe_folder import install

ROUNDS, TORCH_ROUNDS = 40, 12
#: Hides the entry point from PyTorch, which looks up those of all packages.
WITHOUT = """
from importlib import metadata
found = metadata.entry_points
metadata.entry_points = lambda **names: [point for point in found(**names) if not point.value.startswith("commwatch")]
"""
#: For `import torch` without commwatch, with it, and with it switched on: what runs before, and `COMMWATCH`.
TORCH = {
    "torch": (WITHOUT, "0"),
    "off": ("from importlib import metadata", "0"),
    "on": ("from importlib import metadata", "1"),
}


def start_ms(folder: Path, code: str) -> float:
    """Time of a process that runs some code, with a folder on its path and no other packages."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(folder)}, cwd="/", check=True)
    return 1e3 * (time.perf_counter() - begin)


def torch_ms(directory: Path, before: str, switch: str) -> float:
    """Time of a process that imports torch, with a folder for what the probe writes."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", f"{before}\nimport torch"]
    environment = {**os.environ, "COMMWATCH_DIR": str(directory), "COMMWATCH": switch}
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - begin)


def beside(rounds: list[dict[str, float]], without: str) -> dict[str, float]:
    """Medians: of the arm without, and of what the others add to it in their round."""
    added = {f"{arm}_ms": median(each[arm] - each[without] for each in rounds) for arm in rounds[0] if arm != without}
    return {f"{without}_ms": median(each[without] for each in rounds), **added}


def main() -> None:
    """Measure and print."""
    with scratch() as place:
        folder = install(place)
        arms = {"plain": "pass", "commwatch": "import commwatch", "api": "import commwatch.api.training"}
        for code in arms.values():  # compiles
            start_ms(folder, code)
        rounds = [{arm: start_ms(folder, code) for arm, code in arms.items()} for _ in range(ROUNDS)]
        of_torch = [{arm: torch_ms(place, *how) for arm, how in TORCH.items()} for _ in range(TORCH_ROUNDS)]
    emit({**beside(rounds, "plain"), **beside(of_torch, "torch")})


if __name__ == "__main__":
    main()
