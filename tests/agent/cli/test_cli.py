"""The command line as people and schedulers meet it: exit codes, one-line errors, signals, what is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.addresses import DEFAULT_PORT
from tests import prefork
from tests.agent.test_config import one_line
from tests.agent.web.routes.test_jobs import populated, rings_of
from tests.helpers import (
    MS,
    NOBODY,
    RunningAgent,
    Watch,
    agent,
    clean_env,
    commwatch,
    commwatch_as_nobody,
    elsewhere,
    end_rank,
    group_entry,
    lost_rank,
    operation,
    wait_for,
    write_ring,
)


def python(code: str) -> list[str]:
    """A command that is no training job."""
    return [sys.executable, "-c", code]


@contextmanager
def started(*arguments: str | Path, said: Path, anew: bool = True, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that keeps running, with standard error in ``said``; it is ended in any case.

    Args:
        anew: in a new Python, which takes all signals; a fork takes SIGTERM, SIGINT and SIGUSR1.
    """
    python_or_fork = [sys.executable, "-m", "commwatch"] if anew else prefork.commwatch_command()
    command = [*python_or_fork, *map(str, arguments)]
    with open(said, "w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean_env(), **kwargs)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


@contextmanager
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# -- asked wrongly ------------------------------------------------------------------------------


def test_unknown_command() -> None:
    """A command, flag or value that does not exist is an error of usage that names it, and one that looks like it."""
    for arguments, named, meant in (
        (["nosuch"], "'nosuch'", None),
        (["reprot"], "'reprot'", "report"),
        (["report", "--jsn"], "--jsn", "--json"),
        (["agent", "--colour"], "--colour", None),
        (["whatif", "--scale", "2"], "--scale", None),
        (["run", "--nccl-debug", "inf", "--", "true"], "'inf'", "info"),
    ):
        done = commwatch(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        last = done.stderr.splitlines()[-1]
        assert named in last
        assert (f"; did you mean {meant}?" in last) if meant else ("did you mean" not in last)
        assert "Traceback" not in done.stderr


def test_no_command() -> None:
    """Without a command, it prints the list of commands."""
    assert commwatch().stdout == commwatch("--help").stdout != ""


def test_names_of_jobs_are_completed(tmp_path: Path) -> None:
    """In bash, commands that take a job complete its name, by the history of the node, and ``latest``."""
    watch = Watch(tmp_path)
    for name in ("train_ddp-1", "train_fsdp-2", "two words"):
        end_rank(write_ring(watch.rings, [], [group_entry()], job=name, world_size=1))
    watch.tick()
    watch.store.close()
    for file in tmp_path.glob("h.sqlite*"):
        file.rename(tmp_path / file.name.replace("h.sqlite", f"history-{socket.gethostname()}.sqlite"))
    names = commwatch("jobs", "--state", tmp_path, "--names").stdout.split("\n")
    script = f"""commwatch() {{ [ "$*" = "jobs --names" ] && printf '%s\n' {" ".join(map(shlex.quote, names))}; }}
        eval {shlex.quote(commwatch("completion", "bash").stdout)}
        for words in 'report train_f' 'compare train_ddp-1 l' 'export train'; do
            COMP_WORDS=(commwatch $words) COMP_CWORD=$(set -- $words; echo $#) COMPREPLY=()
            _shtab_commwatch && echo "${{COMPREPLY[@]}}"
        done"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    found = [sorted(line.split()) for line in done.stdout.splitlines()]
    assert found == [["train_fsdp-2"], ["latest"], ["train_ddp-1", "train_fsdp-2"]]


def test_completion() -> None:
    """The completion of bash knows commands and flags."""
    script = commwatch("completion", "bash").stdout
    program = (
        'COMP_WORDS=(commwatch {}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_commwatch; echo "${{COMPREPLY[@]}}"'
    )
    for typed, expected in (("rep", "report"), ("report --js", "--json"), ("run --nccl-debug i", "info")):
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{program.format(typed)}"], capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == [expected], done.stderr


def test_interrupted() -> None:
    """Ctrl-C ends a command that waits with exit code 130, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "commwatch", "diagnose", f"127.0.0.1:{server.getsockname()[1]}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_env()
        )
        connection, _ = server.accept()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, said) == (130, "")


