"""The claims of ``commwatch doctor --gpu-proof``: what a job showed without and with the probe, compared."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from commwatch.wire import events as ev
from commwatch_agent.text.units import seconds
from commwatch_collectors.node.gpu import DriverTrouble, Gpu, NoGpus, plain_uuid
from commwatch_collectors.node.gpu_nvidia import NvidiaSource

#: Least share of the operations that must have a duration.
TIMED = 0.9
#: Seconds that nvidia-smi may take.
_SMI_S = 30.0


@dataclass(frozen=True)
class Row:
    """One claim, and whether it holds."""

    what: str
    #: ``None``: it could not be checked.
    ok: bool | None
    says: str
    #: The number behind it, if there is one: a ratio or a count.
    figure: float | None = None


@dataclass
class Records:
    """What the probe recorded in one job."""

    identity: dict[str, Any]
    operations: list[ev.Record]
    marks: list[ev.Record]
    lost: int
    #: What commwatch printed in the job: warnings and errors.
    messages: list[str]

    def of(self, op: str) -> list[ev.Record]:
        """Return the operations of one kind, in order of launch."""
        return [record for record in self.operations if op_of(record) == op]


@dataclass
class Ran:
    """A job that has ended: what it printed, the operations that PyTorch counted, and what the probe recorded."""

    result: dict[str, Any]
    #: By name and size; size ``None``: not known.
    counted: Counter[tuple[str, int | None]] | None = None
    records: Records | None = None


def sized(op: str, size_bytes: int | None) -> tuple[str, int | None]:
    """Return an operation with its size, unless the two sources define it differently: NCCL's barrier is an all_reduce."""
    return op, None if op in ("barrier", "scatter") else size_bytes


def op_of(record: ev.Record) -> str:
    return ev.OPS[record.op - 1] if record.op <= len(ev.OPS) else str(record.op)


def is_timed(record: ev.Record) -> bool:
    return not record.flags & ev.UNTIMED


def took_s(record: ev.Record) -> float:
    return (record.end_ns - record.start_ns) / 1e9


def loss_row(name: str, without: list[Ran], watched: list[Ran]) -> Row:
    plain, ours = ({ran.result["loss"] for ran in runs} for runs in (without, watched))
    what = f"{name}: loss"
    if plain == ours and len(plain) == 1:
        return Row(
            what, True, f"the same to the last bit, in {len(without) + len(watched)} runs without and with commwatch"
        )
    both = f"without commwatch {', '.join(sorted(plain))}; with it {', '.join(sorted(ours))}"
    return Row(what, None if len(plain) > 1 else False, f"{'varies by itself: ' if len(plain) > 1 else ''}{both}")


def timing_row(name: str, records: Records, mode: str | None) -> Row:
    """Return whether the operations are timed as the settings say; those of graphs are counted only.

    Args:
        mode: the expected mode; ``None``: any.
    """
    timing = records.identity["timing"]
    alone = [record for record in records.operations if not (name == "graphs" and op_of(record) == "all_gather")]
    timed = sum(map(is_timed, alone))
    says = f"{timing['mode']} ({timing['reason']}), {records.identity['hook']} hook; {timed} of {len(alone)} operations have a duration"
    if timing["mode"] == "poll":
        says += " (those that are shorter than the interval have none)"
    enough = timing["mode"] == "poll" or timed >= TIMED * len(alone) > 0
    ok = enough and mode in (None, timing["mode"]) and not records.messages
    return Row(f"{name}: timing", ok, "; ".join((says, *records.messages)), timed / len(alone) if alone else None)


def count_row(name: str, ran: Ran, records: Records) -> Row:
    what, expected = f"{name}: count", ran.counted
    if expected is None:
        return Row(
            what, None, f"{len(records.operations)} operations; this torch has no Flight Recorder to compare with"
        )
    sizes = all(size is not None for (op, size) in expected if op not in ("barrier", "scatter"))
    ours = Counter(sized(op_of(each), each.size_bytes if sizes else None) for each in records.operations)
    source = "PyTorch's Flight Recorder" if sizes else "the job, replays included"
    if ours == expected and not records.lost:
        return Row(
            what, True, f"{ours.total()} operations{' and their sizes' * sizes}, as counted by {source}", ours.total()
        )
    missing, more = expected - ours, ours - expected
    says = (
        f"{ours.total()} operations, {source} has {expected.total()}; missing {missing.total()}, extra {more.total()}"
    )
    first = next(iter((missing or more).items()), None)
    return Row(what, False, f"{says}, lost {records.lost}{f'; first {first}' if first else ''}", ours.total())


def step_row(name: str, without: list[Ran], watched: list[Ran], most: float) -> Row:
    """Return whether a step takes at most ``most`` times as long with the probe; unknown if it varies more without."""
    plain, ours = ([ran.result["step_s"] for ran in runs] for runs in (without, watched))
    ratio, varies = statistics.median(ours) / statistics.median(plain), max(plain) / min(plain)
    says = f"{ratio:.4f} of the time without commwatch ({seconds(statistics.median(plain))}, which varies by {varies - 1:.1%})"
    if most <= ratio < varies:
        return Row(f"{name}: step", None, f"{says}: too much to tell", ratio)
    return Row(f"{name}: step", ratio < most, says, ratio)


def gpu_row(uuid: str) -> Row:
    """Return whether commwatch reads the same of the first GPU as nvidia-smi."""
    source = NvidiaSource()
    try:
        source.open()
    except (NoGpus, DriverTrouble) as error:
        return Row("gpu", False, f"commwatch cannot read the driver: {error}")
    try:
        time.sleep(1)  # the GPU is idle by then
        gpus = source.read().gpus
    except DriverTrouble as error:
        return Row("gpu", False, f"commwatch cannot read the driver: {error}")
    finally:
        source.close()
    gpu = next((each for each in gpus if plain_uuid(each.card.uuid) == uuid), gpus[0])
    return beside_smi(gpu, _nvidia_smi(gpu.card.uuid))


def _nvidia_smi(uuid: str) -> list[str] | None:
    """Return memory (MiB), power limit, power (W) and utilization (%) of a GPU; ``None`` without nvidia-smi."""
    asked = "--query-gpu=memory.total,enforced.power.limit,power.draw,utilization.gpu"
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "-i", uuid, asked, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [cell.strip() for cell in done.stdout.split(",")]


def beside_smi(gpu: Gpu, smi: list[str] | None) -> Row:
    """Return the row; memory and power limit must be equal, power and utilization change from moment to moment."""
    ours = gpu.measured
    memory = None if ours.memory_total_bytes is None else ours.memory_total_bytes / (1 << 20)
    utilization = None if ours.utilization is None else ours.utilization * 100
    values = (memory, ours.power_limit_watts, ours.power_watts, utilization)
    says = ", ".join(
        f"{'–' if value is None else f'{value:.0f}'}{f' ({told})' if smi else ''} {unit}"
        for value, told, unit in zip(values, smi or ("",) * 4, ("MiB", "W at most", "W", "% used"), strict=False)
    )
    if smi is None:
        return Row("gpu", None, f"{says}; there is no nvidia-smi to compare with")
    equal = all(_is_near(value, told) for value, told in zip(values[:2], smi[:2], strict=False))
    return Row("gpu", equal, f"{says}; in brackets: nvidia-smi")


def _is_near(value: float | None, told: str) -> bool:
    """Return whether a value is what nvidia-smi prints, or neither knows it."""
    try:
        number = float(told)
    except ValueError:  # [N/A]
        return value is None
    return value is not None and abs(value - number) <= 1
