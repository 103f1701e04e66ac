"""Real jobs of three ranks in which something goes wrong: the verdict names it, within seconds, from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import prefork
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, SOON_HUNG, RunningAgent, agent, clean_env, commwatch, free_port, wait_for

RANKS, GOOD = 3, 20
#: For an agent that also knows soon that a rank does not come to what is no operation.
SOON_MISSED = SOON_HUNG | {"commwatch_agent.analysis.waits.outside_waits._PATIENCE_S": 5.0}


class Trouble(NamedTuple):
    """What a culprit does, and what the verdict must be."""

    does: str
    culprit: int
    kind: str
    cause: str
    says: str
    good: int = GOOD
    group: str = "default_pg"


TROUBLES = (
    Trouble("stop", 1, "hang", "stopped", "stalled: rank 1 has not joined; its process is stopped"),
    Trouble("stop_inside", 1, "hang", "stopped", "stalled: rank 1 has entered; its process is stopped"),
    Trouble("die", 2, "hang", "dead", "process dead: rank 2"),
    Trouble("leave", 0, "hang", "gone", "rank ended: rank 0"),
    Trouble(
        "destroy",
        1,
        "hang",
        "destroyed",
        "group destroyed: rank 1 has destroyed the group and will not join; its process lives",
    ),
    Trouble(
        "destroy_group", 2, "hang", "destroyed", "group destroyed: rank 2 has destroyed the group", group="ranks 0-2"
    ),
    Trouble("hold_gil", 1, "stalled", "silent", "stalled: rank 1 has not joined; its Python code is not running"),
    Trouble("compute", 2, "stalled", "not_joined", "stalled: rank 2 has not joined; it is alive", good=60),
    Trouble("other_op", 1, "desync", "ops", "ranks in different ops: ranks 0, 2: all_reduce; rank 1: broadcast"),
    Trouble("other_op_ends", 0, "desync", "ops", "ranks in different ops: ranks 1-2: all_reduce; rank 0: broadcast"),
    Trouble("other_root", 2, "desync", "root", "roots differ: ranks 0-1: root 0; rank 2: root 1 (broadcast 20"),
    Trouble("other_size", 1, "desync", "sizes", "rank 1: 40 bytes of float32"),
    Trouble("other_dtype", 2, "desync", "sizes", "rank 2: 4000 bytes of float64"),
)


class Job:
    """The ranks of a job, each started by hand, so that no launcher ends the others when one ends."""

    def __init__(self, directory: Path, name: str, *arguments: object, ranks: int = RANKS) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory), "COMMWATCH_JOB": name}
        if name == "hold_gil":
            # The heartbeat of the native hook does not need the GIL.
            watched["COMMWATCH_HOOK"] = "python"
        command = prefork.command(JOBS / "troubles.py", *map(str, arguments))
        self.name = name
        self.ranks = [
            subprocess.Popen(command, env=clean_env(**where, **watched, RANK=str(rank)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for rank in range(ranks)
        ]  # fmt: skip

    def end(self) -> None:
        """Kill what is left."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


def verdicts_of(running: RunningAgent, job: str) -> list[dict[str, Any]]:
    """The agent's verdicts on a job, once it knows the job."""
    if job not in [each["job_id"] for each in running.get("/api/v1/jobs")]:
        return []
    found: list[dict[str, Any]] = running.get(f"/api/v1/verdicts?job={job}")
    return found


@pytest.mark.parametrize(
    ("trouble", "cause", "says"),
    [
        ("other_op_ends", "ops", "ranks in different ops: rank 0: broadcast; rank 1: all_reduce"),
        ("other_root", "root", "roots differ: rank 0: root 0; rank 1: root 1"),
        ("destroy", "destroyed", "group destroyed: rank 1 has destroyed the group"),
    ],
)
def test_two_ranks(tmp_path: Path, trouble: str, cause: str, says: str) -> None:
    """Of two ranks, of which only one still waits in the operation, or none, the verdict says what differs, and stays while one waits."""
    job = Job(tmp_path, trouble, trouble, 0 if trouble == "other_op_ends" else 1, GOOD, ranks=2)
    try:
        with agent(tmp_path, constants=SOON_HUNG) as running:
            (verdict,) = wait_for(lambda: verdicts_of(running, trouble), "the verdict")
            assert (verdict["cause"], verdict["seq"]) == (cause, GOOD), verdict
            assert says in verdict["says"]
    finally:
        job.end()


