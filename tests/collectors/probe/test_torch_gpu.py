"""Which GPU a trainer computes on: found through a ``torch.cuda`` made by hand, and written to the names file by the probe."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commwatch.probe.torch_gpu import Finder
from commwatch.probe.torch_python import PythonProbe
from commwatch.wire import ring
from commwatch.wire.ring_reader import RingReader
from tests.helpers import identity

UUID = "5a0e1f2c-3b4d-4e6f-8a9b-00000000000{}"


class Cuda:
    """What the finder asks of ``torch.cuda``: eight cards, memory of torch's on some of them."""

    def __init__(self, current: int = 0, used: tuple[int, ...] = (), initialized: bool = True, **more: Any) -> None:
        self.current, self.used, self.initialized, self.more = current, used, initialized, more
        self.asked = 0

    def _is_compiled(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        assert self.initialized, "this would begin with CUDA"
        return self.current

    def device_count(self) -> int:
        return 8

    def memory_allocated(self, at: int) -> int:
        return 512 * (at in self.used)

    def get_device_properties(self, at: int) -> Any:
        assert self.initialized, "this would begin with CUDA"
        self.asked += 1
        return SimpleNamespace(**{"uuid": UUID.format(at), **self.more})


def found(cuda: Cuda, **env: str) -> dict[str, Any] | None:
    """The result of one attempt."""
    return Finder(env, cuda).find()


def test_cuda_is_left_alone() -> None:
    """While the program has not initialised CUDA, CUDA is not queried and nothing is found; this torch is an example."""
    assert found(Cuda(initialized=False)) is None
    if not torch.cuda.is_available():
        assert Finder({}).find() is None
        assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("current", "used", "index"),
    [
        (3, (3,), 3),
        (0, (3,), 3),  # a script that says cuda:3 in each call
        (0, (0, 3), 0),
        (1, (0, 3), None),  # several, and not the current one: not to be known yet
        (0, (), None),
    ],
)
def test_which_device(current: int, used: tuple[int, ...], index: int | None) -> None:
    """The current device where torch has memory there, else the only one where it has."""
    entry = found(Cuda(current, used))
    assert (entry and entry["index"]) == index
    if entry is not None:
        assert entry == {"uuid": UUID.format(index), "bus_id": "", "index": index}


def test_patience() -> None:
    """A process that keeps its memory elsewhere is believed its current device after a while."""
    finder = Finder({}, Cuda(5))
    looks = [finder.find() for _ in range(20)]
    assert looks[:19] == [None] * 19
    assert looks[19] is not None
    assert looks[19]["index"] == 5


def test_allocator_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an allocator that does not report its memory, the current device is returned."""

    def refuse(at: int) -> int:
        raise RuntimeError("not supported")

    cuda = Cuda(2)
    monkeypatch.setattr(cuda, "memory_allocated", refuse)
    assert (found(cuda) or {})["index"] == 2


def test_pci_address() -> None:
    """A torch that knows the PCI address returns it as Linux writes it."""
    entry = found(Cuda(0, (0,), pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0))
    assert (entry or {})["bus_id"] == "0000:3b:00.0"


def test_rocm_uuid() -> None:
    """ROCm's serial number, which torch writes as the bytes of its letters, is returned as the driver writes it."""
    letters = b"ba03d2c48a120001".hex()
    told = f"{letters[:8]}-{letters[8:12]}-{letters[12:16]}-{letters[16:20]}-{letters[20:]}"
    assert (found(Cuda(0, (0,), uuid=told)) or {})["uuid"] == "ba03d2c48a120001"


@pytest.mark.parametrize(
    ("env", "mig"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-11111111-0000-4000-8000-000000000000"},
            "MIG-11111111-0000-4000-8000-000000000000",
        ),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5a0e1f2c"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({}, None),
    ],
)
def test_visible_devices(env: dict[str, str], mig: str | None) -> None:
    """Of ``CUDA_VISIBLE_DEVICES`` only the name of a MIG instance says more than torch does: numbers mean nothing outside."""
    assert (found(Cuda(0, (0,)), **env) or {}).get("mig") == mig


def probe(tmp_path: Path, cuda: Any) -> PythonProbe:
    """A probe with a ring of its own, which queries ``cuda``."""
    made = PythonProbe({"COMMWATCH_DIR": str(tmp_path)})
    made.ring = ring.RingWriter(tmp_path / "one.ring", identity(pid=os.getpid()), 128)
    made._gpu = Finder({}, cuda)
    return made


def names(made: PythonProbe) -> list[dict[str, Any]]:
    """The content of the names file, without the frameworks."""
    assert made.ring is not None
    return [entry for entry in RingReader(made.ring.path).names() if "frameworks" not in entry]


def test_told_once(tmp_path: Path) -> None:
    """The probe writes the GPU at the first step mark at which it is known, once, and never queries again."""
    cuda = Cuda(3, (), initialized=False)
    made = probe(tmp_path, cuda)
    made._mark(0, 1, 2, False)
    assert names(made) == []
    cuda.initialized, cuda.used = True, (3,)
    for _ in range(3):
        made._mark(0, 1, 2, False)
    assert names(made) == [{"gpu": {"uuid": UUID.format(3), "bus_id": "", "index": 3}}]
    assert cuda.asked == 1


def test_never_raises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever torch does, the training continues, the probe stays on, and the error is printed once."""

    class Broken(Cuda):
        def current_device(self) -> int:
            raise AssertionError("CUDA is in a bad state")

    made = probe(tmp_path, Broken())
    for _ in range(3):
        made._mark(0, 1, 2, False)
    assert (made.off, names(made)) == (False, [])
    assert capfd.readouterr().err.count("cannot determine the GPU") == 1


def test_torch_without_cuda(tmp_path: Path) -> None:
    """A torch that was built without CUDA is queried once."""
    cuda = Cuda(initialized=False)
    cuda._is_compiled = lambda: False  # type: ignore[method-assign]
    made = probe(tmp_path, cuda)
    made._mark(0, 1, 2, False)
    assert made._gpu is None
