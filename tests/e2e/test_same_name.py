"""Jobs of one name at once, on one node and across nodes: each is seen whole, no answer mixes them, a hang is named in the right one."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, SOON_MET, RunningAgent, agent, clean_env, commwatch, free_port, wait_for

NOBODY = "-1"


def jobs_of(running: RunningAgent, scope: str = "node") -> dict[str, dict[str, Any]]:
    """What an agent lists, by name."""
    answer = running.get(f"/api/v1/jobs?scope={scope}")
    return {job["job_id"]: job for job in (answer["data"] if scope == "job" else answer)}


def about(running: RunningAgent, question: str, job: str) -> Any:
    """What an agent answers about a job on all its nodes."""
    joint = "&" if "?" in question else "?"
    return running.get(f"/api/v1/{question}{joint}scope=job&job={quote(job, safe='')}")["data"]


def pids(running: RunningAgent, job: str) -> dict[int, int]:
    """The processes of a job's ranks on this node."""
    return {view["rank"]: view["visible_pid"] for view in running.get(f"/api/v1/ranks?job={quote(job, safe='')}")}


# -- one node -------------------------------------------------------------------------------------


@contextmanager
def elastic(directory: Path, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job as in a tutorial, with the name of another one. The launcher is torchrun itself; the ranks need not import torch anew."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-id=456"]
    launcher += ["--no-python"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--max-restarts=1"]
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(directory), PER_NODE="2")
    # After a restart, Gloo would find the addresses of before in a store that the launcher shares with the ranks.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [*launcher, *meeting, *prefork.command(JOBS / "nodes.py", "0", "1000", "steps")]
    with (
        said.open("wb") as out,
        subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


@pytest.mark.long
def test_tutorial_twice(tmp_path: Path) -> None:
    """Of two jobs with `--rdzv-id=456`, the first one's hang and the second one's restart are seen in the right one, and each ending is its own."""
    run = tmp_path / "run"
    with ExitStack() as stack:
        running = stack.enter_context(agent(run))
        first = stack.enter_context(elastic(run, tmp_path / "first"))
        wait_for(lambda: jobs_of(running).get("456", {}).get("ranks") == [0, 1], "the first job")
        second = stack.enter_context(elastic(run, tmp_path / "second"))
        wait_for(lambda: jobs_of(running).get("456#2", {}).get("ranks") == [0, 1], "the second job")
        before = {name: pids(running, name) for name in ("456", "456#2")}
        assert len({*before["456"].values(), *before["456#2"].values()}) == 4
        os.kill(before["456"][1], signal.SIGSTOP)
        os.kill(before["456#2"][0], signal.SIGKILL)

        def hangs() -> list[dict[str, Any]]:
            return [verdict for verdict in running.get("/api/v1/verdicts") if verdict["cause"] == "stopped"]

        (hang, *_) = wait_for(hangs, "the hang")
        assert {(verdict["job_id"], tuple(verdict["ranks"])) for verdict in hangs()} == {("456", (1,))}, hang
        assert "Hang: rank 1 (456)" in commwatch("diagnose", "--dir", run).stdout
        wait_for(lambda: jobs_of(running)["456#2"]["restarts"] == 1, "the restart")
        wait_for(lambda: None not in pids(running, "456#2").values(), "its ranks")
        assert not {*before["456#2"].values()} & {*pids(running, "456#2").values()}
        assert pids(running, "456") == before["456"]
        assert jobs_of(running).keys() == {"456", "456#2"}
        os.kill(before["456"][1], signal.SIGCONT)
        wait_for(lambda: not hangs(), "the end of the hang")
        os.kill(pids(running, "456#2")[1], signal.SIGKILL)  # there is no restart left
        second.wait(PATIENCE_S)
        wait_for(lambda: jobs_of(running)["456#2"]["state"] == "ended", "the end of the second job")
        ended = jobs_of(running)
        assert (ended["456"]["state"], ended["456"]["failed"]) == ("running", None)
        assert ended["456#2"]["failed"] is True
        assert "rank 1" in ended["456#2"]["ending"]
        assert first.poll() is None


def test_commwatch_run_twice(tmp_path: Path) -> None:
    """Two jobs that `commwatch run` starts under one name beside one agent have each their own exit code and report."""
    run, state = tmp_path / "run", tmp_path / "state"
    env = clean_env(COMMWATCH_JOB="same", COMMWATCH_DIR=str(run), XDG_STATE_HOME=str(state), COMMWATCH_NCCL_LOGS="off")
    with agent(run, "--state", str(state / "commwatch")) as running:
        script = tmp_path / "steps.py"
        script.write_text(
            "import os, sys, time, torch, torch.distributed as dist, commwatch\n"
            "dist.init_process_group('gloo')\n"
            "for n in range(int(sys.argv[1])):\n"
            "    dist.all_reduce(torch.ones(10)); commwatch.step()\n"
            "while not os.path.exists(sys.argv[2]): time.sleep(0.05)\n"
            "dist.destroy_process_group(); sys.exit(int(sys.argv[3]))\n"
        )
        go = tmp_path / "go"
        processes = []
        for steps, code in ((50, 0), (30, 3)):
            job = [*prefork.launcher(1), str(script), str(steps), str(go), str(code)]
            command = [*prefork.commwatch_command(), "run", "--dir", str(run), "--", *job]
            processes.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            wait_for(lambda: len(jobs_of(running)) == len(processes), "the job")
        go.touch()
        reports = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 1]
        wait_for(lambda: all(job["exit_code"] is not None for job in jobs_of(running).values()), "the exit codes")
        assert {name: job["exit_code"] for name, job in jobs_of(running).items()} == {"same": 0, "same#2": 1}
    for report, name, steps in zip(reports, ("same", "same#2"), (49, 29), strict=True):
        assert re.search(rf"\b{name}(?!#)", report), report
        assert re.search(rf"steps +{steps}\b", report), report


