"""``commwatch top`` in a terminal of its own, before a real agent: keys, signals, sizes, an agent that goes and comes back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch_agent.text.terminal_text import width
from tests.agent.test_config import one_line
from tests.agent.web.routes.test_jobs import populated, rings_of
from tests.helpers import (
    RunningAgent,
    agent,
    clean_env,
    commwatch,
    end_rank,
    free_port,
    group_entry,
    operation,
    wait_for,
    write_ring,
)
from tests.terminal import Terminal, terminal


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with three jobs, of which ``train`` runs; its rank 3 stands in an operation."""
    with populated(tmp_path_factory.mktemp("top") / "run") as running:
        yield running


def shows(shown: Terminal, text: str) -> None:
    """Wait until the latest frame has that text."""
    wait_for(lambda: text in shown.text(), f"{text!r} on the screen")


def test_starts_resizes_and_quits(watched: RunningAgent) -> None:
    """It takes the whole of the terminal and no more, follows its size, and q leaves all as it was found."""
    with terminal("top", "--dir", str(watched.directory)) as shown:
        shows(shown, "commwatch top: train, running, 4 of 4 ranks")
        assert len(shown.screen()) <= 24
        assert max(map(width, shown.screen())) == 80, shown.screen()
        shown.resize(200, 50)
        wait_for(lambda: max(map(width, shown.screen())) > 80, "a wider frame")
        shown.resize(40, 6)
        wait_for(lambda: len(shown.screen()) <= 6 and max(map(width, shown.screen())) <= 40, "a smaller frame")
        shown.press("xq")
        assert shown.ended() == 0
        wait_for(shown.as_found, "the terminal as it was")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_well(watched: RunningAgent, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a closed window end it as q does."""
    with terminal("top", "--address", watched.url) as shown:
        shows(shown, "train, running")
        if number == signal.SIGINT:
            shown.press("\x03")
        else:
            shown.process.send_signal(number)
        assert shown.ended() == 0
        wait_for(shown.as_found, "the terminal as it was")


def test_suspended_and_resumed(watched: RunningAgent) -> None:
    """Ctrl-Z gives the terminal back as it was, and the shell's `fg` brings the view again."""
    with terminal("top", "--address", watched.url) as shown:
        shows(shown, "train, running")
        shown.press("\x1a")
        stopped = Path(f"/proc/{shown.process.pid}/stat")
        wait_for(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T", "the program to stop")
        wait_for(shown.as_found, "the terminal as it was")
        frames = shown.written.count("\x1b[H")
        shown.process.send_signal(signal.SIGCONT)
        wait_for(lambda: shown.written.count("\x1b[H") > frames, "a new frame")
        shown.press("q")
        assert shown.ended() == 0
        wait_for(shown.as_found, "the terminal as it was")


def test_quits_while_an_agent_is_slow() -> None:
    """If no agent answers at the address, the terminal shows a message, and keys still work."""
    port = free_port()
    with terminal("top", "--address", f"127.0.0.1:{port}") as shown:
        shows(shown, f"http://127.0.0.1:{port} does not answer: ")
        shown.press("q")
        assert shown.ended() == 0


def test_agent_goes_and_comes_back(tmp_path: Path) -> None:
    """An agent that is killed is missed in plain words over its last answers; one that takes its place, on another port, is found."""
    directory = tmp_path / "run"
    made = [operation(start_ns=n, end_ns=n + 5, seq=n) for n in range(3)]
    writer = write_ring(
        rings_of(directory), made, [group_entry(0, (0,))], job="solo", world_size=1, wall_offset_ns=time.time_ns()
    )
    with terminal("top", "--dir", str(directory), "--interval", "0.2", cells=250) as shown:
        shows(shown, f"no agent watches {directory}")
        with agent(directory) as running:
            shows(shown, "commwatch top: solo, running, 1 of 1 ranks")
            first = running.url
            running.kill()
            shows(shown, f"old. no agent watches {directory}")
            assert "commwatch top: solo" in shown.text()
        with agent(directory) as running:
            assert running.url != first
            wait_for(lambda: "solo, running" in shown.text() and "OLD" not in shown.text(), "new answers")
            shown.press("q")
            assert shown.ended() == 0
    end_rank(writer)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_only_where_wanted(watched: RunningAgent, no_color: str, coloured: bool) -> None:
    """A terminal gets colours, with NO_COLOR none."""
    with terminal("top", "--address", watched.url, NO_COLOR=no_color) as shown:
        shows(shown, "train, running")
        assert ("\x1b[7m" in shown.written) == coloured
        shown.press("q")
        assert shown.ended() == 0


def test_once(watched: RunningAgent) -> None:
    """Without a terminal, one frame of the requested job as plain text, with whole lines, or as wide as COLUMNS."""
    done = commwatch("top", "--once", "--dir", watched.directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("commwatch top: train, running, 4 of 4 ranks\n")
    assert "\x1b" not in done.stdout
    assert "all_reduce 8 default_pg" in done.stdout
    narrow = commwatch("top", "--once", "--dir", watched.directory, env=clean_env(COLUMNS="50"))
    assert max(map(width, narrow.stdout.splitlines())) <= 50 < max(map(width, done.stdout.splitlines()))
    other = commwatch("top", "--once", "--address", watched.url, "--job", "eval")
    assert other.stdout.startswith("commwatch top: eval, ended at ")
    assert "other jobs run here: train (--job)" in other.stdout


def test_once_in_a_plain_locale(watched: RunningAgent) -> None:
    """A locale without Unicode gets bars and dashes of ASCII."""
    env = clean_env(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    done = commwatch("top", "--once", "--dir", watched.directory, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "?" not in done.stdout


def test_as_json(watched: RunningAgent) -> None:
    """For programs there are the agent's own answers."""
    answers = json.loads(commwatch("top", "--json", "--dir", watched.directory).stdout)
    assert answers["url"] == watched.url
    assert answers["shown"]["job"]["job_id"] == "train"
    assert [rank["rank"] for rank in answers["shown"]["ranks"]] == [0, 1, 2, 3]
    assert answers["shown"]["ranks"][3]["in_flight"][0]["op"] == "all_reduce"


def test_asked_wrongly(watched: RunningAgent, tmp_path: Path) -> None:
    """Each wrong argument causes one line with the cause and the remedy."""
    assert "use --once" in one_line(commwatch("top", "--dir", watched.directory))
    assert "--interval 0: needs 0.2 to 3600 seconds" in one_line(commwatch("top", "--once", "--interval", "0"))
    assert "start a job with commwatch run" in one_line(commwatch("top", "--once", "--dir", tmp_path))
    nosuch = one_line(commwatch("top", "--once", "--dir", watched.directory, "--job", "nosuch"))
    assert "no job 'nosuch' here yet; there are: " in nosuch
    assert "train" in nosuch
