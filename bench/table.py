"""Run the benchmarks and print one Markdown table: what, measured, budget, and the peer in the same run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import OPS_PER_STEP, last_json

Figures = dict[str, Any]
NAMES = {"native": "native", "python": "Python"}
TIMEOUT_S = 600
#: Of the loop that says how fast the machine is.
ADDITIONS = 10_000_000


class Row(NamedTuple):
    """A line of the table; ``budget`` empty where there is none (DESIGN §7)."""

    what: str
    measured: str
    budget: str = ""
    peer: str = ""
    over: bool = False


def collective_cost(f: Figures) -> list[Row]:
    """Rows of ``collective_cost.py``."""
    profiler = f"torch.profiler +{f['profiler_us']:.1f} µs, then {f['profiler_read_us']:.0f} µs to read each event"
    without = f"(without: {f['plain_us']:.1f} µs, noise {f['noise_us']:+.2f} µs)"
    rows = [
        Row("one collective, native hook", f"+{f['native_us']:.2f} µs {without}", "1 µs", profiler, f["native_us"] > 1),
        Row("one collective, Python hook", f"+{f['python_us']:.1f} µs", "12 µs", over=f["python_us"] > 12),
    ]
    for what, name in (("its first 200 calls", "deepspeed_first_us"), ("after 10,000 calls", "deepspeed_us")):
        if name in f:
            native, python = f[name] / f["native_us"], f[name] / f["python_us"]
            peer = f"DeepSpeed's comms logger, {what}: +{f[name]:.0f} µs"
            measured = f"native 1/{native:.0f}, Python 1/{python:.1f}"
            rows.append(Row("... against DeepSpeed's comms logger", measured, "1/10", peer, python < 10))
    return rows


def step_time(f: Figures) -> list[Row]:
    """Rows of ``step_time.py``."""
    return [row for workload in f.values() for row in _steps_of(workload)]


def _steps_of(f: Figures) -> list[Row]:
    rows = []
    for hook in ("native", "python"):
        for kind, called in (("wall", "wall"), ("cpu", "CPU")):
            what = (
                f"step of {f['wall_ms']:.0f} ms with {f['ops_per_step']} collectives, {called} time, {NAMES[hook]} hook"
            )
            ratio = f[f"{hook}_{kind}_ratio"]
            measured = f"×{ratio:.3f} (no hook again: ×{f[f'again_{kind}_ratio']:.3f})"
            budgeted = (hook, kind) == ("native", "cpu") and f["ops_per_step"] == OPS_PER_STEP
            budget, over = ("×1.005", ratio > 1.005) if budgeted else ("", False)
            rows.append(Row(what, measured, budget, f"torch.profiler ×{f[f'profiler_{kind}_ratio']:.2f}", over))
        rows.append(Row("... which is, in CPU time per collective and rank", f"{f[f'{hook}_cpu_us_per_op']:.1f} µs"))
    return rows


def checksums(f: Figures) -> list[Row]:
    """Rows of ``checksums.py``."""
    rows = []
    arms = (
        ("default", "replicas compared every 100 steps"),
        ("each", "replicas compared at each step"),
        ("collectives", "one in 100 collectives compared"),
        ("each_collective", "each collective compared"),
    )
    for arm, what in arms:
        for kind, called in (("wall", "wall"), ("cpu", "CPU")):
            measured = f"×{f[f'{arm}_{kind}_ratio']:.3f} (without again: ×{f[f'again_{kind}_ratio']:.3f})"
            rows.append(Row(f"step of {f['wall_ms']:.0f} ms, {called} time, {what}", measured))
    size = f"{f['parameters']} parameters of {f['megabytes']:.1f} MB"
    rows.append(Row(f"... one check of {size}", f"{f['check_cpu_ms']:.2f} ms of CPU, {f['memory_mb']:+.1f} MB"))
    rows.append(Row("... checks of all their gradients' collectives", f"{f['collectives_cpu_ms']:.2f} ms of CPU"))
    return rows


def intake_rate(f: Figures) -> list[Row]:
    """Rows of ``intake_rate.py``."""
    rows = []
    for nodes, what in (("1", "intake, ring to history, on one core"), ("2", "... of a job on two nodes")):
        rate = f[nodes]["records_per_s"]
        rows.append(Row(what, f"{rate:,.0f} records/s", "500,000", over=rate < 500_000))
    return rows


def agent_load(f: Figures) -> list[Row]:
    """Rows of ``agent_load.py``."""
    load = f"{f['ranks']} ranks × {f['operations_per_s']:,}/s"
    usual = f"{f['ranks']} ranks × {f['usual_per_s']:,}/s"
    memory = f"{f['memory_mb']:.0f} MB (highest {f['memory_highest_mb']:.0f})"
    rows = [
        _of_agent("agent without a job", f["idle_percent"], f["idle_mb"], (0.2, 70)),
        _of_agent(f"agent at {usual}", f["usual_percent"], f["usual_mb"], (1, 85)),
        Row("... CPU time of a scrape", f"{f['scrape_cpu_ms']:.0f} ms", "10 ms", over=f["scrape_cpu_ms"] > 10),
        Row(f"agent CPU at {load}", f"{f['cpu_percent']:.1f}% of a core", "5%", over=f["cpu_percent"] > 5),
        Row("agent memory, under that load", memory, "100 MB", over=f["memory_highest_mb"] > 100),
        Row("scrape of /metrics, under that load", f"{f['scrape_ms']:.0f} ms", "50 ms", over=f["scrape_ms"] > 50),
        Row("series in it, 13 (group, op) pairs a rank", f"{f['series']:,}", "1,500", over=f["series"] > 1500),
    ]
    for what, name in (("/metrics", "metrics"), ("the API", "api")):
        worst = f[f"{name}_fresh_worst_s"]
        measured = f"{f[f'{name}_fresh_s']:.2f} s (worst {worst:.2f})"
        rows.append(Row(f"freshness of {what}, under that load", measured, "1 s", over=worst > 1))
    return rows


def _of_agent(what: str, percent: float, mb: float, budget: tuple[float, float]) -> Row:
    measured, most = f"{percent:.1f}% of a core, {mb:.0f} MB", f"{budget[0]:g}%, {budget[1]:g} MB"
    return Row(what, measured, most, over=percent > budget[0] or mb > budget[1])


def live_page(f: Figures) -> list[Row]:
    """Rows of ``live_page.py``."""
    load, adds = f"{f['ranks']} ranks × {f['operations_per_s']:,}/s", f["page_adds_percent"]
    beside = f"(without: {f['without_percent']:.1f}%, noise {f['noise_percent']:.1f})"
    fresh = f"{f['fresh_beside_slow_s']:.2f} s (without: {f['fresh_s']:.2f})"
    return [
        Row(f"one live page open, agent CPU at {load}", f"+{adds:.1f}% of a core {beside}", "2%", over=adds > 2),
        Row(
            f"{f['slow']} clients of its stream that read nothing", f"{f['slow_add_percent']:+.1f}% of a core {beside}"
        ),
        Row("... freshness of /metrics beside them", fresh, "1 s", over=f["fresh_beside_slow_s"] > 1),
    ]


def joiner(f: Figures) -> list[Row]:
    """Rows of ``joiner.py``."""
    return [
        Row(
            f"join of one collective over {int(ranks):,} ranks",
            f"{cost['collective_us']:,.0f} µs, {cost['part_us']:.2f} µs a rank",
        )
        for ranks, cost in f.items()
    ]


def import_time(f: Figures) -> list[Row]:
    """Rows of ``import_time.py``."""
    added = f"+{f['commwatch_ms']:.1f} ms (start of Python: {f['plain_ms']:.0f} ms; with the Python API: +{f['api_ms']:.0f} ms)"
    of_torch = f"{f['off_ms']:+.1f} ms, {f['on_ms']:+.0f} ms (without: {f['torch_ms']:.0f} ms)"
    over = f["off_ms"] > 1 or f["on_ms"] > 25
    return [
        Row("`import commwatch`", added),
        Row("`import torch`, commwatch installed: off, on", of_torch, "1 ms, 25 ms", over=over),
    ]


def commands(f: Figures) -> list[Row]:
    """Rows of ``commands.py``."""
    budgets = {"help": 100, "jobs": 300, "report": 700}
    called = {"help": "`commwatch --help`", "jobs": "`commwatch jobs`", "report": "`commwatch report` of a small job"}
    without = f"(start of Python: {f['python_ms']:.0f} ms)"
    return [
        Row(called[name], f"{f[f'{name}_ms']:.0f} ms {without}", f"{most} ms", over=f[f"{name}_ms"] > most)
        for name, most in budgets.items()
    ]


def probe_memory(f: Figures) -> list[Row]:
    """Rows of ``probe_memory.py``."""
    without = f"(without: {f['plain_mb']:.0f} MB, noise {f['noise_mb']:.1f})"
    return [
        Row(
            f"memory of the probe, per rank, {NAMES[hook]} hook", f"+{added:.1f} MB {without}", "16 MB", over=added > 16
        )
        for hook, added in (("native", f["native_mb"]), ("python", f["python_mb"]))
    ]


def log_rate(f: Figures) -> list[Row]:
    """Rows of ``log_rate.py``."""
    rate, memory = f["mb_per_s"], f["memory_mb"]
    return [
        Row("NCCL log to account, on one core", f"{rate:.1f} MB/s", "40 MB/s", over=rate < 40),
        Row(f"... memory, for {f['mb']:.0f} MB of log", f"+{memory:.0f} MB"),
    ]


def rare_filter(f: Figures) -> list[Row]:
    """Rows of ``rare_filter.py``."""
    slowest = max(f["seconds"], key=f["seconds"].__getitem__)
    worst = f["seconds"][slowest]
    what = f"`/api/v1/ops` with a filter that three of {f['records'] / 1e6:.1f} million operations match"
    return [
        Row(what, f"{worst:.2f} s (slowest: by {slowest})", "1 s", over=worst > 1),
        Row("... the history on disk", f"{f['bytes_per_record']:.1f} bytes an operation"),
    ]


def timeline(f: Figures) -> list[Row]:
    """Rows of ``timeline.py``."""
    what = f"`commwatch timeline` of {f['operations'] / 1e6:.1f} million operations"
    cost = f"{f['cpu_s']:.0f} s of CPU time, file of {f['file_mb']:.0f} MB"
    return [Row(what, cost), Row("... highest memory", f"{f['mb']:.0f} MB", "64 MB", over=f["mb"] > 64)]


def nccl_plugin(f: Figures) -> list[Row]:
    """Rows of ``nccl_plugin.py``."""
    rows = []
    for what, name in (("PyTorch", "of_pytorch"), ("other libraries", "of_others")):
        cost = f[name]
        no_channels = cost["channel_ns"] is None
        over = no_channels or cost["collective_ns"] > 150 or cost["channel_ns"] > 30 or cost["mallocs"] > 0
        peers = "; ".join(f"{peer}: {_nccl_cost(of)}" for peer, of in f["peers"].items())
        budget = "150 ns, 30 ns, 0"
        rows.append(Row(f"NCCL plugin, one operation of {what}", _nccl_cost(cost), budget, peers, over))
    return rows


def _nccl_cost(cost: Figures) -> str:
    if cost["channel_ns"] is None:  # it takes no operations with more channels
        return f"{cost['collective_ns']:.0f} ns with one channel, {cost['mallocs']:.0f} mallocs"
    return f"{cost['collective_ns']:.0f} ns, {cost['channel_ns']:.1f} ns each channel, {cost['mallocs']:.0f} mallocs"


#: Scripts beside this one, by the function that makes rows of their figures.
BENCHMARKS: tuple[Callable[[Figures], list[Row]], ...] = (
    collective_cost,
    step_time,
    checksums,
    intake_rate,
    joiner,
    agent_load,
    live_page,
    import_time,
    commands,
    probe_memory,
    log_rate,
    rare_filter,
    timeline,
    nccl_plugin,
)


def run(name: str) -> tuple[Figures, float]:
    """The figures of one benchmark, and how fast the machine was before it. What it says on the way is shown only if it fails."""
    speed_ns, begin = addition_ns(), time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if result.returncode:
        raise SystemExit(f"bench: {name} failed\n{result.stderr}")
    seconds = time.monotonic() - begin
    print(f"bench: {name}: {seconds:.0f} s, at {speed_ns:.0f} ns an addition", file=sys.stderr, flush=True)
    return last_json(result.stdout), speed_ns


def cpu_model() -> str:
    """As the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def addition_ns() -> float:
    """Time of one addition in a fixed loop of pure Python, by which machines can be compared."""
    total, begin = 0, time.process_time()
    for n in range(ADDITIONS):
        total += n
    return 1e9 * (time.process_time() - begin) / ADDITIONS


