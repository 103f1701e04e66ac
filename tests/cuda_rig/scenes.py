"""Jobs of two ranks for the played driver. Arguments: the scene, and the folder for the recorder's dumps.

Device time is what `torch.cuda._sleep` takes. Where a scene puts some before an operation, the operation waits for nothing but that
and the other rank, so its time on the device is its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from commwatch.probe.torch_proof import recorded

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
#: Cycles of a millisecond.
MS = 1_980_000
#: Of a layer. With large ones, a real GPU communicates for some time.
WIDTH = int(os.environ.get("WIDTH", "512"))
#: Numbers, as a power of two, of which the scene `share` sums.
SHARED_LOG2 = int(os.environ.get("SHARED_LOG2", "10"))
#: How long a GPU computes that is stuck. A real one computes to the end after its process is gone.
STUCK_MS = int(os.environ.get("STUCK_MS", "3600000"))


def busy(ms: float) -> None:
    """Keep the current stream's device busy."""
    torch.cuda._sleep(int(ms * MS))


def data(log2: int) -> torch.Tensor:
    """So many floats on this rank's device."""
    return torch.zeros(1 << log2, device="cuda")


def collectives() -> None:
    """All kinds, blocking and asynchronous, of several sizes; now and then rank 1 is late."""
    whole, part = data(20), data(19)
    for step in range(12):
        busy(1)
        dist.all_reduce(whole)
        dist.all_reduce(whole, async_op=True).wait()
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(part, step % WORLD, async_op=True).wait()
        dist.all_to_all_single(torch.empty_like(whole), whole)
        if RANK == 1 and step % 4 == 3:
            time.sleep(0.02)
    dist.barrier()


def messages() -> None:
    """Sends and receives, one at a time and in batches."""
    out, into = data(18), data(18)
    for _ in range(8):
        busy(1)
        if RANK == 0:
            dist.send(out, 1)
            dist.recv(into, 1)
        else:
            dist.recv(into, 0)
            dist.send(out, 0)
        both = [dist.P2POp(dist.isend, out, 1 - RANK), dist.P2POp(dist.irecv, into, 1 - RANK)]
        for work in dist.batch_isend_irecv(both):
            work.wait()


def coalesced() -> None:
    """Operations that NCCL runs as one."""
    tensors = [data(16) for _ in range(4)]
    for asynchronous in (True, False) * 6:
        with _coalescing_manager(
            device=torch.device("cuda", torch.cuda.current_device()), async_ops=asynchronous
        ) as batch:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            batch.wait()


def groups() -> None:
    """Two groups at once, each on a stream of its own."""
    made = [dist.new_group(list(range(WORLD)), group_desc=name) for name in ("data", "expert")]
    tensors = [data(18), data(18)]
    for _ in range(12):
        works = [
            dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, made, strict=True)
        ]
        for work in works:
            work.wait()


def devices() -> None:
    """Each rank uses both devices, in one group: NCCL makes a communicator for each."""
    tensors = []
    for device in (RANK, 1 - RANK):
        with torch.cuda.device(device):
            tensors.append(data(18))
    for step in range(12):
        for tensor in tensors:
            with torch.cuda.device(tensor.device):
                busy(5)  # longer than the launch, also on a machine that does other things
                work = dist.all_reduce(tensor, async_op=step % 2 == 0)
                if work is not None:
                    work.wait()
    for tensor in tensors:
        torch.cuda.synchronize(tensor.device)


def experts() -> None:
    """Tokens to experts and back, unevenly."""
    tokens, quarter = data(16), 1 << 14
    got = torch.empty_like(tokens)
    splits = [quarter, 3 * quarter] if RANK == 0 else [3 * quarter, quarter]
    for _ in range(8):
        busy(1)
        dist.all_to_all_single(got, tokens, splits, splits)
        dist.all_to_all_single(tokens, got, splits, splits, async_op=True).wait()


