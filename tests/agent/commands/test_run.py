"""``commwatch run`` around commands that are not training jobs: the job comes first, whatever happens to the agent."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.commands import run as commands_run
from commwatch_agent.config_sources import load
from commwatch_agent.history import job_exit
from tests import prefork
from tests.agent.cli.test_cli import python, started, taken
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, elsewhere, wait_for

#: A job that leaves the ring a rank would leave, with one operation in it.
TRAINS = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.helpers import MS, end_rank, operation, write_ring
rings = Path(os.environ["COMMWATCH_DIR"]) / "rings"
made = [operation("all_gather", start_ns=MS, end_ns=2 * MS, size=3_000_000)]
ring = write_ring(rings, made, job=os.environ["COMMWATCH_JOB"], wall_offset_ns=time.time_ns())
ring.close(1)
"""
#: What it goes on with when it lets the agent find out that it has ended: fails while its series are still there.
FORGOTTEN = """
import json, urllib.request
from tests.helpers import wait_for
end_rank(ring)
url = json.loads((rings.parent / "agent.json").read_text())["url"]
ask = lambda path: urllib.request.urlopen(url + path).read().decode()
wait_for(lambda: '"ended"' in ask("/api/v1/jobs"), "the end to be seen")
wait_for(lambda: "commwatch_collectives_total{" not in ask("/metrics"), "the series to go", 20)
"""

#: What one does whose agent is killed after it took in the first operation: the second is in the ring alone.
KILLS = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from commwatch.wire.announcement import answering
from commwatch.wire.crossing import own
from tests.helpers import MS, fetch, operation, wait_for, write_ring
directory = Path(os.environ["COMMWATCH_DIR"])
made = [operation("all_gather", start_ns=MS, end_ns=2 * MS, size=3_000_000)]
ring = write_ring(directory / "rings", made, job=os.environ["COMMWATCH_JOB"], wall_offset_ns=time.time_ns())
agent = answering(directory, own())
wait_for(lambda: b"all_gather" in fetch(agent.url + "/api/v1/ops")[0], "the first to be stored")
os.kill(agent.pid, signal.SIGKILL)
wait_for(lambda: answering(directory, own()) is None, "the agent to be gone")
ring.write(*operation("broadcast", start_ns=3 * MS, end_ns=4 * MS, seq=1))
ring.close(1)
"""


def run(
    directory: Path, *job: str, flags: tuple[str, ...] = ("--port", "0"), **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """``commwatch run`` to its end."""
    return commwatch("run", "--dir", directory, *flags, "--", *job, **kwargs)


def scripted(place: Path, code: str, *arguments: str) -> list[str]:
    """A command that runs code which needs our modules."""
    script = place / f"job{len(list(place.glob('job*.py')))}.py"
    script.write_text(code)
    return prefork.small_command(script, *arguments)


def left(directory: Path) -> list[str]:
    """What is left in a run directory, apart from what is kept: the history, and the place of the alerts."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(("history-", "alerts-")))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        ("import os, signal; signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)", 128 + 15),
    ],
)
def test_exit_code_is_the_jobs(tmp_path: Path, code: str, expected: int) -> None:
    """The exit code is the job's, 128 + n if signal n ended it; the history stays, the private run directory does not."""
    done = run(tmp_path / "run", *python(code))
    assert done.returncode == expected, done.stderr
    assert done.stdout == ""
    # The last two were killed before they could import it.
    assert (
        "the probe was not loaded in any process of the job: none came to the end of its `import torch`" in done.stderr
    )
    assert left(tmp_path / "run") == []
    assert len(list((tmp_path / "run").glob("history-*.sqlite"))) == 1


def test_streams_are_the_jobs(tmp_path: Path) -> None:
    """Standard input and output belong to the job, byte for byte; what we say goes to standard error."""
    sent = bytes(range(256)) * 1000
    command = [*prefork.commwatch_command(), "run", "--dir", str(tmp_path / "run"), "--port", "0", "--", "cat"]
    done = subprocess.run(command, input=sent, capture_output=True, env=clean_env(), timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout == sent) == (0, True)


