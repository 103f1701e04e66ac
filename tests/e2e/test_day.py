"""A day of an operator with one agent, from its unit to its removal: what each step leaves in the log, and that no record is lost uncounted."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import ring
from commwatch_agent.history.schema import SCHEMA_VERSION
from tests.agent.deploy.test_manifest_systemd import values, written
from tests.agent.history.test_bad_disks import account, full
from tests.agent.runtime.test_sd_notify import received, supervisor
from tests.earlier import TREE, unpacked
from tests.earlier import command as earlier_command
from tests.helpers import (
    PATIENCE_S,
    Trainer,
    clean_env,
    commwatch,
    fetch,
    free_port,
    group_entry,
    identity,
    needs,
    operation,
    small_tmpfs,
    wait_for,
)
from tests.prometheus import prometheus

pytestmark = pytest.mark.long
WRONG = sorted((TREE / "tests" / "fixtures" / "config").glob("*.toml"))[:20]
FINE = operation(start_ns=0, end_ns=9)


class Day:
    """The agent of a unit, its settings, and what it has logged."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.settings, self.log, self.token = place / "commwatch.toml", place / "log", place / "token"
        self.log.touch()
        self.rotate("first-token-of-the-day")
        self.ranks: dict[str, Trainer] = {}

    def rotate(self, token: str) -> None:
        """Write a token, as an operator does: another file under the same name."""
        new = self.place / "new"
        new.write_text(token)
        new.chmod(0o600)
        new.rename(self.token)

    @contextmanager
    def unit(self, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """The command line and variables of the unit, with the folders of this test, until it has ended with exit code 0.

        Args:
            before: what runs in place of the first word of the command line.
        """
        text = written("--config", self.settings, "--group", "root", "--port", str(self.port))
        (command,) = values(text, "ExecStart")
        given = dict(word.split("=", 1) for line in values(text, "Environment") for word in shlex.split(line))
        folders = {
            "COMMWATCH_DIR": str(self.place / "run"),
            "COMMWATCH_STATE": str(self.place / "state"),
            "TMPDIR": str(self.place),
        }
        with supervisor(str(self.place / "notify")) as systemd, self.log.open("ab") as log:
            env = clean_env(**given | folders | {"NOTIFY_SOCKET": str(self.place / "notify")})
            own, *words = shlex.split(command)
            process = subprocess.Popen([*(before or (own,)), *words], cwd="/", env=env, stderr=log)
            try:
                wait_for(lambda: "READY=1" in received(systemd) or process.poll() is not None, "the agent to be ready")
                assert process.poll() is None, self.log.read_text()[-2000:]
                yield process
            finally:
                process.terminate()
                code = process.wait(PATIENCE_S)
                (self.place / "notify").unlink()
        assert code == 0

    def events(self) -> list[dict[str, Any]]:
        """The lines of the log, each of which is JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, text: str) -> int:
        """How many lines have this in their message."""
        return sum(text in each["msg"] for each in self.events())

    def set(self, process: subprocess.Popen[bytes], text: str, expected: str) -> None:
        """Change the settings; wait for the one line that this leaves."""
        before = self.said(expected)
        self.settings.write_text(text)
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: self.said(expected) == before + 1, expected)

    def status(self, token: str) -> int:
        """Of an answer to a request with a token."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def write(self, job: str, count: int = 200) -> None:
        """The rank of a job writes records, and they are in ``/metrics``."""
        before = self.counted(job)
        self.ranks[job].write([FINE] * count)
        wait_for(lambda: self.counted(job) == before + count, f"the records of {job}")

    def counted(self, job: str) -> int:
        """Records of a job in ``/metrics``, which begins at 0 with each agent."""
        page = fetch(f"http://127.0.0.1:{self.port}/metrics")[0].decode()
        found = re.search(rf'^commwatch_collectives_total{{[^}}]*job_id="{job}"[^}}]*}} (\S+)$', page, re.MULTILINE)
        return int(float(found[1])) if found else 0


def earlier(place: Path) -> tuple[str, ...]:
    """The command of the commit before this one; empty: it cannot be had, or has other formats."""
    tree = unpacked("HEAD~1", place)
    if tree is None:
        return ()
    formats = {
        f"VERSION = {ring.VERSION}": "collectors/commwatch/wire/ring.py",
        f"SCHEMA_VERSION = {SCHEMA_VERSION}": "agent/commwatch_agent/history/schema.py",
    }
    same = all(re.search(rf"^{text}$", (tree / file).read_text(), re.MULTILINE) for text, file in formats.items())
    return earlier_command(tree) if same else ()


@pytest.fixture
def day(tmp_path: Path) -> Iterator[Day]:
    """A place with a small disk for the history, and two jobs."""
    with ExitStack() as stack:
        needs(stack.enter_context(small_tmpfs(tmp_path / "state", 16 << 20)), "the right to mount")
        made = Day(tmp_path)
        now = {"wall_offset_ns": time.time_ns() - time.monotonic_ns()}
        for job in ("one", "two"):
            about = identity(job=job, world_size=2, **now, started_ns=time.monotonic_ns())
            made.ranks[job] = stack.enter_context(Trainer(tmp_path / "run" / "rings" / f"{job}.ring", about))
            made.ranks[job].call("name", [(group_entry(),)])
        yield made


def test_day(day: Day) -> None:
    """Each event of the day is one line of JSON in the log and none is missing; agents come and go with exit code 0; all records are kept."""
    hook = free_port()
    good = f'log_format = "json"\nrequire_token = true\ntoken_file = "{day.token}"\n[kinds.rank_lost]\nfor = "1s"\n'
    good += f'[[receivers]]\nkind = "webhook"\nname = "pager"\nurl = "http://127.0.0.1:{hook}/"\n'
    day.settings.write_text(good)
    check = commwatch("config", "check", "--config", day.settings)
    assert check.returncode == 0, check.stderr
    assert check.stdout.startswith("the settings are valid: ")
    with day.unit() as process:
        day.write("one")
        day.write("two")
        for file in WRONG:
            day.set(process, file.read_text(errors="surrogateescape"), "settings not changed")
        day.set(process, good + '[labels]\ncluster = "east"\n', "settings read again: applied labels")
        assert (day.status("first-token-of-the-day"), day.status("second-token-of-the-day")) == (200, 401)
        day.rotate("second-token-of-the-day")
        assert (day.status("first-token-of-the-day"), day.status("second-token-of-the-day")) == (401, 200)
        assert day.said("the token has changed") == 1
        free = full(day.place / "state")

        def refused() -> bool:
            day.write("one", 100)
            return bool(day.said("history is not being written"))

        wait_for(refused, "the full disk in the log")
        free()
        wait_for(lambda: day.said("working again after"), "the history to be written")
        with prometheus(day.place, [f"http://127.0.0.1:{day.port}"]) as scraping:
            wait_for(lambda: scraping.value("up") == 1, "a scrape")
        day.write("one")
        day.ranks["two"].kill()  # while the receiver is away
        wait_for(lambda: day.said("receiver pager: http://127.0.0.1"), "the failed delivery")
    old = earlier(day.place / "old")
    if old:  # back to the commit before, while the job runs
        with day.unit(old):
            day.write("one")
            wait_for(lambda: day.said("job one: ") == 2, "the job in the log")
    with day.unit():
        day.write("one")
        wait_for(lambda: day.said("job one: ") == 2 + bool(old), "the job in the log")
    counts = Counter(each["event"] for each in day.events() if "event" in each)
    print("\n".join(each["msg"] for each in day.events()))
    assert counts["not_reloaded"] == len(WRONG)
    assert counts["reloaded"] == 1
    assert counts["started"] == counts["stopping"] == counts["stopped"] == 2 + bool(old)
    named = Counter((each["event"], each.get("job_id")) for each in day.events() if "event" in each)
    seen = {job: named["job_began", job] + named["job_found", job] for job in ("one", "two")}
    assert seen == {"one": counts["started"], "two": 1}
    assert (named["job_ended", "two"], named["job_ended", "one"]) == (1, 0)
    assert named["incident_opened", "two"] == 1
    assert day.said("history is not being written") == 2  # when it begins, and in the line on its end
    assert day.said("working again after") == 1
    (history,) = (day.place / "state").glob("history-*.sqlite")
    assert account(history, "one") == (day.ranks["one"].written, 0)
    assert account(history, "two") == (day.ranks["two"].written, 0)
    assert not (day.place / "run" / "agent.json").exists()
    assert day.ranks["one"].process.poll() is None
