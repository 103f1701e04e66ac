"""Names chosen by other users, in all output of the command line: none controls the terminal, none looks like a line of ours."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from commwatch_agent.cli import command_line
from tests.helpers import (
    MS,
    RunningAgent,
    Trainer,
    agent,
    clean_env,
    commwatch,
    group_entry,
    identity,
    mark,
    operation,
    wait_for,
)
from tests.terminal import terminal

#: Title, colours, C1, directions, line ends, no width, a bell, a cursor that goes up, a tab, a carriage return.
EVIL = "evil\x1b]0;PWN\x07\x1b[31m\x9b31m\x9d0;PWN\x9c\u202e\u2066\u200b\ufeff\u2028\u2029\r\t\x08\x7f\x1b[1A\nFORGED healthy"
#: What may not reach a terminal, in the bytes of UTF-8. The rest of a long line is indented by four columns: that is no line of its own.
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]|^[ \t]{0,3}FORGED",
    re.MULTILINE,
)
UNKNOWN_OP, S = 40, 1000 * MS


def harmless(*written: str) -> None:
    """Fail if a terminal would do anything but show it, or a line of it was made up by a name."""
    for text in written:
        found = HARMFUL.search(text)
        assert found is None, ascii(text[max(0, found.start() - 200) : found.end() + 50])


@dataclass
class Scene:
    """An agent that watches a job in which nearly everything has an evil name."""

    agent: RunningAgent
    run: Path
    log: Path
    #: A file of NCCL's output, and a dump of the Flight Recorder, that are evil as well.
    nccl: Path
    dump: Path


def _names(rank: int, nccl: Path) -> list[dict[str, object]]:
    return [
        group_entry(0, (0, 1), EVIL, group_id=EVIL, name=EVIL, backend=EVIL),
        group_entry(1, (0, 1), f"dp {EVIL}", group_id="second"),
        {"dtype": 1, "name": EVIL},
        {"op": UNKNOWN_OP, "name": EVIL},
        *([{"nccl_log": str(nccl)}] if rank == 0 else []),
    ]


def _records(rank: int, since_ns: int) -> list[tuple[int, ...]]:
    made = [mark(0, since_ns)]
    for n in range(40):
        at = since_ns + n * 100 * MS
        odd = operation(start_ns=at + 75 * MS, end_ns=at + 76 * MS, seq=n, group=1)
        made += [
            operation(start_ns=at + (1 + rank) * MS, end_ns=at + 60 * MS, seq=n, size=1 << 20, dtype=1),
            (UNKNOWN_OP, *odd[1:]),
            mark(n + 1, at + 99 * MS, exposed_ns=50 * MS),
        ]
    return made


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All of it; the job hangs: rank 1 has not come."""
    tmp = tmp_path_factory.mktemp("names")
    run, log = tmp / "run", tmp / "agent.log"
    folder = tmp / "logs"
    folder.mkdir()
    nccl, dump = folder / f"nccl {EVIL.replace('/', '')}.log", folder / f"0{EVIL}"
    host = EVIL.replace(" ", "").replace("\n", "")
    nccl.write_text(
        f"{host}:77:78 [0] NCCL INFO NCCL_IB_HCA set by environment to {EVIL}\n"
        f"{host}:77:78 [0] net.cc:1 NCCL WARN Call to connect to {EVIL} failed : Connection refused\n",
        encoding="utf-8",
    )
    dump.write_text(json.dumps({"version": EVIL, "entries": [], "pg_config": {}, "rank": 0}), encoding="utf-8")
    log.touch()
    (run / "rings").mkdir(parents=True, mode=0o700)
    run.chmod(0o700)
    (run / "rings" / f"{EVIL}.ring").write_bytes(b"no ring")
    now = time.monotonic_ns()
    since = now - 120 * S
    with ExitStack() as stack:
        for rank in range(2):
            who = identity(EVIL, rank, wall_offset_ns=time.time_ns() - now, started_ns=since, host=EVIL, hook=EVIL)
            trainer = stack.enter_context(Trainer(run / "rings" / f"{rank}.ring", who))
            trainer.call("name", [(entry,) for entry in _names(rank, nccl)])
            trainer.write(_records(rank, since))
            if rank == 0:
                late = operation(start_ns=0, end_ns=0, seq=40, launch_ns=now - 100 * S, size=77)
                trainer.call("begin", [late])
        redirect = ("sh", "-c", 'exec "$@" 2>>"$0"', str(log))
        running = stack.enter_context(agent(run, "--state", str(tmp / "state"), there=redirect, env=clean_env()))
        wait_for(lambda: [job["job_id"] for job in running.get("/api/v1/jobs")] == [EVIL], "the job")
        wait_for(lambda: running.get("/api/v1/verdicts"), "a verdict")
        wait_for(lambda: running.get("/api/v1/nccl/messages"), "NCCL's message")
        yield Scene(running, run, log, nccl, dump)


