"""The Dockerfile without an image builder: what it copies is enough to install, and its health check works. tests/image builds it."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from commwatch_agent.deploy.kubernetes import Site
from tests.helpers import agent, clean_env, needs
from tests.test_packaging import PACKAGES, TREE, linked, listed

DOCKERFILE = (TREE / "Dockerfile").read_text(encoding="utf-8")


def context() -> list[str]:
    """The files that .dockerignore lets through."""
    let_through = [line[1:] for line in (TREE / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return [name for name in listed() if name.partition("/")[0] in let_through]


def test_context_has_every_file() -> None:
    """What a wheel is made of is let through."""
    packages = tuple(f"{folder}/{package}/" for folder, packages in PACKAGES.items() for package in packages)
    needed = {name for name in listed() if name.startswith(packages)}
    assert len(needed) > 400
    assert needed | {"pyproject.toml", "README.md", "LICENSE"} <= set(context())


@pytest.mark.long
def test_context_is_enough(tmp_path: Path) -> None:
    """The agent that is installed from it has rules, dashboards and manifests with it, and no torch."""
    for name in context():
        (tmp_path / "context" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, tmp_path / "context" / name)
    python = linked(tmp_path / "venv", tmp_path / "context")
    command = python.with_name("commwatch")
    for arguments in (["alerts", "export"], ["manifest", "k8s"], ["probe", "install", tmp_path / "probe"]):
        done = subprocess.run(
            [command, *arguments], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert (
        subprocess.run([python, "-c", "import torch"], cwd=tmp_path, capture_output=True, check=False).returncode != 0
    )


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_health_check(tmp_path: Path, tls: bool) -> None:
    """The health check passes while the agent of the run directory answers, on any port, with TLS or without, and fails where none does."""
    (written,) = re.findall(r"HEALTHCHECK.*?CMD (\[.*?\])\n", DOCKERFILE, re.DOTALL)
    check, env = [sys.executable, *json.loads(written)[1:]], clean_env(COMMWATCH_DIR=str(tmp_path))
    flags: tuple[str, ...] = ()
    if tls:
        needs(shutil.which("openssl"), "openssl")
        cert, key, config = (tmp_path / name for name in ("agent.pem", "agent.key", "agent.toml"))
        made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=agent", "-keyout", key, "-out", cert)
        subprocess.run(["openssl", *made], check=True, capture_output=True)
        config.write_text(f"tls_cert = '{cert}'\ntls_key = '{key}'\n")
        flags = ("--config", str(config))

    def unverified(url: str) -> tuple[bytes, str]:
        with urllib.request.urlopen(url, timeout=30, context=ssl._create_unverified_context()) as response:
            return response.read(), response.headers["Content-Type"]

    with agent(tmp_path, *flags, fetch=unverified):
        assert subprocess.run(check, env=env, check=False).returncode == 0
    assert subprocess.run(check, env=env, capture_output=True, check=False).returncode != 0


def test_image_is_not_root() -> None:
    """It runs as the user that the manifests name by default."""
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert int(user) == Site("", "", 0).uid > 0