def test_job_knows_where_to_record(tmp_path: Path) -> None:
    """The job has the probe switched on, an absolute run directory of its own, and its name; the rest is unchanged."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    env = clean_env(KEPT="yes")
    seen = json.loads(run(Path("here"), *python(show), cwd=tmp_path, env=env).stdout)
    assert (seen["COMMWATCH"], seen["KEPT"]) == ("1", "yes")
    assert Path(seen["COMMWATCH_DIR"]).parent == tmp_path / "here"
    assert seen["COMMWATCH_JOB"]
    named = json.loads(run(tmp_path / "run", *python(show), env={**env, "SLURM_JOB_ID": "4711"}).stdout)
    assert named["COMMWATCH_JOB"] == "4711"


def test_report_at_the_end(tmp_path: Path) -> None:
    """At the end the report of the job is printed, with the command that shows it again."""
    done = run(tmp_path / "run", *scripted(tmp_path, TRAINS), env=clean_env(COMMWATCH_JOB="it's <one> job"))
    assert done.returncode == 0
    assert "all_gather" in done.stderr
    assert "1.5 GB/s" in done.stderr  # 3 MB in 1 ms, 1/2 of it over the link
    again = shlex.split(next(line for line in done.stderr.splitlines() if line.split()[:1] == ["again"]))
    assert again[-1] == "it's <one> job"
    assert again[1:3] == ["commwatch", "report"]
    shown = commwatch(*again[2:])
    assert (shown.returncode, "1.5 GB/s" in shown.stdout) == (0, True)
    page = tmp_path / "page.html"
    assert commwatch(*again[2:], "--html", page).returncode == 0
    assert elsewhere(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("columns", "in_one"), [("200", True), ("60", False)])
def test_report_as_wide_as_the_terminal(tmp_path: Path, columns: str, in_one: bool) -> None:
    """The report at the end is as wide as the terminal, as that of ``commwatch report``."""
    done = run(tmp_path / "run", *scripted(tmp_path, TRAINS), env=clean_env(COLUMNS=columns))
    (head, *_) = (line for line in done.stderr.splitlines() if line.split()[:2] == ["group", "op"])
    assert ("algbw" in head) == in_one
    wider = [
        line for line in done.stderr.splitlines() if len(line) > 60 and "/" not in line and "commwatch" not in line
    ]
    assert bool(wider) == in_one, wider


@pytest.mark.parametrize(
    ("backends", "shown"), [(["gloo"], False), (["gloo", "nccl"], True), (["gloo", None], True), (["ucc"], False)]
)
def test_why_there_are_no_nccl_logs(tmp_path: Path, backends: list[str | None], shown: bool) -> None:
    """Why NCCL's logs are not read matters only to a job that used NCCL, or may have: one with Gloo alone has no line on it."""
    groups = ", ".join(f"group_entry({at}, backend={each!r})" for at, each in enumerate(backends))
    job = TRAINS.replace("end_rank, operation", "end_rank, group_entry, operation").replace(
        "made, job", f"made, [{groups}], job"
    )
    env = clean_env(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/dev/stderr")
    done = run(tmp_path / "run", *scripted(tmp_path, job), env=env)
    assert "all_gather" in done.stderr
    assert ("commwatch: no NCCL logs: NCCL_DEBUG_FILE=/dev/stderr stays as it is" in done.stderr) == shown
    assert ("NCCL" in done.stderr) == shown


#: A job that signals do not end.
IGNORES = """
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def test_signal_while_the_job_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes while the job is being started reaches the job, which may run already."""
    start = subprocess.Popen

    def slowly(*args: Any, **kwargs: Any) -> Any:
        child = start(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", slowly)
    told: list[int] = []
    with commands_run.Signals() as signals:
        signals.stopped = lambda stop: told.append(stop.number)
        child = signals.start(["sleep", "600"], dict(os.environ))
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
    assert told == [signal.SIGTERM]


def test_first_signal_that_asks_to_end() -> None:
    """What asked the job to end first is noted with its time, once; a signal that asks for something else is not."""
    told: list[job_exit.Stop] = []
    with commands_run.Signals() as signals:
        signals.stopped = told.append
        child = signals.start([sys.executable, "-c", IGNORES], dict(os.environ), stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        began = time.time()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        child.kill()
        child.wait(PATIENCE_S)
        child.stdout.close()
    assert [stop.number for stop in told] == [signal.SIGTERM]
    assert began <= told[0].at <= time.time()
    assert signals.stop == told[0]


def test_flags_of_the_agent(tmp_path: Path) -> None:
    """The agent has the files that requests to other agents need."""
    files = {"token_file": tmp_path / "token", "ca_file": tmp_path / "ca.pem", "client_cert": tmp_path / "cert.pem"}
    flags = commands_run._flags(tmp_path, load({"HOME": str(tmp_path)}, **files), None)
    assert {flag: flags[flags.index(flag) + 1] for flag in ("--token-file", "--ca-file", "--client-cert")} == {
        f"--{name.replace('_', '-')}": str(path) for name, path in files.items()
    }


def test_agent_that_was_killed(tmp_path: Path) -> None:
    """If the agent is killed under the job, the signal and the time are printed, and the report also covers what came after it."""
    done = run(tmp_path / "run", *scripted(tmp_path, KILLS + "raise SystemExit(3)"))
    assert done.returncode == 3, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "the agent was ended" in line]
    assert re.match(
        r"commwatch: the agent was ended by SIGKILL at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+; it is started again ", told
    )
    assert ("all_gather" in done.stderr, "broadcast" in done.stderr) == (True, True), done.stderr
    assert left(tmp_path / "run") == []


def test_agent_that_cannot_come_back(tmp_path: Path) -> None:
    """If a killed agent does not start again, its exit code is printed, and what the report covers."""
    prevents = "(directory / 'agent.lock').unlink()\n(directory / 'agent.lock').mkdir()\n"
    done = run(tmp_path / "run", *scripted(tmp_path, KILLS + prevents))
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stderr.splitlines() if "commwatch: the agent " in line]
    assert "was ended by SIGKILL at " in first
    assert re.search(r"the agent ended with exit code 1 at .*; the report covers what it had read by then$", second)
    assert ("all_gather" in done.stderr, "broadcast" in done.stderr) == (True, False), done.stderr
    assert left(tmp_path / "run") == []


def test_agent_that_is_there_already(tmp_path: Path) -> None:
    """Where an agent watches the directory, the job records to it, and the report comes out of its history."""
    with agent(tmp_path / "run", "--state", str(tmp_path / "elsewhere")) as watching:
        done = run(tmp_path / "run", *scripted(tmp_path, TRAINS))
        assert done.returncode == 0
        assert "1.5 GB/s" in done.stderr
        assert [job["state"] for job in watching.get("/api/v1/jobs")] == ["ended"]
        assert watching.process.poll() is None


def test_signals_reach_the_job(tmp_path: Path) -> None:
    """SIGTERM, SIGUSR1 and the like are passed on to the job, which ends as it likes."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('saving', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    said = tmp_path / "said"
    with started(
        "run", "--dir", tmp_path / "run", "--port", "0", "--", *python(code), said=said, anew=False
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 7, said.read_text()
    assert left(tmp_path / "run") == []


#: Types Ctrl-C and Ctrl-\ once the job is ready; the job counts them, until SIGTERM, which comes once, too.
COUNTS = """
import collections, os, signal, sys, time
from pathlib import Path
counted = collections.Counter()
def count(number, _):
    counted[signal.Signals(number).name] += 1
    Path({counted!r}).write_text(repr(sorted(counted.items())))
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, count)
Path({ready!r}).touch()
while not counted["SIGTERM"]: time.sleep(0.01)
"""


@pytest.mark.parametrize("stdin", ["terminal", "/dev/null"])
def test_keyboard_reaches_the_job_once(tmp_path: Path, stdin: str) -> None:
    """Ctrl-C and Ctrl-\\ reach the job from the terminal directly: they are not forwarded again, whatever standard input is."""
    counted, ready = tmp_path / "counted", tmp_path / "ready"
    job = python(COUNTS.format(counted=str(counted), ready=str(ready)))
    command = ["run", "--dir", str(tmp_path / "run"), "--port", "0", "--", *job]
    terminal, theirs = pty.openpty()
    first = theirs if stdin == "terminal" else os.open(stdin, os.O_RDONLY)
    run = prefork.Commwatch(*command, env=clean_env(TERM="dumb"), streams=(first, theirs, theirs), in_session=True)
    for descriptor in {first, theirs}:
        os.close(descriptor)
    try:
        wait_for(ready.exists, "the job")
        for key, expected in ((b"\x03", [("SIGINT", 1)]), (b"\x1c", [("SIGINT", 1), ("SIGQUIT", 1)])):
            os.write(terminal, key)
            wait_for(lambda: counted.exists() and counted.read_text() == repr(expected), f"{expected}")  # noqa: B023
        run.terminate()
        while _read(terminal):
            pass
        assert run.wait(PATIENCE_S) == 0
        assert counted.read_text() == repr([("SIGINT", 1), ("SIGQUIT", 1), ("SIGTERM", 1)])
    finally:
        run.kill()
        os.close(terminal)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # its last process has gone
        return b""


def test_descriptors_reach_the_job(tmp_path: Path) -> None:
    """Descriptors that the caller passes on, as a shell does for ``<(...)``, are the job's; none of ours are."""
    listing = "import os; print([n for n in range(64) if os.path.exists(f'/proc/self/fd/{n}')], os.read(7, 9))"
    plain, ours = tmp_path / "plain", [sys.executable, "-m", "commwatch", "run", "--dir", str(tmp_path / "run")]
    plain.write_text("passed on")
    seen = []
    for command in (python(listing), [*ours, "--port", "0", "--", *python(listing)]):
        shell = ["/bin/sh", "-c", 'exec 7<"$0"; exec "$@"', str(plain), *command]
        done = subprocess.run(shell, capture_output=True, text=True, env=clean_env(), timeout=PATIENCE_S, check=False)
        seen.append((done.returncode, done.stdout))
    assert seen == [(0, "[0, 1, 2, 7] b'passed on'\n")] * 2


