"""What `import commwatch` takes in a Python that has nothing else, in ms: against a start of Python without it, in turn.

It is the import that a trainer pays for when its path has commwatch: the package from the folder of `commwatch probe install`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, scratch
from commwatch_agent.deploy.probe_folder import install

ROUNDS = 40


def start_ms(folder: Path, code: str) -> float:
    """Time of a process that runs some code, with a folder on its path and no other packages."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(folder)}, cwd="/", check=True)
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Measure and print."""
    with scratch() as place:
        folder = install(place)
        arms = {"plain": "pass", "commwatch": "import commwatch", "api": "import commwatch.api.training"}
        for code in arms.values():  # compiles
            start_ms(folder, code)
        rounds = [{arm: start_ms(folder, code) for arm, code in arms.items()} for _ in range(ROUNDS)]
    plain = median(each["plain"] for each in rounds)
    added = {f"{arm}_ms": median(each[arm] - each["plain"] for each in rounds) for arm in ("commwatch", "api")}
    emit({"plain_ms": plain, **added})


if __name__ == "__main__":
    main()
