"""``commwatch alerts export`` and ``check``, and the settings that they heed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from commwatch_alerts.catalogue import read, shipped
from tests.agent.test_config import one_line
from tests.alerts.promtool import check
from tests.helpers import clean_env, commwatch

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
        (
            "COMM_SHARE",
            "much",
            "COMMWATCH_THRESHOLD_COMM_SHARE: comm_share: needs a number without a unit, such as 0.4 or 30, not 'much'",
        ),
        (
            "COMM_SHARE",
            "nan",
            "COMMWATCH_THRESHOLD_COMM_SHARE: comm_share: needs a number without a unit, such as 0.4 or 30, not nan",
        ),
        ("COMM_SHRE", "0.5", "unknown 'comm_shre'; did you mean comm_share?"),
    ],
)
def test_wrong_thresholds(tmp_path: Path, variable: str, text: str, says: str) -> None:
    """An unknown threshold, or one with an impossible value, is refused by name."""
    env = clean_env(**{f"COMMWATCH_THRESHOLD_{variable}": text})
    assert says in one_line(commwatch("alerts", "export", cwd=tmp_path, env=env))


def test_kinds(tmp_path: Path) -> None:
    """A disabled kind has no alerts in the exported list, and the duration of a kind is that of its alerts."""
    config = tmp_path / "my.toml"
    config.write_text("[kinds.straggler]\nenabled = false\n[kinds.comm_bound]\nfor = '90s'\n")
    exported = commwatch("alerts", "export", "--config", config).stdout
    rules = {rule["alert"]: rule for rule in yaml.safe_load(exported)["groups"][0]["rules"] if "alert" in rule}
    assert rules["CommShareHigh"]["for"] == "1m30s"
    assert "StragglerRank" not in rules
    config.write_text("[kinds.stragglers]\nenabled = false\n")
    said = one_line(commwatch("alerts", "export", "--config", config))
    assert "kinds: unknown 'stragglers'; did you mean straggler?" in said


def test_list_of_ones_own(tmp_path: Path) -> None:
    """A list of one's own is refused, wherever it is named: one line says that such rules belong in Prometheus."""
    where = "commwatch no longer reads lists of alerts; put rules of your own into Prometheus (rule_files)"
    file, config = tmp_path / "rules.yaml", tmp_path / "commwatch.toml"
    file.write_text(shipped("rules.yaml"))
    assert f"{file}: {where}" in one_line(commwatch("alerts", "check", file))
    assert f"none: {where}" in one_line(commwatch("alerts", "check", "none"))
    env = clean_env(COMMWATCH_RULES=str(file))
    config.write_text(f"rules = '{file}'\n")
    for command in (("alerts", "check"), ("alerts", "export"), ("agent",), ("report",), ("config", "check")):
        assert f"COMMWATCH_RULES: {where}" in one_line(commwatch(*command, env=env))
        assert f"{config}: rules: {where}" in one_line(commwatch(*command, "--config", config))
    done = commwatch("agent", "--rules", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert where in done.stderr.splitlines()[-1]


def test_check(tmp_path: Path) -> None:
    """The command checks the list with the settings, and prints how many kinds and alerts are in force; what is wrong is one line."""
    config = tmp_path / "commwatch.toml"
    done = commwatch("alerts", "check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = read(shipped("rules.yaml"))
    assert (
        done.stdout == f"{len(found.kinds)} kinds, {len(found.alerts)} alerts, {len(found.records)} recording rules\n"
    )
    config.write_text("[kinds.comm_bound]\nenabled = false\n")
    less = len([rule for rule in found.alerts if rule.kind != "comm_bound"])
    printed = commwatch("alerts", "check", cwd=tmp_path).stdout
    assert printed.startswith(f"{len(found.kinds) - 1} kinds, {less} alerts, ")
    config.write_text("[thresholds]\ncomm_share = 2\n")
    assert "comm_share: needs a number from 0 to 1, not 2" in one_line(commwatch("alerts", "check", cwd=tmp_path))


def test_wrong_flags(tmp_path: Path) -> None:
    """A label that is none, and a place that cannot be written to, are named."""
    assert "--label release: needs KEY=VALUE" in one_line(
        commwatch("alerts", "export", "--format", "k8s", "--label", "release", cwd=tmp_path)
    )
    nowhere = tmp_path / "none" / "rules.yaml"
    assert f"cannot write {nowhere}" in one_line(commwatch("alerts", "export", "--output", nowhere), code=1)