def test_nohup(tmp_path: Path) -> None:
    """What the caller ignores stays ignored in the job: under nohup it survives the terminal."""
    job = python(
        "import os, signal; os.kill(os.getppid(), 1); os.kill(os.getpid(), 1); print(signal.getsignal(1).name)"
    )
    command = [
        "nohup",
        sys.executable,
        "-m",
        "commwatch",
        "run",
        "--dir",
        str(tmp_path / "run"),
        "--port",
        "0",
        "--",
        *job,
    ]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, **streams, text=True, env=clean_env(), timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "SIG_IGN\n"), done.stderr


def test_signal_before_the_job_began(tmp_path: Path) -> None:
    """SIGTERM while the agent is still starting ends all: no agent and no private directory stay behind."""
    said, ran = tmp_path / "said", tmp_path / "ran"
    job = python(f"open({str(ran)!r}, 'w')")
    with started("run", "--dir", tmp_path / "run", "--port", "0", "--", *job, said=said) as process:
        private = wait_for(lambda: list((tmp_path / "run").glob("run-*")), "the agent to begin")[0]
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        try:
            assert code == 128 + signal.SIGTERM or ran.exists(), said.read_text()
            assert not private.exists()
        finally:  # whatever stayed behind shall not outlive the test
            if private.exists():
                wait_for((private / "agent.json").exists, "the agent that was left")
                os.kill(json.loads((private / "agent.json").read_text())["pid"], signal.SIGTERM)


