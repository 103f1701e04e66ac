"""The NCCL plugin and what calls it, built with the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from commwatch.probe.native.library import PLUGIN
from tests.helpers import needs

HERE = Path(__file__).parent
STRICT = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", f"-I{PLUGIN}")
KINDS = {"addresses": "-fsanitize=address,undefined", "threads": "-fsanitize=thread"}


class Built(NamedTuple):
    """Programs that were built with one sanitizer: the plugin, the driver, the player, and other plugins by their version."""

    plugin: Path
    driver: Path
    player: Path
    others: dict[int, Path]

    def play(self, *arguments: str, version: str = "ncclProfiler_v6", script: str = "", chained: int = 0) -> list[str]:
        """Run the driver; return its lines."""
        return self._run(self.driver, *arguments, version=version, script=script, chained=chained)

    def replay(self, sequence: Path, *arguments: str) -> list[str]:
        """Play recorded calls; return the player's lines. The name of the file ends with the version of the interface."""
        version = f"ncclProfiler_{sequence.suffix.removeprefix('.')}"
        return self._run(self.player, *arguments, version=version, script=sequence.read_text(), chained=0)

    def _run(self, program: Path, *arguments: str, version: str, script: str, chained: int) -> list[str]:
        # The driver's own objects live until it ends.
        env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
        env["COMMWATCH_NCCL_CHAIN"] = str(self.others[chained]) if chained else "/nowhere"
        command = [str(program), str(self.plugin), version, *arguments]
        done = subprocess.run(command, input=script, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
        return done.stdout.splitlines()


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The plugin and its driver."""
    needs(shutil.which("gcc"), "gcc")
    where = tmp_path_factory.mktemp(request.param)

    def build(source: Path, name: str, *flags: str) -> Path:
        command = ["gcc", *STRICT, KINDS[request.param], str(source), "-o", str(where / name), "-ldl", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return where / name

    plugin = build(PLUGIN / "plugin.c", "plugin.so", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete")
    theirs = HERE / "their_plugin.c"
    others = {version: build(theirs, f"v{version}.so", "-shared", f"-DVERSION={version}") for version in (4, 5, 6)}
    driver, player = (build(HERE / f"{name}.c", name, "-rdynamic") for name in ("driver", "player"))
    return Built(plugin, driver, player, others)
