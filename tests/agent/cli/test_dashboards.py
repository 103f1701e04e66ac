"""``commwatch dashboards export``: what it writes, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from commwatch_dashboards.export import NAMES
from tests.dashboards.grafana import FOLDER
from tests.helpers import commwatch

FILES = sorted(f"commwatch-{name}.json" for name in NAMES)


def export(to: Path, *flags: str) -> list[str]:
    """The files that the command has written."""
    done = commwatch("dashboards", "export", "--dir", to, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return sorted(str(file.relative_to(to)) for file in to.rglob("*") if file.is_file())


def test_json(tmp_path: Path) -> None:
    """By default the folder is made, and the dashboards lie in it as they are."""
    assert export(tmp_path / "new" / "folder") == FILES
    for name in NAMES:
        exported = (tmp_path / "new" / "folder" / f"commwatch-{name}.json").read_bytes()
        assert exported == (FOLDER / f"{name}.json").read_bytes()


def test_configmap(tmp_path: Path) -> None:
    """A ConfigMap has the label that Grafana's sidecar selects, the given namespace, the complete JSON, and is smaller than a mebibyte."""
    assert export(tmp_path, "--format", "configmap") == sorted(f"commwatch-{name}.yaml" for name in NAMES)
    assert "namespace" not in yaml.safe_load((tmp_path / "commwatch-job.yaml").read_text())["metadata"]
    export(tmp_path, "--format", "configmap", "--namespace", "monitoring")
    for name in NAMES:
        file = tmp_path / f"commwatch-{name}.yaml"
        assert file.stat().st_size < 1 << 20
        made = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert (made["apiVersion"], made["kind"]) == ("v1", "ConfigMap")
        assert made["metadata"] == {
            "name": f"commwatch-{name}-dashboard",
            "labels": {"grafana_dashboard": "1"},
            "namespace": "monitoring",
        }
        assert made["data"] == {f"commwatch-{name}.json": (FOLDER / f"{name}.json").read_text(encoding="utf-8")}


def test_provisioning(tmp_path: Path) -> None:
    """The provider leads, by an absolute path, to the folder in which the JSON lies."""
    assert export(tmp_path, "--format", "provisioning") == ["commwatch.yaml", *(f"commwatch/{file}" for file in FILES)]
    made = yaml.safe_load((tmp_path / "commwatch.yaml").read_text())
    (provider,) = made["providers"]
    assert (made["apiVersion"], provider["type"], provider["folder"]) == (1, "file", "commwatch")
    assert sorted(file.name for file in Path(provider["options"]["path"]).iterdir()) == FILES
    assert Path(provider["options"]["path"]).is_absolute()


def test_runbook(tmp_path: Path) -> None:
    """The link to the runbook leads where one says."""
    export(tmp_path, "--runbook-url", 'https://wiki/"commwatch"')
    for file in FILES:
        links = json.loads((tmp_path / file).read_text(encoding="utf-8"))["links"]
        assert 'https://wiki/"commwatch"' in {link["url"] for link in links}
        assert not any("localhost" in link["url"] for link in links)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--dir", "file/sub"], 1, "commwatch: dashboards export: cannot write file/sub: Not a directory\n"),
        (
            ["--dir", ".", "--namespace", "x"],
            2,
            "commwatch: dashboards export: --namespace needs --format configmap\n",
        ),
    ],
)
def test_trouble(tmp_path: Path, flags: list[str], code: int, says: str) -> None:
    """A failure is reported in one line that names it."""
    (tmp_path / "file").touch()
    done = commwatch("dashboards", "export", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, says)
