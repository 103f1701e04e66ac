"""Plays a newcomer and an ML engineer from a fresh clone and an empty home: ``make newcomer``.

They install commwatch with uv beside an environment that has torch alone, run the tutorial's job, and look for the slow rank in running jobs of
DDP and FSDP2. Prints each command, its output and its time, and at the end a table. Exits with code 1 if something is not shown that should be.

``--hooks DIR`` is a folder with a wheel of hooks for this torch. Without it, the first jobs have the Python hook.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.e2e.test_two_environments import environment
from tests.helpers import clean_env, free_port

TREE = Path(__file__).parents[2]
FSDP = Path(__file__).with_name("slow_fsdp.py")
#: Seconds that the newcomer may need from the clone to the report.
LIMIT_S = 60.0
#: Seconds after which a job and a verdict count as missing, on a busy machine, too.
_PATIENCE_S = 600.0
#: Steps of the engineer's jobs, which the verdict must precede.
_DDP_STEPS, _FSDP_STEPS = 600, 300
#: A job that leaves how many seconds after its command its first rank began, and its first step ended.
_STARTS = """
import sys, time
began = time.time()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.ones(8, 8)).mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    open("starts", "w").write(f"{began} {time.time()}")
dist.destroy_process_group()
"""


class Row(NamedTuple):
    """One line of the table; ``cpu_s`` of the command and all that it waited for, ``None`` where others ran beside it."""

    what: str
    wall_s: float
    cpu_s: float | None = None


class Player:
    """Somebody with an empty home, a clone, and a training environment.

    Args:
        place: an empty folder.
        hooks: a folder with a wheel of hooks; ``None``: there is none.
    """

    def __init__(self, place: Path, hooks: Path | None) -> None:
        self.place, self.hooks = place, hooks
        self.rows: list[Row] = []
        self.missing: list[str] = []
        programs = place / ".local" / "bin"
        programs.mkdir(parents=True)
        for name in ("uv", "git"):
            found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            if found is None:
                sys.exit(f"{name} is needed")
            (programs / name).symlink_to(found)
        path = f"{programs}:{environment(place)}:/usr/local/bin:/usr/bin:/bin"
        # Users' Python keeps what it has compiled: agents start in half the time.
        own = ("COMMWATCH_BUDGET", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in clean_env().items() if name not in own}
        self.env = {**kept, "HOME": str(place), "PATH": path, "COMMWATCH_HOOK": "auto", "TERM": "dumb"}
        self.env |= {"COMMWATCH_DIR": str(place / "run"), "COMMWATCH_PORT": "0"}

    def does(self, what: str, *command: str, shows: Sequence[str] = (), cwd: Path | None = None, code: int = 0) -> str:
        """Run a command to its end, print it with its output, and add its time; return the output."""
        cpu, began = _cpu_s(), time.monotonic()
        done = subprocess.run(
            command, cwd=cwd or self.place, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_PATIENCE_S, check=False,
        )  # fmt: skip
        self._took(Row(what, time.monotonic() - began, _cpu_s() - cpu))
        _show(command, done.stdout)
        wanted = [text for text in shows if not re.search(text, done.stdout)]
        self.missing += [f"{what}: exit code {done.returncode}"] * (done.returncode != code)
        self.missing += [f"{what}: {text}" for text in wanted]
        return done.stdout

    def installs(self) -> None:
        """Clone this repository, and install it."""
        self.does("clone", "git", "clone", "--quiet", str(TREE), "commwatch")
        extra = () if self.hooks is None else ("--find-links", str(self.hooks))
        source = "." if self.hooks is None else ".[hooks]"
        self.does("install", "uv", "tool", "install", "--quiet", source, *extra, cwd=self.place / "commwatch")
        if self.missing:
            sys.exit(self.missing[-1])

    def newcomer(self) -> None:
        """Run the tutorial's job, and read its report."""
        tutorial = (self.place / "commwatch" / "docs" / "tutorial.md").read_text(encoding="utf-8")
        (script,) = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
        (self.place / "train.py").write_text(script)
        hook = "python" if self.hooks is None else "native"
        shows = (
            "rank 1 is the bottleneck, not the network",
            r"was in <module> \(train\.py:12\)",
            f"hook {hook}\n",
        )
        self.does("first job to report", *watched("train.py"), shows=shows)
        whole_s = sum(row.wall_s for row in self.rows)
        self._took(Row("newcomer: clone to report", whole_s, sum(row.cpu_s or 0.0 for row in self.rows)))
        if whole_s > LIMIT_S:
            self.missing.append(f"newcomer: {whole_s:.0f} s from clone to report, more than {LIMIT_S:.0f}")

    def engineer(self, name: str, script: str, place: str, *arguments: str) -> None:
        """Look for the slow rank of a running job; then read the job's report.

        Args:
            place: pattern of the file and line that loses the time.
        """
        began = time.monotonic()
        with (self.place / f"{name}.log").open("w") as log:
            job = subprocess.Popen(
                watched(script, *arguments), cwd=self.place, env=self.env, stdout=log, stderr=subprocess.STDOUT
            )
            for what, pattern in (("verdict on the slow rank", "Late rank: rank 1"), ("its file and line", place)):
                found = self._until_diagnosed(pattern, job)
                self._took(Row(f"{name}: {what}", time.monotonic() - began))
                self.missing += [] if found else [f"{name}: {what}"]
            self.does(f"{name}: top", "commwatch", "top", "--once", shows=("Late rank: rank 1",))
            job.wait(_PATIENCE_S)
        _show(job.args, (self.place / f"{name}.log").read_text())
        self.does(f"{name}: diagnose", "commwatch", "diagnose", "latest", shows=("Late rank: rank 1", place))
        self.does(f"{name}: report", "commwatch", "report", shows=("rank 1 is late", place))

    def _took(self, row: Row) -> None:
        """Keep a row of the table, and print it, so that a play that is ended early has shown what it measured."""
        self.rows.append(row)
        print(f"-- {row.what}: {row.wall_s:.1f} s\n", flush=True)

    def _until_diagnosed(self, pattern: str, job: subprocess.Popen[bytes]) -> bool:
        while job.poll() is None:
            command = ["commwatch", "diagnose"]
            done = subprocess.run(command, cwd=self.place, env=self.env, capture_output=True, text=True, check=False)
            if re.search(pattern, done.stdout):
                _show(command, done.stdout)
                return True
        return False

    def starts(self, runs: int) -> None:
        """Compare the start of a job without commwatch and with it, in turn; in each run the cache has no hook."""
        (self.place / "starts.py").write_text(_STARTS)
        figures: dict[str, list[list[float]]] = {"without commwatch": [], "with it": []}
        for _ in range(runs):
            for what, before in (("without commwatch", []), ("with it", ["commwatch", "run", "--"])):
                shutil.rmtree(self.place / ".cache" / "commwatch", ignore_errors=True)
                plain = ["torchrun", "--nproc-per-node=2", f"--master-port={free_port()}", "starts.py"]
                began = time.time()
                subprocess.run([*before, *plain], cwd=self.place, env=self.env, capture_output=True, check=True)
                rank, step = map(float, (self.place / "starts").read_text().split())
                figures[what].append([rank - began, step - rank])
                print(
                    f"-- {what}: {rank - began:.1f} s to the rank's first line, then {step - rank:.1f} s to its first step",
                    flush=True,
                )
        for what, each in figures.items():
            for part, at in (("command to rank's first line", 0), ("rank's first line to end of first step", 1)):
                values = sorted(run[at] for run in each)
                self._took(Row(f"{what}: {part}, median of {runs}", values[runs // 2]))


def watched(*script: str) -> list[str]:
    """Return the command of a watched job of two ranks."""
    return ["commwatch", "run", "--", "torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), *script]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(command: object, output: str) -> None:
    words = " ".join(map(str, command)) if isinstance(command, (list, tuple)) else str(command)
    print(f"$ {words}\n{output}", flush=True)


def main() -> None:
    """Play both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hooks", type=Path, metavar="DIR", help="folder with a wheel of hooks for this torch")
    parser.add_argument(
        "--starts",
        type=int,
        default=0,
        metavar="RUNS",
        help="compare the start of a job without and with commwatch, too",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commwatch-newcomer-", ignore_cleanup_errors=True) as place:
        player = Player(Path(place), arguments.hooks and arguments.hooks.absolute())
        player.installs()
        player.newcomer()
        steps = (Path(place) / "train.py").read_text()
        (Path(place) / "train.py").write_text(steps.replace("range(200)", f"range({_DDP_STEPS})"))
        player.engineer("DDP", "train.py", r"train\.py:12")
        shutil.copy(FSDP, place)
        player.engineer("FSDP2", FSDP.name, r"load_batch \(slow_fsdp\.py:\d+\)", str(_FSDP_STEPS))
        player.does("compare", "commwatch", "compare", shows=("step time, median",))
        if arguments.starts:
            player.starts(arguments.starts)
    print("| | wall time (s) | CPU time (s) |\n|---|---|---|")
    for row in player.rows:
        print(f"| {row.what} | {row.wall_s:.1f} | {'' if row.cpu_s is None else f'{row.cpu_s:.1f}'} |")
    for each in player.missing:
        print(f"missing: {each}")
    sys.exit(bool(player.missing))


if __name__ == "__main__":
    main()
