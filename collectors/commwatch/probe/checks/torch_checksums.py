"""The checksum of a tensor's bits, by torch operations that only read it, on its device and its current stream.

It consists of two sums of the tensor's 64-bit words, modulo 2**64: the plain sum, which every flipped bit changes, and the sum of each word
times its position, which shows that values were swapped or shifted. Neither needs a temporary of the size of the tensor.
"""

from __future__ import annotations

import torch

#: Words in a row: a large tensor is summed as a matrix with rows of this length.
ROW = 4096
#: Integers of these sizes in bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return both sums as an ``int64`` tensor of shape [2]; the tensor must be dense and have memory."""
    words, rest = _words(tensor)
    plain, weighted = _sums(words, 0)
    if rest is not None:
        rest_plain, rest_weighted = _small(rest, len(words))
        plain, weighted = plain + rest_plain, weighted + rest_weighted
    return torch.stack((plain, weighted))


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bits of a tensor in the order of its memory as 64-bit words, and what is left over as smaller integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():  # in the order of its memory that is a view; a copy only if there are gaps
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    size = tensor.element_size()
    flat = tensor.reshape(-1).view(_INTEGERS[size])
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    whole = flat.numel() * size // 8 * 8 // size
    return flat[:whole].view(torch.int64), flat[whole:].to(torch.int64) if whole < flat.numel() else None


def _sums(words: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sums of words of which the first one has this position."""
    whole = len(words) // ROW * ROW
    if not whole:
        return _small(words, first)
    matrix = words[:whole].view(-1, ROW)
    columns, rows = matrix.sum(0), matrix.sum(1)
    plain, weighted = _small(columns, first)
    weighted = weighted + ROW * (rows * torch.arange(len(rows), device=rows.device)).sum()
    if whole < len(words):
        rest_plain, rest_weighted = _small(words[whole:], first + whole)
        plain, weighted = plain + rest_plain, weighted + rest_weighted
    return plain, weighted


def _small(words: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(first + 1, first + 1 + len(words), device=words.device)
    return words.sum(), (words * positions).sum()