# -- several nodes --------------------------------------------------------------------------------


class Site:
    """Two hosts with agents that know each other, and jobs that all have one name."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.hosts = stack.enter_context(joined_hosts(2))
        self._directory = directory
        peers = directory / "peers.json"
        urls = [f"http://{host.address}:9477" for host in self.hosts]
        peers.write_text(json.dumps([{"targets": urls}]))
        flags = ("--host", "0.0.0.0", "--port", "9477", "--insecure", "--quiet")
        env = clean_env(COMMWATCH_PEERS=str(peers))
        self.agents = [
            stack.enter_context(
                agent(self.directory(host), *flags, env=env, beside=host.process, fetch=host.fetch, constants=SOON_MET)
            )
            for host in self.hosts
        ]
        for running in self.agents:
            wait_for(partial(self._has_peer, running), "the other agent")
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        stack.callback(self.end_all)

    def _has_peer(self, running: RunningAgent) -> bool:
        return any(peer["state"] == "answers" for peer in running.get("/api/v1/peers"))

    def directory(self, host: Host) -> Path:
        """The run directory of a host."""
        return self._directory / host.address

    def start(self, name: str, *hosts: Host) -> None:
        """Start a job with one rank on each host; ``name`` is only for the test."""
        self.processes[name] = []
        port = free_port()
        for rank, host in enumerate(hosts):
            env = clean_env(
                MASTER_ADDR=hosts[0].address, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=host.device,
                RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", PER_NODE="1",
                COMMWATCH="1", COMMWATCH_DIR=str(self.directory(host)), COMMWATCH_JOB="train",
            )  # fmt: skip
            late = "0" if len(hosts) == 1 else NOBODY  # one rank alone would fill its ring many times a second
            command = [*host.there, *prefork.command(JOBS / "nodes.py", late, "1000", "steps")]
            out = subprocess.DEVNULL
            self.processes[name].append(subprocess.Popen(command, env=env, stdout=out, stderr=out))

    def end_all(self) -> None:
        """Kill all ranks."""
        for name in list(self.processes):
            self.end(name)

    def lanes(self, number: int, name: str) -> set[str]:
        """The ranks in the timeline of a job on all its nodes, from one of the agents."""
        question = f"/api/v1/timeline?scope=job&job={quote(name, safe='')}"
        packed, _ = self.hosts[number].fetch(self.agents[number].url + question)
        events = json.loads(gzip.decompress(packed))["traceEvents"]
        named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        return {match.group() for each in named if (match := re.match(r"rank \d+", each))}

    def end(self, name: str) -> None:
        """Kill the ranks of a job."""
        for process in self.processes.pop(name):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """``alone`` runs on the first host, then ``wide`` on both. It is the second of its name on the first host, so both hosts number it 2."""
    with ExitStack() as stack:
        made = Site(tmp_path_factory.mktemp("site"), stack)
        here, there = made.agents
        made.start("alone", made.hosts[0])
        wait_for(lambda: jobs_of(here).keys() == {"train"}, "the first job")
        made.start("wide", *made.hosts)
        wait_for(lambda: jobs_of(here).keys() == {"train", "train#2"}, "the second job")
        wait_for(lambda: jobs_of(there), "its part on the other host")
        wait_for(lambda: jobs_of(there).keys() == {"train#2"}, "the name that it has on the first host")
        yield made


def both_have_steps(running: RunningAgent, name: str) -> bool:
    """Whether an agent has steps of both ranks of a job."""
    return {step["rank"] for step in about(running, "steps?limit=1000", name)} == {0, 1}


def stopped_in(running: RunningAgent, name: str) -> list[dict[str, Any]]:
    """The verdicts on stopped ranks of a job."""
    return [each for each in about(running, "verdicts", name) if each["cause"] == "stopped"]


WIDE = "train#2"


def test_whole_jobs(site: Site) -> None:
    """Ranks, groups, steps, sums and headlines of each job are those of its own ranks, from both agents."""
    here, there = site.agents
    for running in site.agents:
        wait_for(partial(both_have_steps, running, WIDE), "steps of both ranks")
        ranks = about(running, "ranks", WIDE)
        assert [view["rank"] for view in ranks] == [0, 1]
        assert {view["job_id"] for view in ranks} == {WIDE}
        world = [group for group in about(running, "groups", WIDE) if group["size"] == 2]
        assert [(group["members"], group["ranks"]) for group in world] == [([0, 1], [0, 1])]
        rows = about(running, "summary?by=rank", WIDE)["rows"]
        assert sorted(row["by"]["rank"] for row in rows) == [0, 1]
        assert about(running, "verdicts", WIDE) == []
    assert [view["rank"] for view in about(here, "ranks", "train")] == [0]
    listed = [
        {name: (job["ranks"], job["world_size"]) for name, job in jobs_of(one, "job").items()} for one in site.agents
    ]
    wide, alone = ([0, 1], 2), ([0], 1)
    assert listed == [{"train": alone, WIDE: wide}] * 2
    for running, own in zip(site.agents, ({"train", WIDE}, {WIDE}), strict=True):
        assert set(re.findall(r'job_id="([^"]*)"', running.get("/metrics"))) == own
    run = jobs_of(here)[WIDE]["run"]
    assert {view["job_id"] for view in there.get(f"/api/v1/ranks?job=other&run={run}")} == {"other"}, (
        "its name where it is asked"
    )
    with pytest.raises(HTTPError, match="404"):
        there.get(f"/api/v1/ranks?job=train&run={jobs_of(here)['train']['run']}")


def test_hang(site: Site) -> None:
    """A rank that stops on the other host is named in the wide job from both agents; the job that is alone is healthy."""
    stopped = pids(site.agents[1], WIDE)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for running in site.agents:
            named = wait_for(partial(stopped_in, running, WIDE), "the verdict")
            assert {(each["job_id"], tuple(each["ranks"])) for each in named} == {(WIDE, (1,))}
        assert about(site.agents[0], "verdicts", "train") == []
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: not about(site.agents[0], "verdicts", WIDE), "the end of the hang")


def test_after_their_end(site: Site) -> None:
    """A job that has ended keeps its answers on all nodes when another one of its name begins on one of them, which has none of them."""
    here, there = site.agents
    site.end("wide")
    wait_for(lambda: jobs_of(there)[WIDE]["state"] == jobs_of(here)[WIDE]["state"] == "ended", "the end")
    run = jobs_of(here)[WIDE]["run"]
    site.start("later", site.hosts[1])
    wait_for(lambda: jobs_of(there).keys() == {"train", WIDE}, "the later job")
    assert jobs_of(there)["train"]["run"] not in (run, jobs_of(here)["train"]["run"])
    for running, name in ((here, WIDE), (there, WIDE), (there, f"{WIDE}@{run}")):
        ranks = about(running, "ranks", name)
        assert [(view["rank"], view["state"]) for view in ranks] == [(0, "gone"), (1, "gone")], name
        assert {step["rank"] for step in about(running, "steps?limit=1000", name)} == {0, 1}
        report = running.get(f"/api/v1/report?scope=job&job={quote(name, safe='')}")
        assert (report["job"]["job_id"], report["job"]["ranks"]) == (name, [0, 1])
        assert [each["rank"] for each in report["ranks"]] == [0, 1]
    assert [view["rank"] for view in about(there, "ranks", "train")] == [0]
    report = there.get("/api/v1/report?scope=job&job=train")
    assert (report["job"]["world_size"], [each["rank"] for each in report["ranks"]]) == (1, [0])
    for name, ranks in (("train", {"rank 0"}), (WIDE, {"rank 0", "rank 1"})):
        assert ranks == site.lanes(1, name)
    found = commwatch("compare", "--dir", site.directory(site.hosts[1]), "train", WIDE, beside=site.hosts[1].process)
    assert found.returncode in (0, 1), found.stderr