@pytest.mark.parametrize(
    ("does", "culprit", "good", "says"),
    [("save", 0, GOOD, "it is alive and is writing "), ("compute", 2, 1, "it is alive and computes")],
)
def test_work_that_takes_long(tmp_path: Path, does: str, culprit: int, good: int, says: str) -> None:
    """A rank that writes, or that computes at a place that is new to the job, is no verdict: it is an incident for information, with what it does."""
    job = Job(tmp_path, does, does, culprit, good)
    try:
        with agent(tmp_path, constants=SOON_HUNG) as running:
            (waits,) = wait_for(
                lambda: [each for each in running.get("/api/v1/incidents?state=open") if each["kind"] == "waiting"],
                "the incident",
            )
            assert (waits["severity"], waits["ranks"]) == ("info", [culprit])
            assert says in waits["says"]
            assert verdicts_of(running, does) == []
    finally:
        job.end()


def diagnosis(directory: Path) -> str:
    """What ``commwatch diagnose`` prints, each time that nothing is well."""
    done = commwatch("diagnose", "--dir", directory)
    assert done.returncode == 1, done.stdout
    assert "healthy" not in done.stdout
    return done.stdout


#: How a killed rank ended, and the title of its loss; on a busy machine, its status may not be known.
KILLED = r"signal 9 \(SIGKILL\)"
LOSS = rf"Rank (died|ended by {KILLED}): rank 1 \(train\)"


def test_diagnose_after_a_kill(tmp_path: Path) -> None:
    """A killed rank is named within seconds and then as the cause; after the end, with and without an agent, its job is shown by its name."""
    with agent(tmp_path, constants=SOON_HUNG) as running:
        job = Job(tmp_path, "train", "nothing", 0, GOOD)
        try:
            wait_for(
                lambda: commwatch("diagnose", "--dir", tmp_path).stdout == f"healthy: 1 running job, {RANKS} ranks\n",
                "steps",
            )
            job.ranks[1].kill()
            states = ["running", "gone", "running"]
            wait_for(lambda: [each["state"] for each in running.get("/api/v1/ranks")] == states, "its death")
            assert re.search(rf"rank 1 \(train\) died (of {KILLED} )?[\d.]+ m?s ago|{LOSS}", diagnosis(tmp_path))
            lost = wait_for(lambda: re.search(LOSS, found := diagnosis(tmp_path)) and found, "the loss")
            assert re.match(rf"WARNING  {LOSS}\n", lost)
            wait_for(lambda: "\n  Consequence: Hang: rank 1, since " in diagnosis(tmp_path), "the hang")
        finally:
            job.end()
        wait_for(running.job_has_ended, "the end")
        now = commwatch("diagnose", "--dir", tmp_path)
        assert re.match(
            rf"no running job\ntrain failed at .*: rank 1 died (\(no clean end\)|of {KILLED}), on ", now.stdout
        )
        assert (now.returncode, f"`commwatch diagnose --dir {tmp_path} train` shows" in now.stdout) == (1, True)
        assert "\nnot yet certain: whether the launcher of train starts it again\n" in now.stdout

        def past() -> str:
            done = commwatch("diagnose", "train", "--dir", tmp_path)
            assert (done.returncode, done.stderr) == (1, "")
            return done.stdout if "until the job ended" in done.stdout else ""

        with_agent: str = wait_for(past, "what happened")
    assert re.match(rf"WARNING  {LOSS}\n", with_agent)
    assert with_agent.splitlines()[-2].startswith("train failed at ")
    assert past() == with_agent
    without = commwatch("diagnose", "--dir", tmp_path)
    assert (without.returncode, "no agent runs here" in without.stderr) == (2, True)
    assert f"`commwatch diagnose --dir {tmp_path} train` shows what happened" in without.stderr


def test_diagnose_ranks_that_wait_for_a_new_group(tmp_path: Path) -> None:
    """A job whose ranks wait outside of operations for others that never come is not healthy."""
    with agent(tmp_path, constants=SOON_MISSED):
        job = Job(tmp_path, "train", "new_group", 1, GOOD)
        try:
            missing = "rank 1 has not come to new_group"
            wait_for(lambda: missing in commwatch("diagnose", "--dir", tmp_path).stdout, "the incident")
            assert missing in diagnosis(tmp_path)
        finally:
            job.end()


