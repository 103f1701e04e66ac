"""Every way to communicate, with PyTorch's own recorder on; says what the recorder saw."""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from common import begin, end, say
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def plain(rank: int, world: int) -> None:
    t = torch.ones(8)
    outs = [torch.empty(8) for _ in range(world)]
    dist.all_reduce(t)
    dist.broadcast(t, 0)
    dist.reduce(t, 1)
    dist.all_gather(outs, t)
    dist.all_gather_into_tensor(torch.empty(8 * world), t)
    dist.reduce_scatter_tensor(torch.empty(8 // world), t)
    dist.reduce_scatter(torch.empty(8), [torch.ones(8) for _ in range(world)])
    dist.all_to_all_single(torch.empty(8), t)
    dist.all_to_all_single(torch.empty(6 if rank == 0 else 10), t, [3, 3] if rank == 0 else [5, 5], [3, 5])
    dist.all_to_all([torch.empty(4) for _ in range(world)], [torch.ones(4) for _ in range(world)])
    dist.gather(t, outs if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(8), outs if rank == 1 else None, src=1)
    dist.all_gather_object([None] * world, {"a": rank})
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        dist.all_reduce(torch.ones(3, dtype=dtype))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.barrier()


def asynchronous(rank: int, world: int) -> None:
    works = [dist.all_reduce(torch.ones(16), async_op=True) for _ in range(8)]
    works.append(dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), async_op=True))
    for work in works:
        work.wait()


def coalesced(rank: int, world: int) -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(4))
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(torch.empty(16), torch.ones(8))
        dist.all_gather_into_tensor(torch.empty(16), torch.ones(8))
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))


def point_to_point(rank: int, world: int) -> None:
    t, other = torch.ones(8), 1 - rank
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, torch.empty(8), other)])
    for work in works:
        work.wait()
    if rank == 0:
        dist.send(t, 1, tag=7)
    else:
        dist.recv(torch.empty(8), 0, tag=7)
        # From anybody: the peer is not known beforehand.
    if rank == 0:
        dist.send(t, 1)
    else:
        dist.recv(torch.empty(8))


def subgroups(rank: int, world: int) -> None:
    both, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
    dist.all_reduce(torch.ones(5), group=both)
    dist.all_reduce(torch.ones(6), group=alone)


def ddp(rank: int, world: int) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01)
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()


def fsdp(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()


def tensor_parallel(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()


def functional(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    (funcol.all_reduce(torch.ones(4), "sum", group) + 1).sum()
    (funcol.all_gather_tensor(torch.ones(4), 0, group) + 1).sum()
    time.sleep(0.1)
    for _ in range(3):
        (funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 1).sum()
        time.sleep(0.1)


def compiled(rank: int, world: int, backend: str = "aot_eager") -> None:
    group = dist.group.WORLD
    assert group is not None
    function = torch.compile(lambda x: funcol.all_reduce(x * 2, "sum", group) + 1, backend=backend)
    for _ in range(3):
        function(torch.ones(4))


def inductor(rank: int, world: int) -> None:
    compiled(rank, world, "inductor")


def inference(rank: int, world: int) -> None:
    with torch.inference_mode():
        dist.all_reduce(torch.ones(3))
    with torch.no_grad():
        dist.all_reduce(torch.ones(3))


def main() -> None:
    rank, world = begin()
    for name in sys.argv[1:]:
        globals()[name](rank, world)
        dist.barrier()
    entries = json.loads(_dump_fr_trace_json())["entries"]
    wanted = ("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes", "process_group")
    say([{key: entry[key] for key in wanted} for entry in entries])
    end()


if __name__ == "__main__":
    main()
