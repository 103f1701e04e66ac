"""What one NVIDIA GPU can show of commwatch: same loss, timing mode, durations, cost of a step, utilisation and power.

``python bench/gpu/check.py`` prints one table and ends with 0 if all of it holds. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commwatch.collectors.node.gpu_nvidia import NvidiaSource
from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.ring_reader import RingReader

JOB = Path(__file__).with_name("job.py")
GATHERS, ROUNDS = 20, 3
EVENTS = {"COMMWATCH_TIMING": "events"}
#: Scene, and the settings it runs under.
SCENES: tuple[tuple[str, dict[str, str]], ...] = (
    ("ddp", EVENTS),
    ("ddp", {**EVENTS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ("ddp", {"COMMWATCH_TIMING": "poll"}),
    ("fsdp2", EVENTS),
    ("graphs", EVENTS),
)
Row = tuple[bool, str, str]


def run(scene: str, given: argparse.Namespace, env: dict[str, str], gathers: int = 0) -> dict[str, Any]:
    """One process; what it printed."""
    command = [sys.executable, str(JOB), scene, "--device", given.device, "--steps", str(given.steps)]
    done = subprocess.run(
        [*command, "--gathers", str(gathers)], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{scene} {env}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("commwatch: "):
            print(f"  said: {line}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def watched(scene: str, given: argparse.Namespace, env: dict[str, str], gathers: int = 0) -> tuple[dict[str, Any], Any]:
    """The same with the probe; also its ring: who it was, and its records."""
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            scene, given, {**env, "COMMWATCH": "1", "COMMWATCH_BUDGET": "0", "COMMWATCH_DIR": directory}, gathers
        )
        (path,) = (Path(directory) / "rings").glob("*.ring")
        reader = RingReader(path)
        records = [ev.Record._make(fields) for fields in ev.RECORD.iter_unpack(reader.drain(final=True).records)]
        identity = reader.identity
        reader.close()
    return result, (identity, [record for record in records if record.op != ev.STEP_MARK])


def scene_rows(scene: str, env: dict[str, str], given: argparse.Namespace) -> list[Row]:
    """A scene, without and with the probe in turn."""
    name = f"{scene} {' '.join(f'{k}={v}' for k, v in env.items())}".strip()
    without, with_probe, ring = [], [], None
    for _ in range(ROUNDS):
        without.append(run(scene, given, env))
        result, ring = watched(scene, given, env)
        with_probe.append(result)
    assert ring is not None
    identity, records = ring
    losses = {result["loss"] for result in (*without, *with_probe)}
    ratio = statistics.median(r["step_s"] for r in with_probe) / statistics.median(r["step_s"] for r in without)
    timed = sum(not record.flags & ev.UNTIMED for record in records)
    timing = identity["timing"]
    sources = sorted({ev.TIMING[record.timing] for record in records})
    return [
        (len(losses) == 1, f"{name}: loss", ", ".join(map(str, losses))),
        (
            bool(records),
            f"{name}: timing",
            f"{timing['mode']}: {timing['reason']}; {timed} of {len(records)}: {sources}",
        ),
        (ratio < given.most, f"{name}: step", f"{ratio:.4f} of that without ({without[0]['step_s'] * 1e3:.2f} ms)"),
    ]


def duration_rows(given: argparse.Namespace) -> list[Row]:
    """Durations of all_gathers against torch.profiler's, one by one."""
    result, (_, records) = watched("ddp", given, EVENTS, GATHERS)
    seen = result["gathers_s"]
    gathers = sorted((r for r in records if r.op == ev.OP_CODE["all_gather"]), key=lambda r: r.launch_ns)
    ours = [(r.end_ns - r.start_ns) / 1e9 for r in gathers][-GATHERS:]
    if not seen:
        return [(given.device == "cpu", "durations", f"the profiler saw none on the device; ours: {len(ours)}")]
    ratio = statistics.median(ours) / statistics.median(seen)
    says = f"{statistics.median(ours) * 1e6:.1f} us, by torch.profiler {statistics.median(seen) * 1e6:.1f} us ({len(seen)})"
    return [(abs(ratio - 1) < 0.05, "durations", f"{ratio:.3f}: {says}")]


def gpu_rows() -> list[Row]:
    """Utilisation and power of the first card beside what nvidia-smi says."""
    asked = "utilization.gpu,power.draw"
    if shutil.which("nvidia-smi") is None:
        return [(True, "card", "no nvidia-smi here")]
    source = NvidiaSource()
    source.open()
    rows = []
    for _ in range(3):
        time.sleep(1)
        card = source.read().gpus[0]
        said = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        ours = f"{card.measured.utilization}, {card.measured.power_watts} W"
        rows.append((True, "card", f"{ours}; nvidia-smi: {said}"))
    source.close()
    return rows


def main() -> int:
    """Run everything, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--most", type=float, default=1.01, help="a step with the probe may take so many times as long")
    given = parser.parse_args()
    scenes = SCENES if given.device == "cuda" else SCENES[:1]
    rows = [row for scene, env in scenes for row in scene_rows(scene, env, given)]
    rows += duration_rows(given)
    rows += gpu_rows() if given.device == "cuda" else []
    for holds, what, says in rows:
        print(f"{'ok ' if holds else 'NOT'} {what:<44} {says}")
    return 0 if all(holds for holds, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