#: By command: flags, and whether the name of the job or a file has to be seen in what it writes. ``{…}``: of the scene.
COMMANDS: dict[str, list[tuple[list[str], bool]]] = {
    "run": [(["--", "{EVIL}"], True), (["--nccl-debug", "{EVIL}", "--", "true"], True)],
    "agent": [(["--config", "{EVIL}"], True), (["--dir", "/proc/{EVIL}"], True)],
    "report": [([], True), (["{EVIL}"], True), (["no {EVIL}"], True), (["--json"], False), (["--html", "/proc/{EVIL}"], True)],
    "jobs": [([], True), (["--json"], False), (["--limit", "{EVIL}"], True)],
    "compare": [
        (["{EVIL}", "{EVIL}"], True), (["--json", "{EVIL}", "{EVIL}"], False), (["{EVIL}", "no {EVIL}"], True),
        (["--html", "/proc/{EVIL}", "{EVIL}", "{EVIL}"], True), (["--fail-if", "{EVIL}", "{EVIL}", "{EVIL}"], True),
        (["--fail-if", "step_p50 > +5%", "{EVIL}", "{EVIL}"], True), (["--state-b", "{EVIL}", "{EVIL}", "{EVIL}"], True),
    ],
    "timeline": [
        (["--out", "/proc/{EVIL}", "{EVIL}"], True), (["--out", "trace.json", "no {EVIL}"], True), (["--last", "{EVIL}", "--out", "a"], True),
        (["--out", "{EVIL}"], True),
    ],
    "whatif": [([], True), (["no {EVIL}"], True), (["--json"], False), (["--link", "{EVIL}"], True), (["--group", "{EVIL}"], True)],
    "export": [
        (["--out", "/proc/{EVIL}"], True), (["no {EVIL}", "--out", "tables"], True), (["--out", "{EVIL}"], True), (["--format", "{EVIL}"], True),
    ],
    "completion": [(["{EVIL}"], True)],
    "explain": [(["{nccl}"], True), (["no {EVIL}"], True), (["--json", "{nccl}"], False)],
    "doctor": [([], True), (["--json"], False), (["--gpu-proof", "/proc/{EVIL}"], True)],
    "diagnose": [
        ([], True), (["--json"], False), (["{EVIL}:1"], True), (["--job", "{EVIL}"], True),
        (["--flight-recorder", "{dump}"], True), (["{dump}"], True),
    ],
    "bench": [(["--list"], False), (["--import", "{dump}"], True), (["--import", "no {EVIL}"], True), (["--", "{EVIL}"], True)],
    "query": [
        (["jobs"], True), (["groups"], True), (["ops"], True), (["summary?by=op,group"], True), (["verdicts"], True), (["topology"], True),
        (["nccl/messages"], True), (["advice"], True), (["ranks"], True), (["jobs", "{EVIL}"], True), (["ranks?job={EVIL}x"], True),
        (["--json", "jobs"], False),
    ],
    "profile": [(["no {EVIL}"], True), (["--ranks", "{EVIL}"], True)],
    "alerts export": [([], False), (["--output", "/proc/{EVIL}"], True), (["--format", "k8s", "--label", "{EVIL}"], True)],
    "alerts check": [([], False), (["{dump}"], True), (["no {EVIL}"], True)],
    "alerts test": [(["--receiver", "{EVIL}"], False)],
    "top": [(["--once"], True), (["--json"], False), (["--once", "--job", "no {EVIL}"], False), (["--address", "{EVIL}", "--once"], True)],
    "config show": [(["--state", "{EVIL}"], True), (["--json"], False), (["--config", "{EVIL}"], True)],
    "config check": [(["--config", "{EVIL}"], True)],
    "probe install": [(["/proc/{EVIL}"], True)],
    "manifest k8s": [(["--only", "{EVIL}"], True)],
    "manifest slurm": [(["{EVIL}"], True)],
    "manifest prometheus": [(["{EVIL}:1"], True), (["--only", "{EVIL}"], True)],
    "manifest systemd": [(["--user", "{EVIL}"], True)],
    "dashboards export": [(["--dir", "/proc/{EVIL}"], True)],
    "native": [(["{EVIL}"], True), (["status", "--python", "{EVIL}"], True)],
}  # fmt: skip


