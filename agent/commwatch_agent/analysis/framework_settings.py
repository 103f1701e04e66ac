"""The roles of a job's operations, and the settings of each framework that change them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Smaller operations (in bytes) carry losses and metrics, not gradients.
LEAST_GRADIENTS = 16 << 10
#: Roles of operations.
REPLICATED, SHARDED, TENSOR, VALUES, OTHER = "replicated", "sharded", "tensor", "values", "other"
#: Labels of groups that do not carry gradients.
_NOT_GRADIENTS = re.compile(
    r"tensor|\btp|_tp|pipe|\bpp|_pp|expert|\bep|_ep|context|\bcp|_cp|sequence|\bsp|_sp|model", re.I
)
#: Labels of groups that do, even if they match the pattern above too: data and context parallelism in one group.
_GRADIENTS = re.compile(r"(^|_)dp(_|$)|data", re.I)
_TENSOR = re.compile(r"tensor|\btp|_tp|model", re.I)
_PIPELINE = re.compile(r"pipe|\bpp|_pp", re.I)

#: Advice by rule and role, in place of the rule's general text.
KNOBS: Mapping[str, Mapping[str, str]] = {
    "accumulate_gradients": {
        REPLICATED: "DDP: `no_sync()` around all but the last micro-batch; DeepSpeed with ZeRO 0 or 1: `gradient_accumulation_steps`. Adapt "
        "the learning rate to the larger batch.",
        SHARDED: "FSDP2: `set_requires_gradient_sync(False)` for all but the last micro-batch; parameters are still gathered for each. Adapt the "
        "learning rate to the larger batch.",
    },
    "larger_buckets": {
        REPLICATED: "DDP: a larger `bucket_cap_mb`; DeepSpeed: a larger `reduce_bucket_size`; Megatron: a larger `--ddp-bucket-size`.",
        SHARDED: "FSDP2: larger units (`fully_shard` of several layers together); DeepSpeed: a larger `reduce_bucket_size` and "
        "`stage3_prefetch_bucket_size`.",
        TENSOR: "Use a larger micro-batch, so that each layer sends more data at a time.",
        VALUES: "Put several values into one tensor, or exchange them every few steps.",
    },
    "overlap": {
        REPLICATED: "Overlap the exchange with the backward pass: DDP instead of `all_reduce` calls after it; DeepSpeed: `overlap_comm`; "
        "Megatron: `--overlap-grad-reduce`.",
        SHARDED: "FSDP2: `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`; DeepSpeed: `overlap_comm`; "
        "Megatron: `--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather`.",
        TENSOR: "Megatron: `--tp-comm-overlap`; PyTorch: async tensor parallelism (`torch.compile`).",
    },
    "compression": {
        REPLICATED: "DDP: `fp16_compress_hook` or `bf16_compress_hook`, PowerSGD, an int8 or top-k hook; DeepSpeed: "
        "`communication_data_type`; Megatron: `--grad-reduce-in-bf16`. Check that training still converges.",
        SHARDED: "FSDP2: `MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)`; DeepSpeed: `communication_data_type`. Check that training "
        "still converges.",
    },
}  # fmt: skip


def is_tensor(label: str) -> bool:
    """Return whether the label of a group names tensor parallelism."""
    return _TENSOR.search(label) is not None


def is_pipeline(label: str) -> bool:
    """Return whether the label of a group names pipeline parallelism."""
    return _PIPELINE.search(label) is not None


def is_model(label: str) -> bool:
    """Return whether the label of a group names model parallelism, which exchanges no gradients."""
    return _NOT_GRADIENTS.search(label) is not None and _GRADIENTS.search(label) is None


def role(label: str, op: str, size_bytes: float, sharded: bool) -> str:
    """Return the role of operations.

    Args:
        label: the label of their group.
        size_bytes: their mean size.
        sharded: whether a data parallel group of the job has both all_gathers and reduce_scatters (with HSDP, another group has
            the all_reduces).
    """
    if size_bytes < LEAST_GRADIENTS:
        return VALUES
    if _TENSOR.search(label):
        return TENSOR
    if is_model(label):
        return OTHER
    if sharded and op in ("all_gather", "reduce_scatter", "all_reduce"):
        return SHARDED
    return REPLICATED if op in ("all_reduce", "reduce_scatter") else OTHER
