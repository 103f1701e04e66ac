"""The script that ``commwatch bench`` appends to a launch command: times collectives by size on each backend.

Timed as in nccl-tests: operations back to back between two synchronisations of the device, divided by their number. All ranks
begin a round together; its time is that of the slowest rank (where a broadcast's root is done long before the others, an average
would flatter), and the median of the rounds counts. Rank 0 writes the results, a line of JSON each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TextIO

if __name__ == "__main__":
    # Modules in this script's folder have names of other packages' modules.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    os.environ["COMMWATCH_DISABLE"] = "1"

import torch
import torch.distributed as dist

#: torchrun's variable -> variables of other launchers with its meaning.
LAUNCHERS = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
#: Rounds of a point, iterations of a round at most, and untimed operations before them.
ROUNDS, MOST_ITERATIONS, WARM_UP = 5, 1000, 2
ITEM = 4  # bytes of a float32
#: An operation that takes longer has failed on another rank.
PATIENCE = timedelta(minutes=5)

Launch = Callable[[], object]


class CannotSweep(Exception):
    """The processes cannot be joined to a group; the message says what is missing."""


class Sweep(NamedTuple):
    """What to measure."""

    backends: list[str]
    ops: list[str]
    sizes: list[int]
    seconds: float


class Bench:
    """The group of one backend, and the buffers on its device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, largest: int) -> None:
        self.group, self.device = group, device
        self.ranks, self.rank = group.size(), group.rank()
        # Zeros stay zeros, however often they are added up.
        self.whole = torch.zeros(largest // ITEM + self.ranks, device=device)
        self.other = torch.zeros_like(self.whole)

    def synchronise(self) -> None:
        """Wait until the device has done all that was launched."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)

    def agree(self, value: float) -> float:
        """Return the largest of all ranks' values; all ranks wait for each other."""
        one = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(one, dist.ReduceOp.MAX, group=self.group)
        return float(one.item())

    def time(self, launch: Launch, iterations: int) -> float:
        """Return the seconds of one operation, on the slowest rank."""
        self.agree(0)  # begin together
        self.synchronise()
        began = time.perf_counter()
        for _ in range(iterations):
            launch()
        self.synchronise()
        return self.agree((time.perf_counter() - began) / iterations)


# -- operations: S in bytes to (elements of S, launch); torch 2.13 has new names for two of them ----------------------------------------


def _all_reduce(bench: Bench, size: int) -> tuple[int, Launch]:
    whole = bench.whole[: size // ITEM]
    return whole.numel(), lambda: dist.all_reduce(whole, group=bench.group)


def _broadcast(bench: Bench, size: int) -> tuple[int, Launch]:
    whole = bench.whole[: size // ITEM]
    return whole.numel(), lambda: dist.broadcast(whole, 0, group=bench.group)


def _reduce(bench: Bench, size: int) -> tuple[int, Launch]:
    whole = bench.whole[: size // ITEM]
    return whole.numel(), lambda: dist.reduce(whole, 0, group=bench.group)


def _shards(bench: Bench, size: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return a buffer of about ``size`` bytes that splits evenly, another of one part, and the first's parts."""
    each = max(1, size // ITEM // bench.ranks)
    whole = bench.whole[: each * bench.ranks]
    return whole, bench.other[:each], list(whole.split(each))


def _all_gather(bench: Bench, size: int) -> tuple[int, Launch]:
    whole, part, _ = _shards(bench, size)
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return whole.numel(), lambda: call(whole, part, group=bench.group)


def _reduce_scatter(bench: Bench, size: int) -> tuple[int, Launch]:
    whole, part, _ = _shards(bench, size)
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return whole.numel(), lambda: call(part, whole, group=bench.group)


def _all_to_all(bench: Bench, size: int) -> tuple[int, Launch]:
    whole, _, _ = _shards(bench, size)
    other = bench.other[: whole.numel()]
    return whole.numel(), lambda: dist.all_to_all_single(other, whole, group=bench.group)


def _gather(bench: Bench, size: int) -> tuple[int, Launch]:
    whole, part, parts = _shards(bench, size)
    into = parts if bench.rank == 0 else None
    return whole.numel(), lambda: dist.gather(part, into, 0, group=bench.group)


def _scatter(bench: Bench, size: int) -> tuple[int, Launch]:
    whole, part, parts = _shards(bench, size)
    out_of = parts if bench.rank == 0 else None
    return whole.numel(), lambda: dist.scatter(part, out_of, 0, group=bench.group)


OPERATIONS: dict[str, Callable[[Bench, int], tuple[int, Launch]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
}


# -- measuring --------------------------------------------------------------------------------


def measure(bench: Bench, launch: Launch, seconds: float) -> tuple[float, int]:
    """Return the seconds of one operation, and how many were timed, in about ``seconds``."""
    for _ in range(WARM_UP):
        launch()
    once = max(bench.time(launch, 1), 1e-7)
    rounds = min(ROUNDS, max(1, int(seconds / once)))
    iterations = min(MOST_ITERATIONS, max(1, int(seconds / rounds / once)))
    return median(bench.time(launch, iterations) for _ in range(rounds)), rounds * iterations


def sweep_backend(backend: str, sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measure and yield all points of a backend; for what it cannot do, yield the reason."""
    share = sweep.seconds / len(sweep.backends) / len(sweep.ops) / len(sweep.sizes)
    op = None
    try:
        group = dist.new_group(backend=backend, timeout=PATIENCE)
        bench = Bench(group, device_of(backend), max(sweep.sizes))
        bench.agree(0)
    except (RuntimeError, ValueError, AssertionError) as error:
        yield {"left_out": backend, "op": op, "why": first_line(error)}
        return
    for op in sweep.ops:
        try:
            for size in sweep.sizes:
                elements, launch = OPERATIONS[op](bench, size)
                time_s, timed = measure(bench, launch, share)
                point = {"size": elements * ITEM, "time_s": time_s, "timed": timed}
                yield {"backend": backend, "op": op, **point}
        except (RuntimeError, ValueError) as error:
            yield {"left_out": backend, "op": op, "why": first_line(error)}


def device_of(backend: str) -> torch.device:
    """Return a backend's device: the CPU if possible, else this rank's accelerator; raise ``ValueError`` if none."""
    kinds = dist.Backend.backend_capability.get(backend, ["cpu"])
    if "cpu" in kinds:
        return torch.device("cpu")
    accelerator = getattr(torch, kinds[0])
    if not accelerator.is_available():
        raise ValueError(f"no {kinds[0]} device")
    device = torch.device(kinds[0], int(os.environ.get("LOCAL_RANK", "0")) % accelerator.device_count())
    accelerator.set_device(device)
    return device


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# -- joining ----------------------------------------------------------------------------------


def environment(env: dict[str, str], port: int) -> dict[str, str]:
    """Return the variables that torch needs to join the job, from any known launcher.

    Raises:
        CannotSweep: the launcher does not set them.
    """
    found = {name: _either(env, name) for name in LAUNCHERS}
    given = {name: value for name, value in found.items() if value is not None}
    if "RANK" not in given or "WORLD_SIZE" not in given:
        raise CannotSweep("RANK and WORLD_SIZE are not set; use a launcher that sets them (torchrun, srun, mpirun)")
    address = env.get("MASTER_ADDR") or _first_node(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST"))
    if address is None:
        if given.get("LOCAL_WORLD_SIZE") != given["WORLD_SIZE"]:
            raise CannotSweep("MASTER_ADDR is not set; set it to the host of rank 0")
        address = "127.0.0.1"
    return {**given, "MASTER_ADDR": address, "MASTER_PORT": env.get("MASTER_PORT") or str(port)}


def _either(env: dict[str, str], name: str) -> str | None:
    return next((env[variable] for variable in (name, *LAUNCHERS[name]) if env.get(variable)), None)


def _first_node(nodes: str | None) -> str | None:
    """Return the first name of a list as Slurm writes it: ``node[01-03,7],other``."""
    if not nodes:
        return None
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.replace("-", ",").split(",")[0] + tail.split(",")[0]


def run(sweep: Sweep, out: TextIO | None) -> None:
    """Sweep all backends; ``out`` is where rank 0 writes."""

    def tell(line: dict[str, Any]) -> None:
        if out is not None:
            print(json.dumps(line), file=out, flush=True)

    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    tell({"ranks": dist.get_world_size(), "hosts": sorted(set(hosts)), "torch": torch.__version__})
    for backend in sweep.backends:
        for line in sweep_backend(backend, sweep):
            tell(line)
    tell({"done": True})


def main() -> None:
    """Join the group, sweep, and leave the group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--backends", default="")
    parser.add_argument("--ops", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    default = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    backends = given.backends.split(",") if given.backends else [default]
    sweep = Sweep(backends, given.ops.split(","), [int(size) for size in given.sizes.split(",")], given.seconds)
    try:
        os.environ.update(environment(dict(os.environ), given.port))
    except CannotSweep as error:
        given.results.write_text(json.dumps({"error": str(error)}) + "\n")
        return
    out = open(given.results, "w") if os.environ["RANK"] == "0" else None  # noqa: SIM115 - closed below
    known = [backend for backend in backends if backend in dist.Backend.backend_list and _can(backend)]
    try:
        if int(os.environ["WORLD_SIZE"]) < 2:
            raise CannotSweep("one rank cannot communicate; start at least two")
        if not known:
            raise CannotSweep("; ".join(f"{backend}: {why_not(backend)}" for backend in backends))
        dist.init_process_group(known[0], timeout=PATIENCE)
        run(sweep, out)
        dist.destroy_process_group()
    except CannotSweep as error:
        if out is not None:
            print(json.dumps({"error": str(error)}), file=out)
    finally:
        if out is not None:
            out.close()


def _can(backend: str) -> bool:
    return why_not(backend) is None


def why_not(backend: str) -> str | None:
    """Return why this process cannot make a group of this backend; ``None`` if it can."""
    if backend not in dist.Backend.backend_list:
        return f"torch has no such backend; it has {', '.join(dist.Backend.backend_list)}"
    if not dist.is_backend_available(backend):
        return "this torch was built without it"
    try:
        device_of(backend)
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
