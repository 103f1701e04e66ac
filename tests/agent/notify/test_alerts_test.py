"""``commwatch alerts test``: an alert and its end through every receiver, and what came of each in one line."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import clean_env, commwatch, free_port
from tests.receivers import Server, alertmanager, status

HUSH = "hush-5e7a1c9b"


def settings(directory: Path, *tables: str) -> Path:
    """A settings file with receivers."""
    file = directory / "commwatch.toml"
    file.write_text("".join(f"[[receivers]]\n{table}\n" for table in tables))
    return file


def test_every_receiver(tmp_path: Path) -> None:
    """Each receiver gets the alert, marked as a test, and its end; one that does not take it is named with the reason, and the exit code is 1."""
    marker = tmp_path / "said"
    with (
        Server() as hook,
        Server(status(403, f"no_token {HUSH}")) as refuses,
        alertmanager(tmp_path / "am", f"http://127.0.0.1:{free_port()}") as running,
    ):
        file = settings(
            tmp_path,
            f'kind = "alertmanager"\nurls = ["{running.url}", "http://127.0.0.1:{free_port()}"]',
            f'kind = "webhook"\nurl = "{hook.url}"\nseverity = "critical"',
            'kind = "slack"\nurl_env = "OUR_SLACK"',
            f'kind = "command"\ncommand = ["sh", "-c", "cat >> {marker}"]',
        )
        env = clean_env(OUR_SLACK=f"{refuses.url}/{HUSH}")
        done = commwatch("alerts", "test", "--config", file, env=env)
        assert done.returncode == 1, done.stderr
        lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
        assert list(lines) == ["alertmanager/1", "alertmanager/2", "webhook", "slack", "command"]
        assert [lines[name] for name in ("alertmanager/1", "webhook", "command")] == ["ok"] * 3
        assert "connection refused" in lines["alertmanager/2"]
        assert lines["slack"] == f"http://127.0.0.1:{refuses.port}: answers 403: no_token ***"
        assert HUSH not in done.stdout + done.stderr
        told = [asked.json for asked in hook.asked]
        assert [each["status"] for each in told] == ["firing", "resolved"]
        labels = {"alertname": "CommwatchTest", "severity": "info"}
        assert [each["alerts"][0]["labels"] for each in told] == [labels] * 2
        assert "test" in told[0]["alerts"][0]["annotations"]["summary"]
        assert marker.read_text().count('"status": "resolved"') == 2
        hook.asked.clear()
        done = commwatch("alerts", "test", "--config", file, "--receiver", "webhook", env=env)
        assert (done.returncode, done.stdout) == (0, "webhook: ok\n")
        assert len(hook.asked) == 2


def test_no_such_receiver(tmp_path: Path) -> None:
    """Without receivers, or with an unknown name, the command prints one line with exit code 2."""
    done = commwatch("alerts", "test", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "commwatch: alerts test: no receivers; add one under [[receivers]] in the settings file\n"
    file = settings(tmp_path, 'kind = "webhook"\nurl = "http://127.0.0.1:1"')
    done = commwatch("alerts", "test", "--config", file, "--receiver", "pager")
    assert (done.returncode, done.stderr) == (2, "commwatch: alerts test: no receiver 'pager'; choose from webhook\n")