# The jobs of this fixture run until the module ends, so the tests without it come first.
@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that watches all faults at once, each in a separate job, and one healthy job."""
    directory = tmp_path_factory.mktemp("troubles")
    jobs: list[Job] = []
    try:
        with agent(directory, constants=SOON_HUNG) as running:
            for trouble in TROUBLES:
                jobs.append(Job(directory, trouble.does, trouble.does, trouble.culprit, trouble.good))
            jobs.append(Job(directory, "healthy", "nothing", 0, GOOD))
            yield running
    finally:
        for job in jobs:
            job.end()


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.does)
def test_trouble(troubled: RunningAgent, trouble: Trouble) -> None:
    """The verdict has the right kind, cause and culprit, says it in words, and names who waits."""

    def judged() -> dict[str, Any] | None:
        found = [verdict for verdict in verdicts_of(troubled, trouble.does) if verdict["cause"] == trouble.cause]
        return found[0] if found else None

    verdict = wait_for(judged, f"the verdict on {trouble.does}")
    assert (verdict["kind"], verdict["ranks"]) == (trouble.kind, [trouble.culprit]), verdict
    assert trouble.says in verdict["says"]
    assert (verdict["job_id"], verdict["group"]) == (trouble.does, trouble.group)
    assert set(verdict["waiting"]) <= set(range(RANKS)) - {trouble.culprit}
    assert verdict["seq"] == trouble.good


def test_left(troubled: RunningAgent) -> None:
    """A rank that has destroyed its default group has left while its process lives, and has ended afterwards; one that destroyed another group runs."""

    def states(job: str) -> list[str]:
        return [each["state"] for each in troubled.get("/api/v1/ranks") if each["job_id"] == job]

    wait_for(lambda: states("destroy") == ["running", "left", "running"], "the rank that has left")
    wait_for(lambda: verdicts_of(troubled, "destroy_group"), "the verdict")
    assert states("destroy_group") == ["running"] * RANKS
    leaving = Job(troubled.directory, "leaving", "destroy", 1, GOOD)
    try:
        wait_for(lambda: states("leaving") == ["running", "left", "running"], "the rank that has left")
        leaving.ranks[1].kill()
        wait_for(lambda: states("leaving") == ["running", "ended", "running"], "its end")
        (verdict,) = wait_for(lambda: verdicts_of(troubled, "leaving"), "the verdict")
        assert (verdict["cause"], verdict["ranks"]) == ("gone", [1])
    finally:
        leaving.end()


def test_healthy(troubled: RunningAgent) -> None:
    """A job with a posted receive without an answer continues, and there is no verdict on it, whatever else is wrong."""
    wait_for(lambda: len(troubled.get("/api/v1/verdicts")) >= len(TROUBLES), "all verdicts", PATIENCE_S)
    (healthy,) = [each for each in troubled.get("/api/v1/jobs") if each["job_id"] == "healthy"]
    assert healthy["state"] == "running"
    assert verdicts_of(troubled, "healthy") == []


def test_diagnose(troubled: RunningAgent) -> None:
    """``commwatch diagnose`` shows the incident as soon as there is a verdict: exit code 1, text, stack; 0 for a healthy job; 2 if no agent answers."""
    wait_for(lambda: verdicts_of(troubled, "stop"), "the verdict")
    done = commwatch("diagnose", "--dir", troubled.directory, "--job", "stop")
    assert (done.returncode, done.stderr) == (1, "")
    assert "  Hang: rank 1 (stop)\n" in done.stdout
    assert "its process is stopped" in done.stdout
    assert "  To do: " in done.stdout
    assert re.search(r"^ +stop \(.*troubles.py:\d+\)$", done.stdout, re.MULTILINE)
    wait_for(lambda: verdicts_of(troubled, "compute"), "the verdict")
    done = commwatch("diagnose", "--dir", troubled.directory, "compute", "--json")
    told = json.loads(done.stdout)
    (verdict,) = told["verdicts"]
    (incident,) = [each for each in told["incidents"] if each["state"] == "open"]
    about = ("kind", "cause", "job_id", "group_id", "group", "seq", "op", "ranks", "waiting")
    assert [incident[name] for name in about] == [verdict[name] for name in about]
    stacks = [item["data"].get("stack", "") for item in incident["evidence"]]
    stacks += [each["text"] for each in told["evidence"] if each["rank"] == 2]
    assert any(re.search(r"compute \(.*troubles.py", stack) for stack in stacks)
    done = commwatch("diagnose", troubled.url, "--job", "healthy")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"healthy: 1 running job, {RANKS} ranks\n"
    done = commwatch("diagnose", f"127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