def tensors() -> None:
    """Tensor parallelism, whose operations are functional collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    network = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).cuda()
    mesh = init_device_mesh("cuda", (WORLD,))
    _train(parallelize_module(network, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}))


def pipelined() -> None:
    """A pipeline of two stages as Megatron runs it: batches of messages, one forward and one backward (1F1B) of four micro-batches.

    Not torch.distributed.pipelining, whose stages agree on shapes by a computation on the device, which only plays.
    """
    network, batches = torch.nn.Linear(512, 512).cuda(), 4
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(8):
        busy(1)
        inputs = [torch.zeros(64, 512, device="cuda", requires_grad=True) for _ in range(batches)]
        gradients = [torch.zeros(64, 512, device="cuda") for _ in range(batches)]
        outputs = []
        if RANK == 1:
            _exchange(None, inputs[0])
        for batch in range(batches):
            outputs.append(network(inputs[batch]))
            if RANK == 0:
                _exchange(outputs[batch], gradients[batch - 1] if batch else None)
                if batch:
                    outputs[batch - 1].backward(gradients[batch - 1])
            else:
                outputs[batch].sum().backward()
                _exchange(inputs[batch].grad, inputs[batch + 1] if batch + 1 < batches else None)
        if RANK == 0:
            _exchange(None, gradients[-1])
            outputs[-1].backward(gradients[-1])
        optimizer.step()
        optimizer.zero_grad()


def foreign() -> None:
    """Another library calls NCCL beside PyTorch, as vLLM's pynccl does: all_reduces, all_gathers and messages, then captured ones."""
    nccl = ctypes.CDLL(None)  # the preloaded driver notes the calls
    comm = _communicator(nccl)
    whole, part = data(18), data(17)

    def call(name: str, *arguments: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert getattr(nccl, name)(*map(ctypes.c_size_t, (*arguments, comm, stream))) == 0

    dist.all_reduce(whole)
    for _ in range(5):
        busy(5)
        call("ncclAllReduce", whole.data_ptr(), whole.data_ptr(), 1 << 18, 7, 0)
        call("ncclAllGather", part.data_ptr(), whole.data_ptr(), 1 << 17, 7)
        call("ncclSend" if RANK == 0 else "ncclRecv", part.data_ptr(), 1 << 17, 7, 1 - RANK)
        dist.all_reduce(whole)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call("ncclAllReduce", whole.data_ptr(), whole.data_ptr(), 1 << 16, 7, 0)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    time.sleep(0.5)  # a thread of NCCL's reports the last ones


def _communicator(nccl: ctypes.CDLL) -> int:
    """A communicator of all ranks that PyTorch does not know."""

    class Id(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    unique, comm, store = Id(), ctypes.c_void_p(), dist.distributed_c10d._get_default_store()
    if RANK == 0:
        assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(unique)) == 0
        store.set("foreign", bytes(unique).hex())
    unique = Id.from_buffer_copy(bytes.fromhex(store.get("foreign").decode()))
    assert nccl.ncclCommInitRank(ctypes.byref(comm), WORLD, unique, RANK) == 0
    return comm.value or 0


def _exchange(out: torch.Tensor | None, into: torch.Tensor | None) -> None:
    """Send to the other stage, and receive from it, in one batch."""
    sent = [] if out is None else [dist.P2POp(dist.isend, out.detach(), 1 - RANK)]
    wanted = [] if into is None else [dist.P2POp(dist.irecv, into.detach(), 1 - RANK)]
    for work in dist.batch_isend_irecv([*sent, *wanted]):
        work.wait()


def captured() -> None:
    """Captures in both modes, each begun with an operation in flight that ends in the midst of it, replayed five times."""
    small, other = data(18), data(10)
    dist.all_reduce(small)
    torch.cuda.synchronize()
    for mode in ("global", "thread_local"):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        busy(100)
        beside = dist.all_reduce(other, async_op=True)
        assert not beside.is_completed()
        # Not `torch.cuda.graph`, which waits for the device first.
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            small.add_(1)
            time.sleep(0.15)
            dist.all_reduce(small)
            dist.all_reduce(small, async_op=True).wait()
            graph.capture_end()
        beside.wait()
        for _ in range(5):
            graph.replay()
        dist.all_reduce(small)
        torch.cuda.synchronize()


def replayed() -> None:
    """A graph with three operations, replayed a hundred times between the same operations outside of it."""
    whole, part = data(18), data(17)

    def operations() -> None:
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.all_reduce(part, async_op=True).wait()

    operations()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operations()
    for _ in range(100):
        graph.replay()
    operations()
    torch.cuda.synchronize()


def inference() -> None:
    """Two graphs, as an inference server has for two batch sizes, each replayed fifty times; no operation outside of them after the first."""
    large, small, part = data(20), data(16), data(15)
    dist.all_reduce(large)
    torch.cuda.synchronize()
    graphs = []
    for whole in (large, small):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            dist.all_reduce(whole)
            dist.all_gather_into_tensor(small, part)
            busy(0.2)
            dist.all_reduce(part, async_op=True).wait()
    for _ in range(50):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()


def steps() -> None:
    """Twenty marked steps each: 20 ms of computation and then communication; 30 beside it; 16 before and 4 beside it."""
    import commwatch

    tensor = data(10)
    for before, beside in ((20, 0), (0, 30), (16, 4)):
        for _ in range(20):
            commwatch.step()
            busy(before)
            work = dist.all_reduce(tensor, async_op=True)
            busy(beside)
            work.wait()
            torch.cuda.synchronize()
    commwatch.step()


def late() -> None:
    """Steps of 100 ms until the job is killed; the GPU of rank 1 computes 30 ms longer than that of rank 0."""
    _steps_until_killed(lambda: 90 if RANK == 1 else 60, data(10))


def stuck() -> None:
    """Steps, and then a computation of an hour on the GPU of rank 1, for which rank 0 waits."""
    tensor = data(10)
    for step in range(30):
        busy(STUCK_MS if RANK == 1 and step == 29 else 10)
        dist.all_reduce(tensor, async_op=True).wait()
        if step < 29:
            torch.cuda.synchronize()
    torch.cuda.synchronize()


def stuck_replay() -> None:
    """Replays, and then one in whose midst rank 1 computes for an hour: rank 0 waits for it in the second of the graph's operations."""
    whole, part = data(10), data(9)
    dist.all_reduce(whole)
    torch.cuda.synchronize()
    for last in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(whole)
            busy(STUCK_MS if last and RANK == 1 else 1)
            dist.all_gather_into_tensor(whole, part)
            dist.all_reduce(part)
        for _ in range(1 if last else 20):
            graph.replay()
        torch.cuda.synchronize()


def ahead() -> None:
    """The host launches steps of 20 s in advance, two minutes of work in all."""
    tensor = data(10)
    for _ in range(6):
        busy(20_000)
        for _ in range(5):
            dist.all_reduce(tensor, async_op=True).wait()
    torch.cuda.synchronize()


def share() -> None:
    """Steps until the job is killed: they compute 1.5 times as long as they communicate, and 10 times once the folder has a file `calm`.

    Writes the times of each step, by events on the stream that computes: ms of computation, and of communication.
    """
    folder, tensor = Path(sys.argv[2]), data(SHARED_LOG2)
    dist.all_reduce(tensor)
    with (folder / f"times-{RANK}.txt").open("w", buffering=1, encoding="ascii") as times:
        _, usual_ms = _timed_step(10, tensor)
        calm = folder / "calm"
        _steps_until_killed(lambda: (10 if calm.exists() else 1.5) * usual_ms, tensor, times)


def _steps_until_killed(compute_ms: Callable[[], float], tensor: torch.Tensor, times: TextIO | None = None) -> None:
    import commwatch

    while True:
        computed, communicated = _timed_step(compute_ms(), tensor)
        commwatch.step()
        if times is not None:
            times.write(f"{computed} {communicated}\n")


def _timed_step(compute_ms: float, tensor: torch.Tensor) -> tuple[float, float]:
    """Compute, then communicate; return the time of each on the device, in ms."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    busy(compute_ms)
    marks[1].record()
    dist.all_reduce(tensor, async_op=True).wait()
    marks[2].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def many() -> None:
    """A thousand operations in flight."""
    tensor = data(10)
    busy(300)
    for work in [dist.all_reduce(tensor, async_op=True) for _ in range(1000)]:
        work.wait()


def queued() -> None:
    """A thousand blocking operations behind a computation."""
    tensor = data(10)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    busy(300)
    for _ in range(1000):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()


def alone() -> None:
    """One asynchronous operation at a time."""
    tensor = data(10)
    for _ in range(30):
        dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()
        time.sleep(0.01)


def destroyed() -> None:
    """The group is destroyed while operations are in flight."""
    tensor = data(10)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    busy(2000)
    for _ in range(50):
        dist.all_reduce(tensor, async_op=True)


def lost() -> None:
    """The devices are lost in the sixth of a thousand steps."""
    tensor = data(10)
    for step in range(1000):
        dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()
        if step == 5:
            Path(os.environ["PLAYED_LOST"]).touch()


def slow() -> None:
    """Six steps; from the fourth on, each query of an event takes two seconds."""
    tensor = data(10)
    for step in range(6):
        dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()
        if step == 3:
            Path(os.environ["PLAYED_SLOW"]).write_text("2000")


def aborted() -> None:
    """Rank 1 does not join the sixth operation, and the watchdog of rank 0 ends the process after the group's five seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    tensor = data(10)
    for step in range(10):
        if RANK == 1 and step == 5:
            time.sleep(600)
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()


def restarted() -> None:
    """Rank 1 raises after three operations of the first life; the second life has five."""
    tensor, first = data(10), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(5):
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        if first and step == 2:
            dist.barrier()
            if RANK == 1:
                raise RuntimeError("first life")
            time.sleep(600)


def sharded() -> None:
    """FSDP2 on a small network."""
    from torch.distributed.fsdp import fully_shard

    network = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    for layer in network:
        fully_shard(layer)
    fully_shard(network)
    _train(network)


def replicated() -> None:
    """DDP on a small network, in several buckets."""
    network = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    _train(torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=1))


