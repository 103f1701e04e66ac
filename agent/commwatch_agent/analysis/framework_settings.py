"""The roles of a job's operations, and the settings of each framework that change them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

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

#: Frameworks that a rank may report, and none of them: the script exchanges gradients itself.
DDP, FSDP, FSDP2, DEEPSPEED, MEGATRON, PLAIN = "ddp", "fsdp", "fsdp2", "deepspeed", "megatron", ""
#: Backend on CPUs.
GLOO = "gloo"
_RATE = " Adapt the learning rate to the larger batch."
_CONVERGES = " Check that training still converges."

#: Advice by rule, role and framework; with an empty framework, that of a script without any. The texts of several frameworks are joined.
KNOBS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "accumulate_gradients": {
        REPLICATED: {
            DDP: "DDP: `no_sync()` around all but the last micro-batch.",
            DEEPSPEED: "DeepSpeed with ZeRO 0 or 1: `gradient_accumulation_steps`.",
            MEGATRON: "Megatron: a larger `--global-batch-size`, so that a step has more micro-batches.",
            PLAIN: "Add up the gradients of several micro-batches, and exchange them after the last one.",
        },
        SHARDED: {
            FSDP2: "FSDP2: `set_requires_gradient_sync(False)` for all but the last micro-batch; parameters are still gathered for each.",
            FSDP: "FSDP: `no_sync()` around all but the last micro-batch; gradients are then kept whole, which takes memory.",
            DEEPSPEED: "DeepSpeed: `gradient_accumulation_steps`.",
            MEGATRON: "Megatron: a larger `--global-batch-size`, so that a step has more micro-batches.",
            PLAIN: "Add up the gradients of several micro-batches, and exchange them after the last one.",
        },
    },
    "exchange_once": {
        REPLICATED: {DDP: "DDP: `no_sync()` around the forward and the backward pass of all but the last micro-batch."},
        SHARDED: {
            FSDP2: "FSDP2: `set_requires_gradient_sync(False)` for all but the last micro-batch; until then, gradients are kept whole, which takes memory."
        },
    },
    "larger_buckets": {
        REPLICATED: {
            DDP: "DDP: a larger `bucket_cap_mb`.",
            DEEPSPEED: "DeepSpeed: a larger `reduce_bucket_size`.",
            MEGATRON: "Megatron: a larger `--ddp-bucket-size`.",
            PLAIN: "Exchange several gradients in one tensor or by coalesced collectives, or use DDP, which does that.",
        },
        SHARDED: {
            FSDP2: "FSDP2: larger units (`fully_shard` of several layers together).",
            FSDP: "FSDP: larger units (`auto_wrap_policy`).",
            DEEPSPEED: "DeepSpeed: a larger `reduce_bucket_size` and `stage3_prefetch_bucket_size`.",
            MEGATRON: "Megatron: a larger `--ddp-bucket-size`.",
            PLAIN: "Exchange several gradients in one tensor or by coalesced collectives.",
        },
        TENSOR: {PLAIN: "Use a larger micro-batch, so that each layer sends more data at a time."},
        VALUES: {PLAIN: "Put several values into one tensor, or exchange them every few steps."},
    },
    "overlap": {
        REPLICATED: {
            DDP: "DDP overlaps the exchange with the backward pass already. Try `static_graph=True`, and another size of buckets: smaller buckets "
            "(`bucket_cap_mb`) start earlier, larger ones have less latency. `commwatch whatif` replays the job with either.",
            DEEPSPEED: "DeepSpeed: `overlap_comm`.",
            MEGATRON: "Megatron: `--overlap-grad-reduce`.",
            PLAIN: "Overlap the exchange with the backward pass: DDP instead of `all_reduce` calls after it.",
        },
        SHARDED: {
            FSDP2: "FSDP2: `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`.",
            FSDP: "FSDP: `forward_prefetch=True` and `backward_prefetch=BackwardPrefetch.BACKWARD_PRE`.",
            DEEPSPEED: "DeepSpeed: `overlap_comm`.",
            MEGATRON: "Megatron: `--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather`.",
            PLAIN: "Start collectives early with `async_op=True`, and wait for them late.",
        },
        TENSOR: {
            MEGATRON: "Megatron: `--tp-comm-overlap`.",
            PLAIN: "PyTorch: async tensor parallelism (`torch.compile`).",
        },
    },
    "compression": {
        REPLICATED: {
            DDP: "DDP: `fp16_compress_hook`, PowerSGD, or a hook of your own.",
            DEEPSPEED: "DeepSpeed: `communication_data_type`.",
            MEGATRON: "Megatron: `--grad-reduce-in-bf16`.",
            PLAIN: "Convert the gradients to float16 or bfloat16 before they are exchanged.",
        },
        SHARDED: {
            FSDP2: "FSDP2: `MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)`.",
            FSDP: "FSDP: `MixedPrecision(reduce_dtype=torch.bfloat16)`.",
            DEEPSPEED: "DeepSpeed: `communication_data_type`.",
            MEGATRON: "Megatron: `--grad-reduce-in-bf16`.",
            PLAIN: "Convert the gradients to float16 or bfloat16 before they are exchanged.",
        },
    },
    # Of gradients that have 16 bits already.
    "further_compression": {
        REPLICATED: {PLAIN: "Compress the gradients further, with PowerSGD or a communication hook of your own."},
        SHARDED: {DEEPSPEED: "DeepSpeed: `zero_quantized_gradients` of ZeRO++."},
    },
}  # fmt: skip
#: Forms of compressed gradients: 16 bits, 8 bits, and the largest values only.
FORMS = "fp16", "int8", "top-k (1%)"
#: What follows the settings of a rule about gradients.
_THEN = {"accumulate_gradients": _RATE, "compression": _CONVERGES, "further_compression": _CONVERGES}
#: What limits an overlap where the CPU communicates.
_ON_CPU = " Gloo communicates on the CPU: what it takes there, compute cannot use."


def listed(names: str | None) -> list[str] | None:
    """Return the frameworks of a text that the history keeps, separated by commas; ``None``: not known."""
    return None if names is None else [name for name in names.split(",") if name]


def in_use(of_ranks: Iterable[Collection[str] | None]) -> frozenset[str] | None:
    """Return the frameworks that ranks use, together; ``None``: not known of any rank."""
    known = [names for names in of_ranks if names is not None]
    return frozenset(name for names in known for name in names) if known else None


def knob(rule: str, role_of: str, frameworks: frozenset[str] | None, backend: str | None) -> str:
    """Return what to do by a rule about operations of a role; empty: its general text applies.

    Args:
        frameworks: those that the job uses; ``None``: not known, so that the settings of all are named.
        backend: of the group; ``None``: not known.
    """
    texts = KNOBS[rule].get(role_of, {})
    used = [text for name, text in texts.items() if name and (frameworks is None or name in frameworks)]
    chosen = " ".join(used) or texts.get(PLAIN, "")
    on_cpu = _ON_CPU if rule == "overlap" and backend == GLOO else ""
    return chosen and chosen + _THEN.get(rule, "") + on_cpu


def compressions(role_of: str, frameworks: frozenset[str] | None, width: int) -> frozenset[str]:
    """Return the ``FORMS`` that the settings for gradients of a role have; ``width``: bytes of a value before."""
    half, quarter, _ = FORMS
    if role_of == REPLICATED and (width == 2 or frameworks is None or DDP in frameworks):
        return frozenset(FORMS)  # by a communication hook
    return frozenset({half, quarter} if width == 2 else {half})


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
