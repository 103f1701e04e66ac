"""``commwatch alerts export`` and ``check``, and the settings that they heed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from commwatch_agent.alerting.alert_rules import catalogue
from commwatch_agent.config import load
from commwatch_agent.config_checks import ConfigError
from commwatch_alerts.catalogue import shipped
from tests.agent.test_config import one_line
from tests.alerts.promtool import check
from tests.helpers import clean_env, commwatch

HOME = {"HOME": "/home/someone"}


QUIET = "job:commwatch_comm_share_ratio:quiet5m"


def expression(text: str, name: str = "CommShareHigh") -> str:
    """The expression of the first rule with this name in a rule file: an alert, or a recording rule."""
    rules = yaml.safe_load(text)["groups"][0]["rules"]
    return str(next(rule["expr"] for rule in rules if name in (rule.get("alert"), rule.get("record"))))


def test_export(tmp_path: Path) -> None:
    """The list goes to standard output or into a file, and Prometheus takes it."""
    done = commwatch("alerts", "export", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "rules.yaml"
    assert commwatch("alerts", "export", "--format", "prometheus", "--output", file).stdout == ""
    assert file.read_text() == done.stdout
    check(file)


def test_export_for_kubernetes(tmp_path: Path) -> None:
    """A PrometheusRule has the given name, namespace and labels, and the same rules."""
    flags = ("--namespace", "monitoring", "--label", "release=prometheus", "--label", "a.b/c=d")
    url = ("--runbook-url", "https://wiki/commwatch")
    made = yaml.safe_load(commwatch("alerts", "export", "--format", "k8s", *flags, *url, cwd=tmp_path).stdout)
    labels = {"release": "prometheus", "a.b/c": "d"}
    assert made["metadata"] == {"name": "commwatch", "namespace": "monitoring", "labels": labels}
    assert made["spec"] == yaml.safe_load(commwatch("alerts", "export", *url, cwd=tmp_path).stdout)
    urls = {rule["annotations"]["runbook_url"] for rule in made["spec"]["groups"][0]["rules"] if "alert" in rule}
    assert "https://wiki/commwatch#commsharehigh" in urls


def test_thresholds(tmp_path: Path) -> None:
    """A threshold can be set in the settings file or in the environment, which wins."""
    config = tmp_path / "my.toml"
    config.write_text("[thresholds]\ncomm_share = 0.4\nexposed_share_quiet = 0.2\n")
    text = commwatch("alerts", "export", "--config", config).stdout
    assert "> 0.4 " in expression(text)
    assert "< 0.2\n" in expression(text, QUIET)
    env = clean_env(COMMWATCH_THRESHOLD_COMM_SHARE="0.45")
    text = commwatch("alerts", "export", "--config", config, env=env).stdout
    assert "> 0.45 " in expression(text)
    assert "< 0.2\n" in expression(text, QUIET)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("COMM_SHARE", "1.5", "comm_share: needs a number from 0 to 1, not 1.5"),
        ("COMM_SHARE", "much", "COMMWATCH_THRESHOLD_COMM_SHARE=much: not a number"),
        ("COMM_SHARE", "nan", "comm_share: needs a number from 0 to 1"),
        ("COMM_SHRE", "0.5", "unknown 'comm_shre'; known are comm_share,"),
    ],
)
def test_wrong_thresholds(tmp_path: Path, variable: str, text: str, says: str) -> None:
    """An unknown threshold, or one with an impossible value, is refused by name."""
    env = clean_env(**{f"COMMWATCH_THRESHOLD_{variable}": text})
    assert says in one_line(commwatch("alerts", "export", cwd=tmp_path, env=env))


def test_list_of_ones_own(tmp_path: Path) -> None:
    """The setting ``rules`` names another list, from where the command was given; one with a mistake is refused, with its file."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped("rules.yaml").replace("default: 0.3,", "default: 0.35,", 1))
    (tmp_path / "commwatch.toml").write_text('rules = "mine.yaml"\n')
    assert "> 0.35 " in expression(commwatch("alerts", "export", cwd=tmp_path).stdout)
    mine.write_text(mine.read_text().replace("severity: warning\n", "severity: loud\n", 1))
    said = one_line(commwatch("alerts", "export", cwd=tmp_path))
    assert f"{mine}: CommShareHigh: severity: needs one of info, warning, critical, not 'loud'" in said
    config = load(HOME, tmp_path / "commwatch.toml")
    mine.unlink()
    with pytest.raises(ConfigError, match=r"mine\.yaml: No such file"):
        catalogue(load(HOME, rules=config.rules))


def test_check(tmp_path: Path) -> None:
    """For a correct list the command prints the number of alerts; for a wrong one it prints the error in one line, with exit code 1."""
    file = tmp_path / "rules.yaml"
    file.write_text(shipped("rules.yaml"))
    done = commwatch("alerts", "check", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{file}: ")
    file.write_text(shipped("rules.yaml").replace("(commwatch_comm_share_ratio)", "(commwatch_coms_share_ratio)", 1))
    said = one_line(commwatch("alerts", "check", file), code=1)
    assert f"{file}: job:commwatch_comm_share_ratio:avg: expr: there is no metric 'commwatch_coms_share_ratio'" in said
    assert "No such file" in one_line(commwatch("alerts", "check", tmp_path / "none"), code=1)
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in one_line(commwatch("alerts", "check", file), code=1)


def test_wrong_flags(tmp_path: Path) -> None:
    """A label that is none, and a place that cannot be written to, are named."""
    assert "--label release: needs KEY=VALUE" in one_line(
        commwatch("alerts", "export", "--format", "k8s", "--label", "release", cwd=tmp_path)
    )
    nowhere = tmp_path / "none" / "rules.yaml"
    assert f"cannot write {nowhere}" in one_line(commwatch("alerts", "export", "--output", nowhere), code=1)
