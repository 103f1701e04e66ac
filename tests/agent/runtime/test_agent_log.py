"""The agent's log: each line has time, level and message, as text or as JSON, whatever is logged."""

from __future__ import annotations

import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch import __version__
from commwatch_agent.runtime import agent_log
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, free_port, wait_for

TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR|CRITICAL) \S")
#: Logs a line that quotes foreign text, a warning of Python, and what nothing catches in a thread and in the main thread.
SCRIPT = """
import logging, sys, threading, warnings
from pathlib import Path
from commwatch_agent.config import Config
from commwatch_agent.runtime.agent_log import about, set_up
set_up(Config(Path("run"), Path("state"), log_format=sys.argv[1], log_level=sys.argv[2]), plain=len(sys.argv) > 3)
log = logging.getLogger("commwatch")
log.info("job %s: began", "a\\n{}b\\x1b", **about("job_began", job_id="a\\n{}b\\x1b", user="", size=0))
log.debug("not at level info")
warnings.warn("old", FutureWarning)
thread = threading.Thread(target=lambda: 1 / 0, name="intake")
thread.start(); thread.join()
raise SystemError("the end")
"""


def logged(*arguments: str) -> list[str]:
    """The lines that the script leaves on standard error."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def test_text() -> None:
    """As text, a line has its time in UTC, its level and the message without control characters; a traceback keeps its lines."""
    lines = logged("text", "info")
    heads = [line for line in lines if TEXT.match(line)]
    assert [line.split(" ", 1)[1].split(":")[0] for line in heads] == [
        "INFO job a�{}b�",
        "WARNING <string>",
        "CRITICAL intake",
        "CRITICAL unexpected error",
    ]
    assert "ZeroDivisionError: division by zero" in lines
    assert lines[0] == heads[0]


def test_json() -> None:
    """As JSON, every line is an object with time, level, message and version, the fields of its event, or a traceback."""
    first, *others = map(json.loads, logged("json", "info"))
    assert TEXT.match(f"{first.pop('time')} {first['level']} x")
    assert first == {
        "level": "INFO", "msg": "job a\n{}b\x1b: began", "version": __version__, "event": "job_began", "job_id": "a\n{}b\x1b", "size": 0,
    }  # fmt: skip
    assert [(each["level"], "traceback" in each) for each in others] == [
        ("WARNING", False),
        ("CRITICAL", True),
        ("CRITICAL", True),
    ]


def test_level() -> None:
    """Only lines of the chosen level and worse are logged."""
    assert [json.loads(line)["level"] for line in logged("json", "error")] == ["CRITICAL", "CRITICAL"]
    assert "not at level info" in [json.loads(line)["msg"] for line in logged("json", "debug")]


def test_plain() -> None:
    """Among the lines of a command, those of the agent look like its own."""
    assert logged("json", "info", "plain")[0] == "commwatch: job a�{}b�: began"


@pytest.mark.parametrize("formatter", [agent_log._Text(), agent_log._Json()])
def test_goes_to_another_process(formatter: logging.Formatter) -> None:
    """The agent's process for queries gets the formatter, and logs in the same form."""
    record = logging.LogRecord("commwatch", logging.INFO, "", 0, "%s", ("x",), None)
    assert pickle.loads(pickle.dumps(formatter)).format(record) == formatter.format(record)


def test_start_and_end(tmp_path: Path) -> None:
    """An agent logs its start with version, address and places, the signal that ends it, and what it has read; nothing while it idles."""
    said = tmp_path / "said"
    with agent(tmp_path / "run", env=clean_env(COMMWATCH_LOG_FORMAT="json"), said=said) as running:
        url = running.url
    events = [json.loads(line) for line in said.read_text().splitlines()]
    assert [each["event"] for each in events] == ["started", "stopping", "stopped"]
    assert (events[0]["url"], events[0]["dir"], events[1]["signal"]) == (url, str(tmp_path / "run"), "SIGTERM")
    assert (events[2]["records"], events[2]["records_lost"]) == (0, 0)


