"""The first commands followed literally by a new user: those of README.md, docs/commands.md and docs/tutorial.md do what they say."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, clean_env, commwatch, free_port, wait_for

TREE = Path(__file__).parents[2]
LOG = TREE / "tests" / "fixtures" / "nccl" / "healthy.log"
#: What each prints, in a word or two; where it ends otherwise than with 0, how.
SAYS = {
    "commwatch run -- torchrun --nproc-per-node 8 train.py": "comm share",
    "commwatch report": "comm share",
    "commwatch report JOB --html report.html": "",
    "commwatch jobs": "mine",
    "commwatch compare JOB_A JOB_B": "No setting that the history keeps differs.",
    "commwatch whatif JOB --link 2x": "1,000 steps",
    "commwatch timeline JOB --out trace.json.gz": "trace.json.gz: ",
    "commwatch top": "--once",
    "commwatch diagnose": "healthy: 1 running job, 2 ranks",
    "commwatch query 'summary?since=15m&by=op'": "all_reduce",
    "commwatch bench -- torchrun --nproc-per-node 8": "busbw",
    "commwatch profile --steps 3": "by torch.profiler",
    "commwatch explain job.log": "NCCL",
    "commwatch doctor": "on all 2 ranks",
}
ENDS = {"commwatch top": 2}
#: A job that ends by itself.
TWENTY_STEPS = """
import torch
import torch.distributed as dist
from common import begin, end

import commwatch

begin()
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
    commwatch.step()
end()
"""


def blocks(document: str) -> list[list[str]]:
    """The commands of each block of shell in a document, without their comments."""
    found = re.findall(r"```sh\n(.*?)```", (TREE / document).read_text(encoding="utf-8"), flags=re.DOTALL)
    return [[line.partition(" #")[0].strip() for line in block.splitlines()] for block in found]


class Newcomer:
    """Somebody with an empty home and a script of theirs, in a folder with a log.

    The tutorial's job is started ``anew``: its processes start as they do for a user. Those of all other commands are forks of one that
    has imported what they need.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.run_dir, self.port = place, place / "run", str(free_port())
        bin_dir = str(Path(sys.executable).parent)
        path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
        base = {name: value for name, value in clean_env().items() if not name.startswith("COMMWATCH")}
        self.env = {**base, "HOME": str(place), "PATH": path, "TERM": "dumb"}
        for name in ("governed.py", "common.py"):
            shutil.copy(JOBS / name, place / name)
        (place / "train.py").write_text(
            "import sys; sys.argv = ['train.py', 'stop', '0.02']; import governed; governed.main()\n"
        )
        shutil.copy(LOG, place / "job.log")

    def words(self, command: str, anew: bool = False) -> list[str]:
        """A command as it is typed, but with two ranks instead of eight, few sizes, and a place and a port of this test's own."""
        stand_in = {
            "/run/commwatch": str(self.run_dir),
            "9477": self.port,
            "8": "2",
            **dict.fromkeys(("JOB", "JOB_A", "JOB_B"), "mine"),
        }
        typed = [stand_in.get(word, word) for word in shlex.split(command) if word != "..."]
        for name, value in stand_in.items():
            typed = [word.replace(f"={name}", f"={value}") for word in typed]
        if "bench" in typed:
            flags = typed.index("bench") + 1
            typed[flags:flags] = ["--max-bytes=64K", "--seconds=0.05"]
        if anew:
            at = typed.index("torchrun") + 1
            return [*typed[:at], "--nproc-per-node=2", f"--master-port={free_port()}", *typed[at:]]
        if "--nproc-per-node" in typed:
            at = typed.index("--nproc-per-node")
            del typed[at : at + 2]
        for program, forked in (("torchrun", prefork.launcher(2)), ("commwatch", prefork.commwatch_command())):
            if program in typed:
                at = typed.index(program)
                typed[at : at + 1] = forked
        return typed

    def does(self, command: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
        """Type it, and wait until it is over."""
        return subprocess.run(
            self.words(command, anew),
            cwd=self.place,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )

    @contextmanager
    def leaves_running(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Type it in another terminal; variables before it are the shell's."""
        words = self.words(command)
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        command_line = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        process = subprocess.Popen(command_line, cwd=self.place, env={**self.env, "COMMWATCH_JOB": "mine", **variables})
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, native: Path) -> Newcomer:
    """Before the first command; but for the minute that building the native hook would take."""
    return Newcomer(tmp_path_factory.mktemp("newcomer"))


def test_every_command(newcomer: Newcomer) -> None:
    """Start the sidecar and its job first; then run each command of the page beside it, and finally ``commwatch run`` with its own job."""
    around, (beside, trainer), *_ = blocks("docs/commands.md")
    assert set(around) == set(SAYS), "docs/commands.md has other commands than this test"
    newcomer.env["COMMWATCH_DIR"] = str(newcomer.run_dir)
    with newcomer.leaves_running(beside), newcomer.leaves_running(trainer) as job:
        healthy = "healthy: 1 running job, 2 ranks"
        wait_for(lambda: healthy in commwatch("diagnose", "--dir", newcomer.run_dir).stdout, "the job")
        for command in around[1:]:
            done = newcomer.does(command)
            assert (done.returncode, "Traceback" in done.stdout) == (ENDS.get(command, 0), False), done.stdout
            assert SAYS[command] in done.stdout, f"{command}: {done.stdout}"
        (newcomer.place / "stop").touch()
        assert job.wait(PATIENCE_S) == 0
    (newcomer.place / "train.py").write_text(TWENTY_STEPS)
    done = newcomer.does(around[0])
    assert (done.returncode, SAYS[around[0]] in done.stdout) == (0, True), done.stdout
    assert "<html" in (newcomer.place / "report.html").read_text()


def test_commands_of_readme() -> None:
    """README.md shows how to install, three commands of the page that the other test types, and what CI runs."""
    install, use, develop = blocks("README.md")
    assert install == blocks("docs/tutorial.md")[0] == ["uv tool install ."]
    assert len(use) == 3
    assert set(use) <= set(SAYS)
    targets = re.findall(r"^([a-z]+):", (TREE / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"make lint", "make test"} <= set(develop) <= {f"make {target}" for target in targets}


def test_tutorial(tmp_path: Path, native: Path) -> None:
    """The tutorial's job has the report that the tutorial shows; without the lines that it has you remove, the two runs can be compared."""
    reader = Newcomer(tmp_path)
    text = (TREE / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    _, (watch,), (compare,) = blocks("docs/tutorial.md")
    slow = [line for line in script.splitlines() if "get_rank" in line or "sleep" in line]
    assert len(slow) == 2
    for shown in (script, "\n".join(line for line in script.splitlines() if line not in slow)):
        (tmp_path / "train.py").write_text(shown)
        done = reader.does(watch, anew=shown == script)
        assert done.returncode == 0, done.stdout
        if shown == script:
            for part in (
                "rank 1 is the bottleneck, not the network",
                "* rank 1 is late and the others wait for it",
                "Late rank: rank 1, ",
            ):
                assert part in text
                assert part in " ".join(done.stdout.split()), done.stdout
    done = reader.does(compare)
    assert (done.returncode, "step time, median" in done.stdout) == (0, True), done.stdout
