"""The native hook's own parts, driven by threads of C++: plain with every run, under the sanitizers with the long tests."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from commwatch.probe.governor import CostTurns, Governor, UsualCost, is_sampled
from commwatch.probe.native import library
from tests.helpers import needs

DRIVER = Path(__file__).parent
DRIVERS = ("ring", "messages", "session", "graphs", "retention", "spare", "stream_waits", "standard_error", "aside")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
KINDS = {
    "plain": WARNINGS,
    "addresses": ("-g", *WARNINGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "threads": ("-g", "-fsanitize=thread"),
}
INCLUDED = (f"-I{library.HERE}", f"-I{library.PLUGIN}")


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("addresses", "threads"))]
)
def test_parts(kind: str, tmp_path: Path) -> None:
    """All parts that do not depend on torch, from the ring to questions to Python, hold what they promise to eight threads."""
    needs(shutil.which("g++"), "g++")
    (tmp_path / "format.h").write_text(library.format_header())
    flags = ["-std=c++20", "-O0", "-pthread", "-rdynamic", *INCLUDED, f"-I{tmp_path}", *KINDS[kind]]
    files = [str(DRIVER / f"{name}_driver.cpp") for name in DRIVERS]
    if kind == "plain":  # all in one: the headers of the library take more time than the drivers
        (tmp_path / "drivers.cpp").write_text("".join(f'#include "{file}"\n' for file in files))
        files = [str(tmp_path / "drivers.cpp")]
    built = subprocess.run(
        ["g++", *flags, *files, "-o", str(tmp_path / "driver")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [str(tmp_path / "driver")],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-6000:]
    assert done.stdout.split()[::2] == [
        "ring",
        "in_flight",
        "exposure",
        "few",
        "messages",
        "poller",
        "session",
        "graphs",
        "retention",
        "spare",
        "stream_waits",
        "standard_error",
        "aside",
    ]


@pytest.mark.parametrize("binding", ["-Wl,-z,lazy", "-Wl,-z,now,-z,relro"], ids=["lazy", "now"])
def test_imports(binding: str, tmp_path: Path) -> None:
    """Calls of a library come to our function while it is in place, and to the original afterwards; a function of others is left alone."""
    needs(shutil.which("g++"), "g++")
    shared = ["g++", "-shared", "-fPIC"]
    for name, uses in (("runtime", []), ("torch_user", ["-L.", "-lruntime"]), ("others_user", ["-L.", "-lruntime"])):
        source = str(DRIVER / "imports_libraries.cpp")
        built = [*shared, f"-DLIBRARY_{name}", source, "-o", f"lib{name}.so", *uses, binding, "-Wl,-rpath,$ORIGIN"]
        subprocess.run(built, cwd=tmp_path, check=True, timeout=60)
    main = [
        "g++",
        "-std=c++20",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{library.HERE}",
        str(DRIVER / "imports_driver.cpp"),
    ]
    libraries = ["-L.", "-ltorch_user", "-lothers_user", "-lruntime", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*main, "-o", "driver", *libraries], cwd=tmp_path, check=True, timeout=120)
    done = subprocess.run(["./driver"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_governor(tmp_path: Path) -> None:
    """Both hooks decide alike, window by window, sample the same operations, and measure and count their own cost alike."""
    needs(shutil.which("g++"), "g++")
    (tmp_path / "format.h").write_text(library.format_header())
    built = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", *INCLUDED]
    subprocess.run(
        [*built, str(DRIVER / "governor_driver.cpp"), "-o", str(tmp_path / "driver")], check=True, timeout=250
    )
    draw = random.Random(2)
    dear = [draw.choice((0.0, 0.005, 0.0050001, 0.5)) for _ in range(400)]
    shares = [share for share in dear for _ in range(draw.choice((1, 1, 3, 40)))]
    said = subprocess.run(
        [str(tmp_path / "driver")],
        input=" ".join(map(str, (0.005, *shares))),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split()
    governor = Governor(0.005)
    modes = [governor.window(share) for share in shares]
    assert set(modes) == {0, 1, 2}
    turns, usual, costs = CostTurns(), UsualCost(), []
    for n in range(20_000):
        jitter = n * n % 1013
        costs += [turns.next(1 + jitter * 1000 + n * 3_000_000), usual.bound(jitter * (1 if n % 5000 < 2500 else 100))]
    assert [int(number) for number in said] == modes + [seq for seq in range(100_000) if is_sampled(seq)] + costs
