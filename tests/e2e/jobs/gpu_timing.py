"""Operations on a GPU that is played by ``fake_gpu.cpp``. Arguments: its library, and a scene."""

import contextlib
import ctypes
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import say
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

import commwatch
from commwatch.probe.torch_collectives import ring_file
from commwatch.wire.events import BLOCKED
from commwatch.wire.ring import HEARTBEAT
from commwatch.wire.ring_reader import RingReader

MS = 1_000_000
#: Compute before the first operation, and what operations take.
COMPUTE_MS, OP_MS = 600, 200


class Graph:
    """What torch calls a CUDA graph, on the fake GPU."""

    gpu: Any

    def capture_begin(self) -> None:
        """Begin to capture."""
        self.gpu.gpu_capture(1)

    def capture_end(self) -> None:
        """End it."""
        self.gpu.gpu_capture(0)

    def replay(self) -> None:
        """Take no time."""


class Scene:
    """The stage: one group, whose operations on the device go through the fake NCCL."""

    def __init__(self, library: str) -> None:
        torch.ops.load_library(library)
        self.gpu = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        Graph.gpu, torch.cuda.graphs.CUDAGraph = self.gpu, Graph  # type: ignore[assignment, misc]
        for name in ("capture_start", "capture_end", "replay_start"):  # PyTorch's own hooks do not see our graphs
            with contextlib.suppress(AttributeError):
                delattr(torch.cuda.graphs, f"register_graph_{name}_hook")
        commwatch.install()
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        self.group = dist.new_group([0])
        assert isinstance(self.group, ProcessGroup)
        self.gpu.gpu_use(self.group.group_name.encode())
        self.gpu.gpu_nccl_over.restype = ctypes.c_int64
        self.device = torch.device("privateuseone:0")
        module = SimpleNamespace(
            current_device=lambda: 0,
            set_device=lambda _: self.gpu.gpu_set_device(),
            is_current_stream_capturing=lambda: self.gpu.gpu_capturing() != 0,
        )
        torch._register_device_module("privateuseone", module)
        # The first operation of a group has no duration. Here it is this one, of another size.
        dist.all_reduce(torch.ops.fake_gpu.tensor(1), group=self.group)
        self.recorded(0)
        self.gpu.gpu_op_takes(ctypes.c_int64(OP_MS * MS))

    def compute(self) -> None:
        """Something else on the current stream."""
        self.gpu.gpu_compute(ctypes.c_int64(COMPUTE_MS * MS))

    def reduce(self, async_op: bool) -> Any:
        """One all_reduce of 1 KiB."""
        return dist.all_reduce(torch.ops.fake_gpu.tensor(256), group=self.group, async_op=async_op)

    def recorded(self, records: int) -> None:
        """Wait until the ring has so many records, besides that of the first operation."""
        while self.cursor() < 1 + records:
            time.sleep(0.01)

    def cursor(self) -> int:
        """The number of records in the ring."""
        ring = ring_file()
        assert ring is not None
        return int.from_bytes(ring.read_bytes()[64:72], "little")

    def heartbeat(self) -> int:
        """The heartbeat in the ring."""
        ring = ring_file()
        assert ring is not None
        reader = RingReader(ring)
        try:
            return reader.counter(HEARTBEAT)
        finally:
            reader.close()

    # -- scenes -------------------------------------------------------------------------------

    def ops(self) -> None:
        """Two operations queued behind compute, and a blocking one behind them."""
        self.compute()
        works = [self.reduce(True), self.reduce(True)]
        for work in works:
            work.wait()
        self.reduce(False)
        self.recorded(3)
        del work, works

    def queued(self) -> None:
        """Three operations queued behind compute; what is in flight meanwhile."""
        self.compute()
        works = [self.reduce(True) for _ in range(3)]
        seen: list[tuple[int, bool]] = []
        while self.cursor() < 4:
            for op in self.in_flight():
                if op not in seen:
                    seen.append(op)
            time.sleep(0.005)
        say({"seen": seen})
        del works

    def in_flight(self) -> list[tuple[int, bool]]:
        """Number of each operation in flight, and whether the GPU has reached it."""
        ring = ring_file()
        assert ring is not None
        reader = RingReader(ring)
        try:
            return [(record.seq, bool(record.flags & BLOCKED and record.start_ns)) for record in reader.in_flight()]
        finally:
            reader.close()

    def short(self) -> None:
        """One operation that is over before anybody can look."""
        self.gpu.gpu_op_takes(ctypes.c_int64(1000))
        work = self.reduce(True)
        self.recorded(1)
        del work

    def slow(self) -> None:
        """One operation, whose Work answers the first question only when it is over."""
        self.gpu.gpu_slow()
        self.gpu.gpu_op_takes(ctypes.c_int64(3000 * MS))
        beats: set[int] = set()
        work = self.reduce(True)
        while not beats or self.cursor() < 2:
            beats.add(self.heartbeat())
            time.sleep(0.01)
        say({"over": self.gpu.gpu_nccl_over(), "beats": len(beats)})
        del work

    def wrong_clock(self) -> None:
        """Operations on a device whose clock is a thousand times as fast as it should be."""
        self.gpu.gpu_clock_rate(ctypes.c_int64(1000))
        self.reduce(True).wait()
        self.recorded(1)
        self.gpu.gpu_clock_rate(ctypes.c_int64(1))
        self.reduce(False)
        self.recorded(2)

    def first(self) -> None:
        """The first two operations of a group on the device."""
        self.group = dist.new_group([0])
        self.gpu.gpu_use(self.group.group_name.encode())
        for number in (1, 2):
            self.reduce(False)
            self.recorded(number)

    def capture(self) -> None:
        """One operation before a capture, over in the midst of it; one captured; one after it."""
        before = self.reduce(True)
        self.gpu.gpu_capture(1)
        captured = self.reduce(True)
        self.recorded(2)
        self.gpu.gpu_capture(0)
        after = self.reduce(True)
        self.recorded(3)
        del before, captured, after

    def ahead(self) -> None:
        """Forty operations of 16 MiB, queued behind compute. Their outputs are dropped at once, and their Works but the first four."""
        self.compute()
        self.gpu.gpu_op_takes(ctypes.c_int64(MS))
        kept = []
        for number in range(40):
            work = dist.all_reduce(torch.ops.fake_gpu.tensor(4 << 20), group=self.group, async_op=True)
            if number < 4:
                kept.append(work)
        del work
        self.recorded(40)
        del kept

    def graph(self) -> None:
        """A graph with two operations, replayed three times, and an operation after it."""
        graph: Any = torch.cuda.graphs.CUDAGraph()
        graph.capture_begin()
        captured = [self.reduce(True), self.reduce(False)]
        graph.capture_end()
        self.recorded(0)
        for _ in range(3):
            graph.replay()
        self.recorded(6)
        after = self.reduce(True)
        self.recorded(7)
        del captured, after

    def batch(self) -> None:
        """Two batches of three, the second behind compute, one that blocks, one whose user raises, and one operation after all."""
        self.exchange()
        self.recorded(3)
        self.compute()
        self.exchange()
        self.recorded(6)
        self.group._start_coalescing(self.device)
        self.reduce_now()
        self.group._end_coalescing(self.device)
        self.recorded(7)
        with contextlib.suppress(ZeroDivisionError), coalescing(self.group, self.device):
            self.reduce_now()
            print(1 / 0)
        self.group._start_coalescing(self.device)
        self.group._end_coalescing(self.device)
        self.reduce_now()
        self.recorded(9)

    def exchange(self) -> None:
        """A batch of three messages."""
        with coalescing(self.group, self.device, async_ops=True) as manager:
            for send in (True, False, True):
                (self.group.send if send else self.group.recv)([torch.ops.fake_gpu.tensor(256)], 0, 0)
        manager.wait()

    def reduce_now(self) -> None:
        """A blocking all_reduce that the coalescing manager does not collect."""
        options = dist.AllreduceOptions()
        options.asyncOp = False
        self.group.allreduce([torch.ops.fake_gpu.tensor(256)], options)

    def broken(self) -> None:
        """The device stops answering while an operation runs; training on the CPU goes on."""
        work = self.reduce(True)
        self.gpu.gpu_break()
        self.recorded(1)
        works = [self.reduce(True), self.reduce(False)]
        dist.all_reduce(torch.ones(8), group=self.group)
        self.recorded(4)
        del work, works

    def broken_at_once(self) -> None:
        """The device takes no event from the first operation on."""
        self.gpu.gpu_break()
        self.reduce(False)
        self.group._start_coalescing(self.device)
        self.reduce_now()
        self.group._end_coalescing(self.device)
        self.reduce(False)
        dist.all_reduce(torch.ones(8), group=self.group)
        self.recorded(4)


def main() -> None:
    torch.set_num_threads(1)
    scene = Scene(sys.argv[1])
    getattr(scene, sys.argv[2])()
    gpu = scene.gpu
    # The fake's works hold their tensors. The native hook does not destroy one that was in flight when its device failed.
    kept = int(sys.argv[2] == "broken" and os.environ["COMMWATCH_HOOK"] == "native")
    while gpu.gpu_works() > kept:
        time.sleep(0.01)
    seen = {name: getattr(gpu, f"gpu_{name}")() for name in ("works", "timed_groups", "disturbed", "at_home")}
    say({**seen, "events": [gpu.gpu_events(0), gpu.gpu_events(1)]})
    commwatch.uninstall()
    dist.destroy_process_group()
    os.write(1, b"job done\n")


if __name__ == "__main__":
    main()