def _leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands, those of commands among them."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for action in inner:
        for verb, below in action.choices.items():
            yield from _leaves(below, f"{name} {verb}".strip())


def test_every_command_is_here() -> None:
    """Each command of the command line is in the table of this test."""
    assert set(COMMANDS) == {name for name, _ in _leaves(command_line._parser())}


#: Of each command one case in every run; the others are among the long tests.
CASES = [
    pytest.param(name, flags, seen, id=f"{name} {' '.join(flags)[:20]}", marks=[pytest.mark.long] if number else [])
    for name, cases in COMMANDS.items()
    for number, (flags, seen) in enumerate(cases)
]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line here, in an empty folder, and gives what it has written on both streams."""
    monkeypatch.chdir(tmp_path)
    for variable in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(variable)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with suppress(SystemExit):
            command_line.main(list(arguments))
        gc.enable()
        return "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(("name", "flags", "seen"), CASES)
def test_commands(
    scene: Scene, tmp_path: Path, call: Callable[..., str], name: str, flags: list[str], seen: bool
) -> None:
    """What a command writes about an evil job, evil files and evil arguments is harmless; JSON keeps the name as it is."""
    places = {"EVIL": EVIL, "nccl": str(scene.nccl), "dump": str(scene.dump)}
    filled = [flag.format(**places) for flag in flags]
    own = {"--dir": str(scene.run), "--state": str(scene.log.parent / "state")}
    known = {
        option for action in dict(_leaves(command_line._parser()))[name]._actions for option in action.option_strings
    }
    if name in ("manifest k8s", "manifest systemd"):  # their agents have folders of their own
        known -= own.keys()
    given = [word for flag, value in own.items() if flag in known and flag not in flags for word in (flag, value)]
    if name in ("run", "agent", "native"):  # what has processes and signals has a process of its own
        done = commwatch(name, *(() if name == "native" else ("--dir", tmp_path / "run")), *filled)
        written = done.stdout + done.stderr
    else:
        written = call(*name.split(), *given, *filled)
    harmless(written)
    assert "Traceback" not in written
    assert not seen or "evil" in written
    if "--json" in flags and name in ("report", "query", "top", "jobs", "compare"):
        assert EVIL in _texts(json.loads(written))


def _texts(value: object) -> set[str]:
    if isinstance(value, dict):
        return {text for part in value.values() for text in _texts(part)}
    if isinstance(value, list):
        return {text for part in value for text in _texts(part)}
    return {value} if isinstance(value, str) else set()


def test_unknown_arguments(call: Callable[..., str]) -> None:
    """What argparse says of arguments is harmless: the name of a command, a flag, what is too much."""
    for arguments in ([EVIL], [f"--{EVIL}"], ["report", "a", EVIL], ["report", "--port", EVIL]):
        written = call(*arguments)
        harmless(written)
        assert "evil" in written


def test_log_of_the_agent(scene: Scene) -> None:
    """Lines of the agent's log about rings with evil names are one line each, and harmless."""
    said = wait_for(lambda: [line for line in scene.log.read_text().splitlines() if "evil" in line], "the log")
    harmless(scene.log.read_text())
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ ", line) for line in scene.log.read_text().splitlines())
    assert any("cannot read ring" in line for line in said)


def test_top_in_a_terminal(scene: Scene) -> None:
    """On a terminal nothing but escape sequences of our own is written, live or as one frame in colour."""
    for flags in ([], ["--once"]):
        with terminal("top", "--dir", str(scene.run), *flags, cells=150, lines=40) as shown:
            wait_for(lambda: "evil" in shown.written, "the job")
            if not flags:
                shown.press("q")
            assert shown.ended() == 0
        ours = re.sub(r"\x1b\[(?:[0-9;]*[mKJH]|\?[0-9]+[hl])", "", shown.written)
        harmless(ours.replace("\r", ""))


def test_report_in_a_terminal(scene: Scene) -> None:
    """On a terminal the other commands write no escape sequence at all."""
    for name in ("report", "jobs", "diagnose", "doctor"):
        with terminal(name, "--dir", str(scene.run), "--state", str(scene.log.parent / "state")) as shown:
            shown.ended()
            wait_for(lambda: "evil" in shown.written, name)
        harmless(shown.written.replace("\r", ""))
