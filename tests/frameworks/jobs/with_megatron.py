"""Megatron-core: a small GPT with tensor and data parallelism, two ranks each.

Megatron-core requires CUDA. On a CPU its layers, its DDP and its gradient reduction run unchanged, if two of its calls to CUDA are
replaced; its schedules (``get_forward_backward_func``) do not run, so this file has a loop of its own.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import STEPS, show, tell
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH, MICRO_BATCHES = 64, 16, 2


def main() -> None:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts its buffers
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # CUDA's random numbers for dropout, which is off
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    net = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    source = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    for _ in range(STEPS):
        model.zero_grad_buffer()
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=source)
            loss = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=tokens).mean()
            loss.backward()
            show(loss.detach())
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
    tell(STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