def test_unknown_variables(tmp_path: Path) -> None:
    """Each variable that begins with ``COMMWATCH_`` and has no meaning is a warning at the start, in the words of ``config check``, also with --quiet."""
    misspelt = {"COMMWATCH_REQIRE_TOKEN": "true", "COMMWATCH_INSECUR": "0"}
    known = {"COMMWATCH_HOOK": "auto", "COMMWATCH_SERVICE_HOST": "10.0.0.1", "COMMWATCH_LABEL_TEAM": "a"}
    said = tmp_path / "said"
    with agent(tmp_path / "run", "--quiet", env=clean_env(**misspelt, **known), said=said):
        lines = said.read_text().splitlines()
    checks = [
        commwatch("config", "check", "--dir", tmp_path / "run", env=clean_env(**known, **{name: "1"}))
        for name in sorted(misspelt)
    ]
    words = [done.stderr.removeprefix("commwatch: ").rstrip() for done in checks]
    assert [line.partition(" WARNING ")[2] for line in lines] == words
    assert words == [
        "COMMWATCH_INSECUR: no such variable; did you mean COMMWATCH_INSECURE?",
        "COMMWATCH_REQIRE_TOKEN: no such variable; did you mean COMMWATCH_REQUIRE_TOKEN?",
    ]


def test_silent_while_idle(tmp_path: Path) -> None:
    """However often an idle agent looks, is scraped, and asks an agent that never answers, it logs nothing between its start and its end."""
    names = ("periodic.IDLE_S", *(f"daemon.{name}" for name in ("_INCIDENTS_S", "_PEERS_S", "_DISCOVERY_S", "_TIDY_S")))
    often: dict[str, float | str] = {
        f"commwatch_agent.{'runtime.' * name.startswith('periodic')}{name}": 0.01 for name in names
    }
    said, looks = tmp_path / "said", set[float]()
    env = clean_env(COMMWATCH_PEERS=f"127.0.0.1:{free_port()}", COMMWATCH_INTERVAL="0.01")
    with agent(tmp_path / "run", env=env, constants=often, said=said) as running:

        def looked() -> bool:
            looks.add(running.samples()["commwatch_alert_evaluation_seconds_total"])
            return len(looks) > 10

        wait_for(looked, "ten more looks")
        assert [each["state"] for each in running.get("/api/v1/peers")] == ["silent"]
    assert [line.split()[2].rstrip(":") for line in said.read_text().splitlines()] == [
        "commwatch",
        "stopping",
        "stopped",
    ]


def test_refused_start(tmp_path: Path) -> None:
    """An agent that cannot start logs the reason as JSON if its log is JSON, and else in one line as other commands do."""
    with agent(tmp_path / "run"):
        for env, pattern in (
            ({}, "commwatch: {}"),
            ({"COMMWATCH_LOG_FORMAT": "json"}, '{{"time": .*"ERROR", "msg": "{}.*}}'),
        ):
            done = commwatch("agent", "--dir", tmp_path / "run", env=clean_env(**env))
            assert done.returncode != 0
            assert re.fullmatch(pattern.format(".*an agent already watches.*") + "\n", done.stderr), done.stderr


def test_reload(tmp_path: Path) -> None:
    """The format changes when the agent reads its settings again."""
    file, said = tmp_path / "settings.toml", tmp_path / "said"
    file.write_text("")
    with agent(tmp_path / "run", "--config", str(file), said=said) as running:
        file.write_text('log_format = "json"\n')
        running.process.send_signal(1)
        wait_for(lambda: '"reloaded"' in said.read_text(), "JSON")
    lines = said.read_text().splitlines()
    assert TEXT.match(lines[0])
    assert [json.loads(line)["event"] for line in lines[1:]] == ["reloaded", "stopping", "stopped"]