def _zero(stage: int) -> None:
    """ZeRO of DeepSpeed on a small network, with two micro-batches in a step."""
    import deepspeed  # type: ignore[import-not-found]  # in the environment of `make test-cuda` only

    network = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    # With small sub-groups and no threshold, stage 3 gathers and steps often.
    more = {"sub_group_size": 100_000, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage, **more},
    }
    engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=settings)
    for _ in range(8):
        engine.backward(engine(torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)).sum())
        engine.step()


def zero1() -> None:
    """The optimizer's state is divided among the ranks."""
    _zero(1)


def zero2() -> None:
    """Gradients, too."""
    _zero(2)


def zero3() -> None:
    """Parameters, too."""
    _zero(3)


class _Busy(torch.autograd.Function):
    """Keeps the device busy for 2 ms forwards, and 4 ms backwards."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        busy(2)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        busy(4)
        return gradient.clone()


class _Layer(torch.nn.Linear):
    """A linear layer that takes as long as a large one."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _Busy.apply(super().forward(tensor)))  # type: ignore[no-untyped-call]


def _slow(layers: int = 4) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(_Layer(WIDTH, WIDTH) for _ in range(layers))).cuda()


def slow_replicated() -> None:
    """DDP with computation beside which its buckets are reduced."""
    _train(torch.nn.parallel.DistributedDataParallel(_slow(), bucket_cap_mb=1), logged=True)