def test_version_and_help() -> None:
    """--version and --help answer on standard output."""
    assert commwatch("--version").stdout.startswith("commwatch ")
    for command in ("run", "agent", "report"):
        done = commwatch(command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert all(flag in done.stdout for flag in ("--dir", "--state", "--config"))
        assert ("--port" in done.stdout) == (command != "report")  # which starts no agent


def test_run_without_a_job() -> None:
    """`run` without a job says how it is meant."""
    assert "commwatch run -- torchrun" in one_line(commwatch("run"))
    assert "commwatch run -- torchrun" in one_line(commwatch("run", "--"))


def test_run_of_no_such_command(tmp_path: Path) -> None:
    """A job's command that does not exist, or cannot be executed, is named before or instead of anything else."""
    broken = tmp_path / "broken"
    broken.write_text("no program\n")
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    for job in (broken, lost):
        job.chmod(0o700)
    for command in ("no-such-command", str(tmp_path), str(broken), str(lost)):
        done = commwatch("run", "--dir", tmp_path / "run", "--port", "0", "--", command)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert command in done.stderr.splitlines()[-1]
        assert list((tmp_path / "run").glob("run-*")) == []


def test_report_of_nothing(tmp_path: Path) -> None:
    """`report` without a history, or with one that is none, names the file."""
    said = one_line(commwatch("report", "--dir", tmp_path))
    assert str(tmp_path) in said
    assert "--state" in said
    assert "--dir" in said
    history = tmp_path / f"history-{socket.gethostname()}.sqlite"
    history.write_text("this is no database, and long enough not to be taken for an empty one" * 20)
    assert str(history) in one_line(commwatch("report", "--dir", tmp_path))
    assert str(history) in one_line(commwatch("agent", "--dir", tmp_path, "--port", "0"), code=1)
    assert history.read_text().startswith("this is no database")


def in_deleted_folder(folder: Path, *arguments: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that was deleted."""
    folder.mkdir()
    program = [sys.executable, "-m", "commwatch"] if anew else prefork.commwatch_command()
    command = ["/bin/sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(folder), *program, *arguments]
    return subprocess.run(
        command, env=clean_env(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_python_starts_in_a_deleted_folder(tmp_path: Path) -> None:
    """A new Python starts there, with the same words as a fork: for the tests that follow."""
    assert in_deleted_folder(tmp_path / "1", "--version", anew=True).stdout.startswith("commwatch ")
    done = in_deleted_folder(tmp_path / "2", "report", "--dir", "run", anew=True)
    assert "the current folder was deleted" in one_line(done)


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "--dir", "run"),
        ("config", "show", "--state", "state"),
        ("probe", "install", "probe"),
        ("dashboards", "export", "--dir", "grafana", "--format", "provisioning"),
    ],
)
def test_in_a_deleted_folder(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A path relative to a folder that was deleted ends the command with one line that gives the reason."""
    assert "the current folder was deleted" in one_line(in_deleted_folder(tmp_path / "gone", *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("config", "check"),
        ("manifest", "slurm"),
        ("agent", "--until-stdin-closes"),
        ("run", "--", "true"),
    ],
)
def test_no_folder_needed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A command that needs no folder works where the current one was deleted."""
    more = ("--dir", str(tmp_path / "run"), "--port", "0") if arguments[0] in ("agent", "run") else ()
    done = in_deleted_folder(tmp_path / "gone", *arguments[:1], *more, *arguments[1:])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


# -- the agent ----------------------------------------------------------------------------------


def test_agent_ends_cleanly(tmp_path: Path) -> None:
    """SIGTERM and SIGINT end the agent with exit code 0, in order, and the directory can be used again."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with agent(tmp_path / "run") as running:
            assert (tmp_path / "run" / "agent.json").exists()
            running.process.send_signal(number)
            assert running.process.wait(60) == 0
        assert not (tmp_path / "run" / "agent.json").exists()


def test_directory_is_private(tmp_path: Path) -> None:
    """What the agent makes is for its user alone."""
    with agent(tmp_path / "run"):
        for path in (tmp_path / "run", tmp_path / "run" / "rings"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_second_agent(tmp_path: Path) -> None:
    """A second agent on one directory is refused, with the address of the first one."""
    with agent(tmp_path / "run") as first:
        said = one_line(commwatch("agent", "--dir", tmp_path / "run", "--port", "0"), code=1)
        assert first.url in said
        assert str(tmp_path / "run") in said
        assert first.get("/healthz") == "ok\n"


def test_port_that_is_taken(tmp_path: Path) -> None:
    """A requested port that is taken is refused by number; so is a host that does not exist."""
    with taken() as port:
        said = one_line(commwatch("agent", "--dir", tmp_path, "--port", str(port)), code=1)
        assert f"127.0.0.1:{port}" in said
        assert "choose another port with --port" in said
    for host in ("192.0.2.1", "no.such.host.invalid", "a..b", "x" * 100):
        said = one_line(commwatch("agent", "--dir", tmp_path, "--port", "0", "--insecure", "--host", host), code=1)
        assert host in said
    for host in ("192.0.2.1", "no.such.host.invalid"):
        said = one_line(commwatch("agent", "--dir", tmp_path, "--insecure", "--host", host), code=1)
        assert "name an address of this machine with --host" in said
        assert "--port" not in said


def test_default_port_that_is_taken(tmp_path: Path) -> None:
    """If 9477 is taken and no port was requested, the agent takes another one and warns, also with --quiet."""
    assert DEFAULT_PORT == 9477  # another one here, which no other agent of this machine gives back meanwhile
    said = tmp_path / "said"
    with taken() as default, said.open("w") as file:
        process = prefork.Commwatch(
            *("agent", "--quiet", "--dir", str(tmp_path / "run")),
            env=clean_env(),
            streams=(0, 1, file.fileno()),
            constants={"commwatch_agent.web.listener.DEFAULT_PORT": default},
        )
        try:
            wait_for((tmp_path / "run" / "agent.json").exists, "the agent")
            about = json.loads((tmp_path / "run" / "agent.json").read_text())
            assert about["pid"] == process.pid
            port = about["url"].rpartition(":")[2]
            assert port != str(default)
            assert f" WARNING port {default} is taken, using {port}" in said.read_text()
        finally:
            process.terminate()
            process.wait(60)


def test_directory_that_is_none(tmp_path: Path) -> None:
    """A run directory that is a file or a link is refused by name: in /dev/shm a stranger may have put it there."""
    real, link, file = tmp_path / "real", tmp_path / "link", tmp_path / "file"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    file.touch()
    for path, code in ((link, 1), (file, 2), (file / "below", 2)):
        assert str(path) in one_line(commwatch("agent", "--dir", path, "--port", "0"), code=code)
    assert list(real.iterdir()) == []


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can read."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_directory_of_somebody_else(public: Path) -> None:
    """A run directory of another user is refused by name, whatever its permissions."""
    public.chmod(0o777)
    said = one_line(commwatch_as_nobody("agent", "--dir", public, "--state", "/nowhere", "--port", "0"), code=1)
    assert str(public) in said
    assert f"uid {os.getuid()}" in said
    assert list(public.iterdir()) == []


def closed(folder: Path, mode: int) -> Path:
    """Another user's folder."""
    folder.mkdir(mode=mode)
    os.chown(folder, NOBODY, NOBODY) if os.getuid() == 0 else None
    return folder


def test_directory_that_is_read_only(public: Path) -> None:
    """A run directory that cannot be written to is refused, naming it."""
    mine = closed(public / "mine", 0o500)
    said = one_line(commwatch_as_nobody("agent", "--dir", mine, "--port", "0"), code=2)
    assert f"cannot write to {mine}: permission denied" in said


@pytest.mark.long
@pytest.mark.parametrize("name", ["", "x"])
def test_history_that_is_read_only(public: Path, name: str) -> None:
    """A history that cannot be written to is refused, naming it."""
    state, run = closed(public / "mine", 0o500) / name, closed(public / "run", 0o700)
    said = one_line(commwatch_as_nobody("agent", "--dir", run, "--state", state, "--port", "0"), code=2)
    assert said.startswith(f"commwatch: state {state}: this user")
    assert said.endswith(f"cannot write to {public / 'mine'}: permission denied\n")


# -- report -------------------------------------------------------------------------------------


def _wait_for_records(running: RunningAgent, expected: int) -> None:
    wait_for(lambda: sum(rank["records"] for rank in running.get("/api/v1/ranks")) == expected, "the records")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the history of three jobs, left by an agent that has ended."""
    directory = tmp_path_factory.mktemp("report") / "run"
    with populated(directory):
        return directory


def test_report_as_text(history: Path) -> None:
    """The text names the job, its operations with their bandwidth, and how to get it again."""
    done = commwatch("report", "--dir", history, "train")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {tuple(line.split()[:2]): line for line in done.stdout.splitlines() if line.strip()}
    assert "2 GB/s" in lines["default_pg", "all_gather"]
    assert "1.5 GB/s" in lines["default_pg", "all_gather"]
    assert "1 GB/s" in lines["mesh_tp", "reduce_scatter"]
    assert f"commwatch report --dir {history} train" in done.stdout


def test_jobs_of_a_stopped_agent(history: Path) -> None:
    """`jobs` lists the jobs of a history, the latest first; `--limit` names how many more there are; JSON has the fields of the API."""
    done = commwatch("jobs", "--dir", history, "--limit", "2")
    assert (done.returncode, done.stderr) == (0, "")
    head, first, second, how, more = done.stdout.splitlines()
    assert head.split()[:2] == ["job", "state"]
    assert [line.split()[:2] for line in (first, second)] == [["eval", "ended"], ["lost", "failed"]]
    assert how.startswith("    rank 0 died (no clean end)")
    assert more == "1 earlier job is not listed; use --limit 3 to list all"
    jobs = json.loads(commwatch("jobs", "--dir", history, "--json").stdout)
    assert [job["job_id"] for job in jobs] == ["eval", "lost", "train"]
    assert (jobs[2]["steps"], jobs[2]["ranks"]) == (1, [0, 1, 2, 3])


@pytest.mark.parametrize(("name", "job"), [("tr", "train"), ("latest", "eval"), ("lost", "lost")])
def test_short_names(history: Path, name: str, job: str) -> None:
    """The beginning of a name that only one job has, and `latest`, are names, too."""
    done = commwatch("report", "--dir", history, name, "--json")
    assert json.loads(done.stdout)["job"]["job_id"] == job


def test_names_of_several_jobs(history: Path) -> None:
    """The beginning of several names is refused in one line, which lists them."""
    assert "several jobs begin with '': eval, lost, train" in one_line(commwatch("report", "--dir", history, ""))


def test_last_two_runs(history: Path, tmp_path: Path) -> None:
    """`compare` without names compares the last two runs, the earlier one first; with one name, that one with the latest."""
    found = json.loads(commwatch("compare", "--dir", history, "--json").stdout)
    jobs = [job["job_id"] for job in json.loads(commwatch("jobs", "--dir", history, "--json").stdout)]
    assert [found[side]["job"]["job_id"] for side in "ab"] == jobs[1::-1]
    found = json.loads(commwatch("compare", "--dir", history, "train", "--json").stdout)
    assert [found[side]["job"]["job_id"] for side in "ab"] == ["train", jobs[0]]
    with agent(tmp_path, "--quiet"), lost_rank(tmp_path / "rings"):
        wait_for(lambda: "lost" in commwatch("jobs", "--dir", tmp_path).stdout, "the job")
    assert "has 1 run; two are needed" in one_line(commwatch("compare", "--dir", tmp_path))


def test_jobs_without_any(tmp_path: Path) -> None:
    """`jobs` without a history names the file; a limit that is none is refused."""
    assert str(tmp_path) in one_line(commwatch("jobs", "--dir", tmp_path))
    assert "give a number above 0" in commwatch("jobs", "--limit", "0").stderr


def test_report_as_json(history: Path) -> None:
    """JSON has the numbers of the API; without a job it is the latest."""
    done = commwatch("report", "--dir", history, "--json", "train")
    report = json.loads(done.stdout)
    assert (report["job"]["job_id"], report["steps"], report["records"]) == ("train", 1, 40)
    assert (report["comm_share"], report["exposed_share"]) == (None, None), "one step is too few for a share"
    # In hours of ranks: 36 ms exposed; waits not known, for of more than one operation in ten there are no times; four ranks for as long
    # as the job was in sight.
    assert report["exposed_hours"] == pytest.approx(0.036 / 3600)
    assert report["wait_hours"] is None
    assert report["rank_hours"] == pytest.approx(4 * report["duration_s"] / 3600)
    operations = {(row["by"]["group"], row["by"]["op"]): row for row in report["operations"]}
    assert operations["default_pg", "all_gather"]["busbw"] == pytest.approx(1.5e9)
    assert {rank["wait_s"] for rank in report["ranks"]} == {None}, "as for all ranks together"
    assert json.loads(commwatch("report", "--dir", history, "--json").stdout)["job"]["job_id"] == "eval"


def test_report_after_the_agent(tmp_path: Path) -> None:
    """What was counted up to the agent's end is in the report, though the 10 s were not over and the ranks still run."""
    records = [operation(start_ns=0, end_ns=4 * MS, seq=i, size=1_000_000) for i in range(3)]
    writer = write_ring(rings_of(tmp_path), records, wall_offset_ns=time.time_ns())
    for expected in (3, 4):  # a second agent goes on in the same ten seconds
        with agent(tmp_path) as running:
            _wait_for_records(running, expected)
            assert [row["count"] for row in running.get("/api/v1/summary")["rows"]] == [expected]
        (row,) = json.loads(commwatch("report", "--dir", tmp_path, "--json").stdout)["operations"]
        assert (row["count"], row["algbw"]) == (expected, pytest.approx(2.5e8))
        writer.write(*records[0])
    end_rank(writer)


def test_report_has_all_waits(tmp_path: Path) -> None:
    """If ranks ended before the agent read their rings, all waits are known, in whatever order the rings are read."""
    for rank in range(4):  # rank 3 came 3 ms after rank 0
        made = [operation(start_ns=rank * MS, end_ns=10 * MS, seq=i, launch_ns=0) for i in range(5)]
        names = [group_entry(0, (0, 1, 2, 3))]
        writer = write_ring(rings_of(tmp_path), made, names, rank=rank, world_size=4, wall_offset_ns=time.time_ns())
        writer.close(1)
        end_rank(writer)
    with agent(tmp_path) as running:
        wait_for(lambda: [job["state"] for job in running.get("/api/v1/jobs")] == ["ended"], "the end of the job")
    report = json.loads(commwatch("report", "--dir", tmp_path, "--json").stdout)
    assert [rank["wait_s"] for rank in report["ranks"]] == pytest.approx([0.015, 0.010, 0.005, 0])


def test_report_as_html(history: Path, tmp_path: Path) -> None:
    """The HTML report is one file with plots and their numbers in tables, without references to other files; a file that cannot be written is an error."""
    page = tmp_path / "report.html"
    done = commwatch("report", "--dir", history, "--html", page, "train")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    html = page.read_text(encoding="utf-8")
    assert elsewhere(html) == []
    assert "<script" not in html
    assert all(text in html for text in ("train", "all_gather", "1.5 GB/s", "mesh_tp"))
    titles = re.findall(r'role="img".*?<title[^>]*>(.*?)</title>', html)
    assert {
        "Communication share over time",
        "Bus bandwidth of all_gather against size",
        "Waiting by rank and group",
    } <= set(titles)
    assert html.count("<figure>") == html.count("<summary>the numbers</summary>") == len(titles)
    assert "/no/such" in one_line(commwatch("report", "--dir", history, "--html", "/no/such/page.html", "train"))
    assert "not allowed" in commwatch("report", "--dir", history, "--html", page, "--json").stderr


def test_report_in_a_plain_locale(history: Path, tmp_path: Path) -> None:
    """A locale without Unicode (cron, a bare container) gets a report, too."""
    env = clean_env(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    done = commwatch("report", "--dir", history, "eval", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    page = tmp_path / "report.html"
    assert commwatch("report", "--dir", history, "--html", page, "train", env=env).stderr == ""
    assert '<meta charset="utf-8">' in page.read_text(encoding="utf-8")


def test_report_of_unknown_job(history: Path) -> None:
    """An unknown job is refused by name, with a list of known jobs."""
    said = one_line(commwatch("report", "--dir", history, "nosuchjob"))
    assert "'nosuchjob'" in said
    assert all(job in said for job in ("train", "eval", "lost"))


def test_report_into_a_closed_pipe(history: Path) -> None:
    """`commwatch report | head -0` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "commwatch", "report", "--dir", str(history)]
    env = clean_env(PYTHONUNBUFFERED="")  # as people have it
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, check=False)
    os.close(writer)
    assert done.stderr == ""
