"""DeepSpeed on CPU; arguments: a stage of ZeRO, or ``pipe`` for its pipeline, and the number of parameter groups."""

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common import STEPS, batches, count_messages, made, show, tell
from deepspeed.pipe import PipelineModule
from torch import nn

ACCUMULATED = 2


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **more},
    }


def zero(stage: int, groups: int) -> None:
    net = made()
    # With small sub-groups, ZeRO-3 calls its optimizer several times per step, once for each of them.
    more = {"sub_group_size": 100, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    parts = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() == 1]},
    ]
    parameters = parts if groups == 2 else net.parameters()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=settings(stage, **more))
    for x, y in batches(dist.get_rank(), STEPS * ACCUMULATED):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        show(loss.detach())
    tell(engine.global_steps)


def pipeline() -> None:
    count_messages()
    net = PipelineModule(list(made()), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=settings(0))
    data = iter(batches(0, STEPS * ACCUMULATED))
    for _ in range(STEPS):
        show(engine.train_batch(data))
    tell(engine.global_steps)


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    kind, groups = sys.argv[1], int(sys.argv[2])
    if kind == "pipe":
        pipeline()
    else:
        zero(int(kind), groups)
    dist.barrier()
    dist.destroy_process_group()
    os.write(1, b"job done\n")


if __name__ == "__main__":
    main()