def headline() -> str:
    """Date and machine, at the start."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{os.cpu_count()} cores, {cpu_model()}, load {os.getloadavg()[0]:.1f} at the start"
    software = f"Python {platform.python_version()}, torch {version('torch')}, commwatch {version('commwatch')}"
    return f"{when}; {machine}; {software}. Medians; ratios within one run."


def markdown(rows: list[Row]) -> str:
    """The table; what is over its budget is bold."""
    lines = ["| what | measured | budget | peer in the same run |", "|---|---|---|---|"]
    for row in rows:
        measured = f"**{row.measured}**" if row.over else row.measured
        lines.append(f"| {row.what} | {measured} | {row.budget} | {row.peer} |")
    return "\n".join(lines)


def main() -> None:
    """Run all, or those whose names are given."""
    known = {rows_of.__name__: rows_of for rows_of in BENCHMARKS}
    names = sys.argv[1:] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"bench: there is no {unknown[0]}; there are {', '.join(known)}")
    head, rows, speeds = headline(), list[Row](), list[float]()
    for name in names:
        figures, speed_ns = run(name)
        rows += known[name](figures)
        speeds.append(speed_ns)
    print(f"{head} An addition in a loop of Python took {min(speeds):.0f} to {max(speeds):.0f} ns.\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