def test_mark_of_a_job_that_never_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the job does not begin, nothing of it stays in the run directory of an agent that watches others."""
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    lost.chmod(0o700)
    with agent(tmp_path / "run"):
        done = run(tmp_path / "run", str(lost))
        assert (done.returncode, "cannot run" in done.stderr) == (2, True), done.stderr
        assert list((tmp_path / "run" / "probes").iterdir()) == []

        def stopped(*_: object) -> None:
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(commands_run, "_follow_nccl", stopped)
        config, env = load({"HOME": str(tmp_path)}, dir=str(tmp_path / "run")), clean_env()
        code = commands_run.run(config, None, ["true"], env, report_command="", nccl_level="warn")
        assert code == 128 + signal.SIGTERM
        assert list((tmp_path / "run" / "probes").iterdir()) == []


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Two runs in one directory do not disturb each other: own agents, own jobs, one history."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "mine, other = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "mine.write_text(os.environ.get('COMMWATCH_DIR', 'none'))\n"
        "while not other.exists(): time.sleep(0.01)\n" + TRAINS + "sys.exit(int(sys.argv[3]))"
    )
    a, b = tmp_path / "a", tmp_path / "b"
    flags = ("run", "--dir", tmp_path / "run", "--port", "0", "--")
    with (
        started(*flags, *scripted(tmp_path, code, str(a), str(b), "4"), said=tmp_path / "said a", anew=False) as one,
        started(*flags, *scripted(tmp_path, code, str(b), str(a), "5"), said=tmp_path / "said b", anew=False) as two,
    ):
        codes = one.wait(PATIENCE_S), two.wait(PATIENCE_S)
    said = (tmp_path / "said a").read_text() + (tmp_path / "said b").read_text()
    assert codes == (4, 5), said
    assert a.read_text() != b.read_text()
    assert left(tmp_path / "run") == []
    assert said.count("1.5 GB/s") == 2
    assert len(commwatch("report", "--dir", tmp_path / "run", "nosuchjob").stderr.split(";")[1].split(",")) == 2


def test_settings_reach_the_agent(tmp_path: Path) -> None:
    """The agent of a run heeds the settings file of the run."""
    settings = tmp_path / "my.toml"
    settings.write_text("keep_ended = 0\n")
    done = run(
        tmp_path / "run", *scripted(tmp_path, TRAINS + FORGOTTEN), flags=("--port", "0", "--config", str(settings))
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("trouble", ["port", "directory", "file"])
def test_job_runs_without_an_agent(tmp_path: Path, trouble: str) -> None:
    """If no agent can be started, this is printed with the reason, and the job runs all the same."""
    (tmp_path / "file").touch()
    with taken() as port:
        flags = ("--port", str(port)) if trouble == "port" else ("--port", "0")
        directory = {"port": tmp_path / "run", "directory": Path("/proc/run"), "file": tmp_path / "file"}[trouble]
        done = run(
            directory, *python("import os; print(os.environ.get('COMMWATCH')); raise SystemExit(3)"), flags=flags
        )
    assert (done.returncode, done.stdout) == (3, "None\n")
    why = {"port": r", because the agent ended with exit code \d", "directory": ": .+", "file": ": .+"}[trouble]
    assert re.search(f"the job runs without an agent{why}", done.stderr)
    assert "Traceback" not in done.stderr


def test_the_job_does_not_wait_long_for_the_agent(tmp_path: Path) -> None:
    """A job begins without an agent that takes long to start, and is in the report, which the agent makes once it is ready."""
    impatient = "from commwatch_agent.commands import run; from commwatch_agent.cli import main; run._START_S = 0.0; raise SystemExit(main())"
    command = [sys.executable, "-c", impatient, "run", "--dir", str(tmp_path / "run"), "--port", "0", "--"]
    done = subprocess.run(
        [*command, *scripted(tmp_path, TRAINS)],
        capture_output=True, text=True, env=clean_env(), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the agent is not ready after 0 s: the job begins, and the agent reads its records later" in done.stderr
    assert "1.5 GB/s" in done.stderr
    assert left(tmp_path / "run") == []


def test_address_of_an_agent_that_is_late(tmp_path: Path) -> None:
    """The address of an agent that was not ready when the job began is printed beside the running job, once it is."""
    impatient = "from commwatch_agent.commands import run; from commwatch_agent.cli import main; run._START_S = 0.0; raise SystemExit(main())"
    command = [sys.executable, "-c", impatient, "run", "--dir", str(tmp_path / "run"), "--port", "0", "--"]
    with subprocess.Popen(
        [*command, *python("import sys; sys.stdin.read()")],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env(),
    ) as job:  # fmt: skip
        assert job.stdin is not None
        assert job.stderr is not None
        assert any("commwatch: watching at http://127.0.0.1:" in line for line in job.stderr)
        job.stdin.close()
        job.stderr.read()
    assert job.returncode == 0


def test_script_without_its_interpreter(tmp_path: Path) -> None:
    """A script in place of a command is an error that has the right command."""
    (tmp_path / "train.py").touch()
    done = run(tmp_path / "run", str(tmp_path / "train.py"))
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"no such command: {tmp_path}/train.py; a script needs its interpreter: commwatch run -- python {tmp_path}/train.py\n"
    )


@pytest.mark.parametrize("where", ["closed pipe", pytest.param("full disk", marks=pytest.mark.long)])
def test_job_runs_though_we_cannot_speak(tmp_path: Path, where: str) -> None:
    """A standard error that takes nothing costs neither the job nor its exit code."""
    if where == "full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    ran = tmp_path / "ran"
    command = [sys.executable, "-m", "commwatch", "run", "--dir", str(tmp_path / "run"), "--port", "0", "--"]
    job = python(f"open({str(ran)!r}, 'w'); raise SystemExit(3)")
    done = subprocess.run(
        [*command, *job], stderr=stderr, env=clean_env(PYTHONUNBUFFERED=""), timeout=PATIENCE_S, check=False
    )
    os.close(stderr)
    assert (done.returncode, ran.exists()) == (3, True)
    assert left(tmp_path / "run") == []


def test_modules_of_the_job_are_not_ours(tmp_path: Path) -> None:
    """A module of the job's that is called like one we import does not reach the agent."""
    (tmp_path / "statistics.py").write_text("raise RuntimeError('this is the job\\'s own module')\n")
    script = str(Path(sys.executable).with_name("commwatch"))
    command = [script, "run", "--dir", str(tmp_path / "run"), "--port", "0", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=clean_env(), check=False)
    assert done.returncode == 0
    assert "watching at http://127.0.0.1:" in done.stderr
    assert "RuntimeError" not in done.stderr