def slow_sharded() -> None:
    """FSDP2 with computation beside its collectives."""
    from torch.distributed.fsdp import fully_shard

    network = _slow()
    for layer in network:
        fully_shard(layer)
    fully_shard(network)
    _train(network, logged=True)


def slow_tensors() -> None:
    """Tensor parallelism, whose collectives nothing hides, with computation between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, plan = init_device_mesh("cuda", (WORLD,)), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    _train(parallelize_module(_slow(2), mesh, plan), logged=True)


def _train(network: torch.nn.Module, logged: bool = False) -> None:
    """Ten steps, or twenty whose loss is logged, so that the host waits for each."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(20 if logged else 10):
        loss = network(torch.ones(8, WIDTH, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if logged:
            loss.item()


@contextmanager
def job() -> Iterator[None]:
    """The default group, from beginning to end."""
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    dist.init_process_group(os.environ.get("BACKEND", "nccl"))
    yield
    dist.destroy_process_group()


def dump(path: Path) -> None:
    """Write the Flight Recorder's records, whose watchdog needs a moment to see the last ends."""
    torch.cuda.synchronize()
    time.sleep(0.3)
    path.write_bytes(recorded(torch.device("cuda")) or b"")


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """With ``TRACED=1``, write a trace of what the GPU does, for which this driver has no interface and a real one has."""
    if os.environ.get("TRACED") != "1":
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def main() -> None:
    scene, folder = sys.argv[1:]
    with job():
        with traced(Path(folder) / f"trace-{RANK}.json"):
            globals()[scene]()
        if scene != "destroyed":
            dump(Path(folder) / f"recorder-{RANK}.pickle")
    print(f"rank {RANK} is done", flush=True)


if __name__ == "__main__":
    main()
