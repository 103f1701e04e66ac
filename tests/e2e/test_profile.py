"""A real DDP job is profiled on demand: the figures agree with the records, and the training does not notice."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commwatch.api.client import Keys, post
from tests import prefork
from tests.e2e.torchjob import UPSTREAM_FLAKE, preforked, results, run_job
from tests.helpers import PATIENCE_S, RunningAgent, agent, clean_env, commwatch, wait_for

JOB = "train"
#: By how much the share by records may be below that by trace of the same steps, and above it. Records include the way from the call to
#: the backend's thread, which is long on a busy machine, so one of a few profiles has to be within the upper bound.
BELOW, ABOVE, TRIES = 0.05, 0.20, 4


@dataclass
class Training:
    """A job that trains until it is ended."""

    process: subprocess.Popen[str]
    stop: Path
    said: list[Any] = field(default_factory=list)
    errors: str = ""

    def finish(self) -> None:
        """Tell it to end, and take what it says."""
        self.stop.touch()
        out, self.errors = self.process.communicate(timeout=2 * PATIENCE_S)
        assert self.process.returncode == 0 or UPSTREAM_FLAKE in self.errors, self.errors[-3000:]
        assert out.count("job done") == 2, self.errors[-3000:]
        self.said = results(out)


@contextmanager
def training(directory: Path, does: str = "nothing", *prefix: str) -> Iterator[Training]:
    """The job; it has come to its steps once this is entered where an agent watches."""
    stop = directory.with_name("stop")
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(directory), COMMWATCH_JOB=JOB)
    command = [*prefix, *preforked("profiled.py", 2, str(stop), "1", does)]
    job = Training(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE), stop)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.communicate(timeout=PATIENCE_S)


def steps(running: RunningAgent) -> int:
    """The latest step that both ranks have made."""
    latest = {step["rank"]: step["seq"] for step in reversed(running.get("/api/v1/steps?limit=50"))}
    return min(latest.values()) if len(latest) == 2 else 0


def goes_on(running: RunningAgent) -> None:
    """The training makes more steps."""
    before = steps(running)
    wait_for(lambda: steps(running) > before + 5, "more steps")


def profiled(directory: Path, *flags: str, code: int = 0) -> dict[int, dict[str, Any]]:
    """What the command says, by rank."""
    done = commwatch("profile", "--dir", directory, "--json", *flags)
    assert done.returncode == code, done.stdout + done.stderr
    return {rank["rank"]: rank for profile in json.loads(done.stdout)["profiles"] for rank in profile["ranks"]}


def checked(ranks: dict[int, dict[str, Any]]) -> float:
    """Check all of a profile but the upper bound; return by how much the share by records is above that by trace, infinity if one is unknown."""
    assert sorted(ranks) == [0, 1]
    above = []
    for number, rank in ranks.items():
        assert (rank["state"], rank["error"], rank["steps"]) == ("done", None, 50)
        assert rank["until_seq"] - rank["from_seq"] == 50
        by_trace, by_records = rank["profile"], rank["continuous"]
        # One step whose clocks were read with an interruption between them makes the exposed time of fifty unknown: then this profile does not count.
        known = by_records["exposed_s"] is not None
        assert (by_trace["source"], by_records["source"]) == ("cpu_ops", "thread_cpu" if known else "")
        assert 0 < by_trace["exposed_share"] <= by_trace["comm_share"] < 1
        assert by_records["comm_share"] - by_trace["comm_share"] > -BELOW
        above.append(by_records["comm_share"] - by_trace["comm_share"] if known else float("inf"))
        with gzip.open(rank["trace"]) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == number
    return float(max(above))


@pytest.mark.by_the_clock
def test_profile(tmp_path: Path) -> None:
    """Shares by trace and by records agree, the trace is there to be opened, and the training goes on to the same results."""
    with agent(tmp_path / "run") as running, training(tmp_path / "run") as job:
        wait_for(lambda: steps(running) > 10, "steps")
        above = [checked(profiled(tmp_path / "run", "--steps", "50"))]
        while above[-1] >= ABOVE and len(above) < TRIES:
            above.append(checked(profiled(tmp_path / "run", "--steps", "50")))
        assert min(above) < ABOVE, above
        goes_on(running)
        done = commwatch("profile", "--dir", tmp_path / "run", JOB, "--ranks", "1")
        assert (done.returncode, done.stderr) == (0, "")
        assert "job train, by torch.profiler" in done.stdout
        assert "https://ui.perfetto.dev" in done.stdout
        assert done.stdout.count(".pt.trace.json.gz") == 1
        for flags, says in (
            (("none",), "job 'none' is not running here; running: train"),
            (("--ranks", "7"), "rank 7 of job 'train'"),
        ):
            done = commwatch("profile", "--dir", tmp_path / "run", *flags)
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
            assert says in done.stderr
        job.finish()
    assert "commwatch: " not in job.errors
    # The same training, unwatched, for as many steps.
    many = str(len(job.said[0][0]))
    assert results(run_job(tmp_path / "off", "profiled.py", str(job.stop), many, "nothing", COMMWATCH="0")) == job.said


@pytest.mark.parametrize(
    ("does", "says"),
    [
        pytest.param("runs", "the training itself runs a profiler", marks=pytest.mark.long),
        ("warms", "the training itself runs a profiler"),
        ("starts", "it stopped because the training started a profiler"),
    ],
)
def test_own_profiler(tmp_path: Path, does: str, says: str) -> None:
    """The training's own profiler comes first: ours says why it has nothing, and the training goes on with what it profiled."""
    with agent(tmp_path / "run") as running, training(tmp_path / "run", does) as job:
        wait_for(lambda: steps(running) > 10, "steps")
        ranks = profiled(tmp_path / "run", "--steps", "50", code=1)
        assert [ranks[number]["error"] for number in (0, 1)] == [says, says]
        goes_on(running)
        job.finish()
    assert "commwatch: " not in job.errors
    if does != "warms":
        assert all(events > 0 for _, events in job.said)


