"""Trains with DDP or FSDP2, and says what each collective carried, as PyTorch itself has it: [operation, part]; and whether the model is free then.

Each kind has parts of one size, so that only their place in the step tells them apart.
"""

import gc
import sys
import weakref
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from common import begin, end, say
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 8
carried: list[list[Any]] = []


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)], nn.Linear(64, 8))


def ddp(kind: str) -> weakref.ref[Any]:
    """DDP with buckets of two layers; a communication hook notes each one with its parameters."""
    model: Any = layers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    special = {"find_unused_parameters": kind == "unused", "static_graph": kind == "static"}
    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=0.03, **special)  # type: ignore[arg-type]

    def noting(state: Any, bucket: Any) -> Any:
        carried.append(["all_reduce", bucket.index(), [names[id(each)] for each in bucket.parameters()]])
        if kind == "compressed":
            return fp16_compress_hook(state, bucket)
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / dist.get_world_size())

    noting.__annotations__.clear()  # DDP accepts no others than its own, and these are texts where a job is a fork
    if kind != "plain":
        wrapped.register_comm_hook(None, noting)
    torch._dynamo.config.optimize_ddp = False  # it splits graphs at larger buckets only
    model = torch.compile(wrapped, backend="eager") if kind == "compiled" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    for step in range(STEPS):
        if kind == "accumulate":
            with wrapped.no_sync():
                model(torch.randn(8, 64)).sum().backward()
            model(torch.randn(8, 64)).sum().backward()
        if kind == "foreign":  # of the user, as large as a bucket
            dist.all_reduce(torch.ones(2 * 64 * 65))
            carried.append(["all_reduce", -1, []])
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            with torch.no_grad():
                model(torch.randn(8, 64))
    if kind == "plain":
        logged = wrapped._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"].split(",")
        of_pass = [[list(names.values())[int(index)] for index in bucket.split()] for bucket in logged]
        first = ["all_reduce", 0, list(names.values())]
        carried.extend([first, *([["all_reduce", *each] for each in enumerate(of_pass)] * (STEPS - 1))])
    return weakref.ref(wrapped)


def fsdp(kind: str) -> weakref.ref[Any]:
    """FSDP2 with a unit for each layer; or HSDP, whose units are replicated, too."""
    model: Any = layers()
    note()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    mesh = mesh if kind == "hsdp" else init_device_mesh("cpu", (world,))
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "evaluate" and step == 6:
            with torch.no_grad():
                model(torch.randn(8, 64))
    return weakref.ref(model)


def note() -> None:
    """Note what FSDP gathers and reduces by the path that it gives a parameter."""
    made: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")

    def noting(original: Any, op: str) -> Any:
        def noted(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            path = parameters[0]._param_fqn.rpartition(".")[0]
            if op != "reduce_scatter" or args[1].size() > 1:
                carried.append([op, path])
            result = original(parameters, *args, **kwargs)
            if op == "reduce_scatter" and result[4] is not None:
                carried.append(["all_reduce", path])
            return result

        return noted

    made.foreach_all_gather = noting(made.foreach_all_gather, "all_gather")
    made.foreach_reduce = noting(made.foreach_reduce, "reduce_scatter")


def main() -> None:
    begin()
    name, _, kind = sys.argv[1].partition("-")
    model = {"ddp": ddp, "fsdp": fsdp}[name](kind)
    gc.collect()
    say([carried, model() is None])
    end()


if __name__ == "__main__":
    main()
