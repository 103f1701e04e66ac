"""Readable labels of process groups: description, short framework role, or members. Never part of an identity. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from commwatch_agent.model.cells import OTHER

#: Megatron's group descriptions to the short names in its own settings.
_MEGATRON = {
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "inter_dp_cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ep_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "ep_dp",
    "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_ep_dp",
    "INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_ep_dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
_GLOO = "_GLOO"
#: torch's name of a group that was made without one: a number, or a hash of its members.
_NAMELESS = re.compile(r"\d+|[0-9a-f]{40}(_\d+)?")
_MOST_LISTED = 4
#: Most characters of torch's name of a group in a label.
MOST_NAME = 8


def label(name: str, description: str, ranks: Sequence[int] | None, size: int) -> str:
    """Return the label of a group, which is equal on all its ranks and never ``other``, the label of groups beyond a limit.

    Args:
        ranks: global ranks of its members; ``None``: not known.

    >>> label("7", "undefined", (0, 8, 16, 24, 32, 40, 48, 56), 8)
    'ranks 0-56 step 8'
    >>> label("7", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), 2)
    'tp'
    """
    found = _label(name, description, ranks, size)
    return f"{found} group" if found == OTHER else found


def _label(name: str, description: str, ranks: Sequence[int] | None, size: int) -> str:
    if description not in ("", "undefined") and not description.startswith("undefined:"):
        plain = description.removesuffix(_GLOO)
        return f"{_MEGATRON[plain]}{description[len(plain) :].lower()}" if plain in _MEGATRON else description
    if not _NAMELESS.fullmatch(name):
        return name
    if ranks:
        return _members(sorted(ranks))
    return f"{size} ranks {name[:MOST_NAME]}"


def _members(ranks: Sequence[int]) -> str:
    first, last, count = ranks[0], ranks[-1], len(ranks)
    if count == 1:
        return f"rank {first}"
    step = ranks[1] - first
    if count > 2 and list(ranks) == list(range(first, last + 1, step or 1)):
        return f"ranks {first}-{last}" if step == 1 else f"ranks {first}-{last} step {step}"
    if count <= _MOST_LISTED:
        return f"ranks {','.join(map(str, ranks))}"
    return f"{count} ranks {first}-{last}"