def test_one_step_in_so_many(tmp_path: Path) -> None:
    """With ``profile_every``, one step is profiled without a request, and the next ones are so far away that they cost next to nothing."""

    def taken() -> list[Path]:
        return list((tmp_path / "run" / "profiles").glob("*-*/profile.json"))

    # So many that the agent has found both ranks by then, also on a busy machine.
    every = 50
    env = clean_env(COMMWATCH_PROFILE_EVERY=str(every))
    # Steps that are as long as others but for the profiler, whose cost is measured by that.
    with agent(tmp_path / "run", env=env) as running, training(tmp_path / "run", "evenly") as job:
        (path,) = wait_for(taken, "a profile")
        found = json.loads(path.read_bytes())
        assert [(rank["rank"], rank["state"], rank["steps"]) for rank in found["ranks"]] == [
            (0, "done", 1),
            (1, "done", 1),
        ]
        for rank in found["ranks"]:
            assert 0 < rank["profile"]["exposed_share"] <= rank["profile"]["comm_share"] < 1
            assert rank["from_seq"] >= every
        before = steps(running)
        wait_for(lambda: steps(running) > before + 3 * every, "many more steps")
        assert taken() == [path]
        # The CPU's exposed share is measured all the time.
        assert {one for one in running.samples() if "exposed_comm_share_ratio" in one and "profile" in one} == set()
        job.finish()
    assert "commwatch: " not in job.errors


def test_nowhere_to_meet(tmp_path: Path) -> None:
    """If nothing can be written for the trainers, the command prints one line, and the training continues."""
    with agent(tmp_path / "run") as running, training(tmp_path / "run") as job:
        wait_for(lambda: steps(running) > 10, "steps")
        (tmp_path / "run" / "profiling").write_text("no directory")
        done = commwatch("profile", "--dir", tmp_path / "run")
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        assert "the request cannot be written" in done.stderr
        goes_on(running)
        job.finish()
    assert "commwatch: " not in job.errors


def test_job_that_ends(tmp_path: Path) -> None:
    """A job that ends before its profile does leaves what there is, and ends as it does without the probe."""
    with agent(tmp_path / "run") as running, training(tmp_path / "run") as job:
        wait_for(lambda: steps(running) > 10, "steps")
        asked = post(running.url, "profiles", {"job": JOB, "steps": 50}, Keys(running.directory))
        wait_for(lambda: len(list((tmp_path / "run" / "profiling").glob("*.claim"))) == 2, "the ranks to begin")
        job.finish()
        path = f"/api/v1/profiles/{asked['id']}"
        wait_for(lambda: running.get(path)["state"] in ("done", "failed"), "the end of the profile")
        found = running.get(path)
    for rank in found["ranks"]:
        none = rank["error"] == "the training ended before a step ended"
        # It may abort at its end, with and without the probe, before it can write its result.
        none |= UPSTREAM_FLAKE in job.errors and rank["error"] == "its process ended before the profile did"
        assert none or (rank["state"] == "done" and 1 <= rank["steps"] <= 50), rank


def test_run(tmp_path: Path) -> None:
    """Of a job under ``commwatch run``, whose agent and directory go with it, the trace is kept with the history."""
    run_dir, state = tmp_path / "run", tmp_path / "state"
    prefix = [*prefork.commwatch_command(), "run", "--dir", str(run_dir), "--state", str(state), "--"]
    with training(run_dir, "nothing", *prefix) as job:
        wait_for(lambda: commwatch("diagnose", "--dir", run_dir).stdout.startswith("healthy: 1 running"), "the job")
        ranks = profiled(run_dir, "--steps", "3")
        job.finish()
    assert "comm share" in job.errors
    assert not list(run_dir.glob("run-*"))
    for rank in ranks.values():
        assert rank["state"] == "done"
        assert Path(rank["trace"]).parent.parent == state / "profiles"
        assert Path(rank["trace"]).stat().st_size > 1000
