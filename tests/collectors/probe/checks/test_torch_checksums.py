"""Checksums of tensors: what they see, and that they agree with the definition."""

from __future__ import annotations

import random

import pytest
import torch

from commwatch.probe.checks.torch_checksums import ROW, checksum

MASK = (1 << 64) - 1


def by_definition(tensor: torch.Tensor) -> list[int]:
    """Both sums of a contiguous tensor, from its bytes: 64-bit words, then what is left over as integers of the tensor's own size."""
    size = tensor.element_size()
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words += [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(whole, len(data), size)]
    return [sum(words) & MASK, sum(at * word for at, word in enumerate(words, 1)) & MASK]


def sums_of(tensor: torch.Tensor) -> list[int]:
    """Both sums, from 0 to 2**64 - 1."""
    return [value & MASK for value in checksum(tensor).tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 64, ROW, 2 * ROW + 1, 5 * ROW + 77])
def test_definition(size: int, dtype: torch.dtype) -> None:
    """The sums are those of the definition, for sizes that fill no word, no row, or some."""
    torch.manual_seed(size)
    tensor = (100 * torch.randn(size)).to(dtype)
    assert sums_of(tensor) == by_definition(tensor)


def test_no_copy_of_the_whole() -> None:
    """A large tensor is summed with little memory beside it."""
    tensor = torch.randn(1 << 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        checksum(tensor)
    most = max(event.cpu_memory_usage for event in profile.events() or ())
    assert most <= 16 * ROW


def test_layouts() -> None:
    """Views, other memory formats, complex numbers, scalars and gaps have sums of their values; a shifted start changes nothing."""
    values = torch.randn(2, 3, 4, 5)
    last = values.to(memory_format=torch.channels_last)
    assert sums_of(last) == by_definition(last.permute(0, 2, 3, 1).contiguous())
    assert sums_of(values.transpose(0, 3)) == sums_of(values)
    assert sums_of(values[:, :, :, ::2]) == by_definition(values[:, :, :, ::2].contiguous())
    longer = torch.cat((torch.zeros(1), values.reshape(-1)))
    assert sums_of(longer[1:]) == sums_of(values)
    assert sums_of(torch.tensor(3.0)) == by_definition(torch.tensor([3.0]))
    number = torch.randn(6, dtype=torch.complex64)
    assert sums_of(number) == by_definition(torch.view_as_real(number).contiguous())
    assert sums_of(torch.zeros(0)) == [0, 0]
    assert sums_of(torch.nn.Parameter(values)) == sums_of(values)


def test_flips() -> None:
    """Each of 1,000 random flips of one bit changes the plain sum."""
    drawn = random.Random(0)
    tensor = torch.randn(3 * ROW + 11)
    before, bits = sums_of(tensor), tensor.view(torch.int32)
    for _ in range(1000):
        at, bit = drawn.randrange(len(bits)), drawn.randrange(32)
        flipped = 1 << bit if bit < 31 else -(1 << 31)
        bits[at] ^= flipped
        assert sums_of(tensor)[0] != before[0]
        bits[at] ^= flipped
    assert sums_of(tensor) == before


def test_moved_values() -> None:
    """Swapped and shifted values leave the plain sum, and change the weighted one."""
    tensor = torch.arange(1, 4 * ROW + 1, dtype=torch.int64)
    plain, weighted = sums_of(tensor)
    swapped = tensor.clone()
    swapped[[5, 2 * ROW + 9]] = tensor[[2 * ROW + 9, 5]]
    for other in (swapped, tensor.roll(1), tensor.roll(ROW), tensor.flip(0)):
        assert sums_of(other)[0] == plain
        assert sums_of(other)[1] != weighted


def test_reads_only() -> None:
    """A checksum changes neither the values nor their version, and its result needs no gradient."""
    parameter = torch.nn.Parameter(torch.randn(100))
    before, version = parameter.detach().clone(), parameter._version
    assert not checksum(parameter).requires_grad
    assert torch.equal(parameter, before)
    assert parameter._version == version
