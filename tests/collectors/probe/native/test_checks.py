"""The native hook's checks of collectives: the same sums as torch's, and operations that ranks with different intervals have in common."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from commwatch.probe.checks.torch_checksums import checksum
from commwatch.probe.native import library
from tests.helpers import needs

DRIVER = Path(__file__).with_name("checks_driver.cpp")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, built."""
    needs(shutil.which("g++"), "g++")
    folder = tmp_path_factory.mktemp("checks")
    (folder / "format.h").write_text(library.format_header())
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]  # fmt: skip
    built = ["g++", *flags, f"-I{folder}", f"-I{library.HERE}", str(DRIVER), "-o", str(folder / "driver")]
    subprocess.run(built, check=True, timeout=250)
    return folder / "driver"


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_sums(driver: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The sums are those of the probe's torch operations, for all sizes of the rest, wherever the data begins."""
    torch.manual_seed(1)
    for size in (0, 1, 3, 8, 1009):
        tensor = tensor_of(dtype, size)
        for skipped in (0, 1, 6):
            assert sums_of(driver, tmp_path, tensor, skipped) == [unsigned(tensor)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_slices(driver: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The sums of slices are those of each slice by itself, of odd and of no length too."""
    torch.manual_seed(2)
    lengths = (3, 0, 1, 512, 1000, 0, 7)
    tensor = tensor_of(dtype, sum(lengths))
    assert sums_of(driver, tmp_path, tensor, 0, *lengths) == [unsigned(each) for each in tensor.split(lengths)]


def tensor_of(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Random values."""
    return (torch.randn(size) * 90).abs().to(dtype) if dtype is torch.uint8 else (torch.randn(size) * 900).to(dtype)


def unsigned(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sums that torch makes."""
    return tuple(each % 2**64 for each in checksum(tensor).tolist())


def sums_of(driver: Path, folder: Path, tensor: torch.Tensor, skipped: int, *lengths: int) -> list[tuple[int, ...]]:
    """The sums that the driver makes of slices with these lengths; by default of all."""
    (folder / "data").write_bytes(bytes(tensor.view(torch.uint8).tolist()))
    command = [str(driver), str(folder / "data"), *map(str, (tensor.element_size(), skipped, *lengths))]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [tuple(map(int, line.split())) for line in printed.splitlines()]


def chosen(driver: Path, every: int, budget: float, *windows: tuple[float, int]) -> list[list[int]]:
    """Which of the first 20,000 operations are checked after each window: its end in s, and the cost of its checks in ns."""
    given = " ".join(map(str, (every, budget, *(value for window in windows for value in window))))
    printed = subprocess.run([driver], input=given, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[int(number) for number in line.split()] for line in printed.splitlines()]


def test_interval(driver: Path) -> None:
    """One in so many operations is checked, the first included, at any period of the job's operations."""
    ((*every,),) = chosen(driver, 100, 0.001, (1, 0))
    assert len(every) == pytest.approx(200, rel=0.2)
    assert every[0] == 0
    for period in (2, 3, 13, 21, 34):  # operations of a step; the last three are those of the golden ratio
        assert {number % period for number in every} == set(range(period))
        of_one = [number for number in every if number % period == 0]
        assert len(of_one) == pytest.approx(200 / period, rel=0.5)
    assert chosen(driver, 1, 0.0, (1, 10**9), (2, 10**9)) == [list(range(20_000))] * 2


def test_budget(driver: Path) -> None:
    """Above the budget the interval is doubled, well below it halved again; a longer one has operations of the shorter ones only."""
    dear, cheap, fair = 2_000_000, 0, 500_000
    ends = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    found = chosen(driver, 100, 0.001, *zip(ends, (cheap, dear, dear, fair, cheap, cheap, cheap), strict=True))
    assert [round(20_000 / len(each) / 100) for each in found] == [1, 2, 4, 4, 2, 1, 1]
    assert set(found[2]) < set(found[1]) < set(found[0])
