"""The played CUDA driver, through ctypes: what it promises to the real PyTorch and NCCL (``make test-cuda``)."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_rig.build import DRIVER, NotAvailable, build
from tests.cuda_rig.client import DISABLE_TIMING, GLOBAL, SETTINGS, SLOW_KERNEL_MS, Driver
from tests.helpers import clean_env

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600)]

NOT_READY, NOT_SUPPORTED, UNAVAILABLE, NOT_INITIALIZED = 600, 801, 46, 3
UNSUPPORTED, INVALIDATED = 900, 901  # CUDA_ERROR_STREAM_CAPTURE_...


@pytest.fixture(scope="module")
def library() -> Path:
    """The driver's library, built."""
    try:
        return build() / "libcuda.so.1"
    except NotAvailable as reason:
        pytest.skip(f"the played driver cannot be built: {reason}")


@pytest.fixture(scope="module")
def cuda(library: Path) -> Iterator[Driver]:
    """The driver, with the settings of these tests; its settings are read once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield Driver(library)


@pytest.fixture
def alone(library: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a function of this module's with a driver, in a process of its own with more settings; returns what it printed, as JSON."""

    def run(function: str, *args: object, **settings: str) -> dict[str, Any]:
        program = (
            f"from tests.cuda_rig import test_driver as t; t.{function}(t.Driver(t.Path({str(library)!r})), *{args!r})"
        )
        env = clean_env(**{"PYTHONPATH": str(DRIVER.parents[2]), **SETTINGS, **settings})
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    return run


def test_devices(cuda: Driver) -> None:
    """There are as many devices as asked for, and each has an H100's name, attributes, memory, and a bus and UUID of its own."""
    count, value, total = c_int(), c_int(), c_size_t()
    cuda.call("cuDeviceGetCount", byref(count))
    assert count.value == 2
    cuda.call("cuDeviceTotalMem_v2", byref(total), 0)
    assert total.value == 85_520_809_984
    for attribute, wanted in ((75, 9), (76, 0), (16, 132), (10, 32), (13, 1_980_000)):
        cuda.call("cuDeviceGetAttribute", byref(value), attribute, 1)
        assert value.value == wanted
    buses, uuids = set(), set()
    for device in range(2):
        text, uuid = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
        cuda.call("cuDeviceGetName", text, 64, device)
        assert text.value == b"NVIDIA H100 80GB HBM3"
        cuda.call("cuDeviceGetPCIBusId", text, 64, device)
        buses.add(text.value)
        cuda.call("cuDeviceGetByPCIBusId", byref(value), text.value)
        assert value.value == device
        cuda.call("cuDeviceGetUuid_v2", uuid, device)
        uuids.add(uuid.raw)
    assert buses == {b"0000:1B:00.0", b"0000:43:00.0"}
    assert len(uuids) == 2
    assert cuda.result("cuDeviceGet", byref(value), 2) == 101


def test_visible_devices(alone: Callable[..., dict[str, Any]]) -> None:
    """CUDA_VISIBLE_DEVICES chooses among the devices."""
    assert alone("print_devices", CUDA_VISIBLE_DEVICES="1")["buses"] == ["0000:43:00.0"]


def print_devices(cuda: Driver) -> None:
    """In a process of its own: the buses of all devices."""
    count, text, buses = c_int(), ctypes.create_string_buffer(64), []
    cuda.call("cuDeviceGetCount", byref(count))
    for device in range(count.value):
        cuda.call("cuDeviceGetPCIBusId", text, 64, device)
        buses.append(text.value.decode())
    print(json.dumps({"buses": buses}))


def test_memory(cuda: Driver) -> None:
    """A device's memory is copied to and from, filled, told from the host's, and given back."""
    free, before, total = c_size_t(), c_size_t(), c_size_t()
    cuda.call("cuMemGetInfo_v2", byref(before), byref(total))
    at, back = cuda.allocate(4096), ctypes.create_string_buffer(8)
    cuda.call("cuMemGetInfo_v2", byref(free), byref(total))
    assert before.value - free.value == 4096
    cuda.call("cuMemcpyHtoD_v2", at, b"abcdefgh", c_size_t(8))
    cuda.call("cuMemsetD8_v2", c_uint64(at.value + 2), 0x2A, c_size_t(3))
    cuda.call("cuMemcpyDtoH_v2", back, at, c_size_t(8))
    assert back.raw == b"ab***fgh"
    kind = c_int()
    cuda.call("cuPointerGetAttribute", byref(kind), 2, at)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert kind.value == 2
    assert cuda.result("cuPointerGetAttribute", byref(kind), 2, c_uint64(ctypes.addressof(back))) == 1
    cuda.call("cuMemFree_v2", at)
    cuda.call("cuMemGetInfo_v2", byref(free), byref(total))
    assert free.value == before.value


def test_shared_memory(cuda: Driver, alone: Callable[..., dict[str, Any]]) -> None:
    """Another process maps a device's memory, reads what is in it, and what it writes is seen."""
    at, handle = cuda.allocate(1 << 21), ctypes.create_string_buffer(64)
    cuda.call("cuMemcpyHtoD_v2", at, b"from here", c_size_t(9))
    cuda.call("cuIpcGetMemHandle", handle, at)
    assert alone("answer_in_shared", handle.raw) == {"read": "from here"}
    back = ctypes.create_string_buffer(10)
    cuda.call("cuMemcpyDtoH_v2", back, at, c_size_t(10))
    assert back.raw == b"from there"
    cuda.call("cuMemFree_v2", at)


def answer_in_shared(cuda: Driver, raw: bytes) -> None:
    """In a process of its own: read from the memory behind a handle, and write to it."""

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_char * 64),)

    at, read = c_uint64(), ctypes.create_string_buffer(9)
    cuda.call("cuIpcOpenMemHandle_v2", byref(at), Handle.from_buffer_copy(raw), 1)
    cuda.call("cuMemcpyDtoH_v2", read, at, c_size_t(9))
    cuda.call("cuMemcpyHtoD_v2", at, b"from there", c_size_t(10))
    cuda.call("cuIpcCloseMemHandle", at)
    print(json.dumps({"read": read.raw.decode()}))


def test_time_on_a_stream(cuda: Driver) -> None:
    """Work takes its time, no call waits for it, and the time between events is exactly that of the work between them."""
    stream, began = cuda.stream(), time.monotonic()
    with cuda.held(stream):
        first = cuda.recorded(stream)
        for _ in range(3):
            cuda.launch(stream)
        last = cuda.recorded(stream)
        assert cuda.result("cuEventQuery", last) == cuda.result("cuStreamQuery", stream) == NOT_READY
    assert cuda.elapsed_ms(first, last) == pytest.approx(3 * SLOW_KERNEL_MS, abs=1e-5)
    assert time.monotonic() - began >= 3 * SLOW_KERNEL_MS / 1e3
    assert cuda.result("cuEventQuery", last) == cuda.result("cuStreamQuery", stream) == 0


def test_streams_are_concurrent(cuda: Driver) -> None:
    """Work on two streams overlaps, unless one waits for an event of the other."""
    one, two = cuda.stream(), cuda.stream()
    with cuda.held(one):
        began = cuda.recorded(one)
        cuda.call("cuStreamWaitEvent", two, began, 0)
        cuda.launch(one)
        cuda.launch(two)
        ended = cuda.recorded(two)
    assert cuda.elapsed_ms(began, ended) == pytest.approx(SLOW_KERNEL_MS, abs=1e-5)

    with cuda.held(one):
        began = cuda.recorded(one)
        cuda.launch(one)
        cuda.call("cuStreamWaitEvent", two, cuda.recorded(one, DISABLE_TIMING), 0)
        cuda.launch(two)
        ended = cuda.recorded(two)
    assert cuda.elapsed_ms(began, ended) == pytest.approx(2 * SLOW_KERNEL_MS, abs=1e-5)


def test_host_function(cuda: Driver) -> None:
    """A function of the host's runs in stream order, and the stream waits for its end."""
    stream, calls = cuda.stream(), []

    def slow(data: int) -> None:
        time.sleep(0.05)
        calls.append(data)

    function = ctypes.CFUNCTYPE(None, c_void_p)(slow)
    with cuda.held(stream):
        before = cuda.recorded(stream)
        cuda.call("cuLaunchHostFunc", stream, function, c_void_p(7))
        after = cuda.recorded(stream)
        assert calls == []
    assert cuda.elapsed_ms(before, after) >= 50
    assert calls == [7]


def test_capture_is_disturbed(cuda: Driver, tmp_path: Path) -> None:
    """A query of another thread fails and breaks a global capture; the report names its function."""
    stream, event, graph = cuda.stream(), cuda.recorded(cuda.stream()), c_void_p()
    before = cuda.report(tmp_path / "before")
    cuda.call("cuStreamBeginCapture_v2", stream, GLOBAL)
    cuda.launch(stream)
    assert cuda.elsewhere("cuEventQuery", event) == UNSUPPORTED
    assert cuda.result("cuStreamEndCapture", stream, byref(graph)) == INVALIDATED
    after = cuda.report(tmp_path / "after")
    assert after["captures_disturbed"] == before["captures_disturbed"] + 1
    assert any(who.startswith("cuEventQuery in ") for who in after["disturbed"])


def test_relaxed_thread_disturbs_no_capture(cuda: Driver) -> None:
    """After cuThreadExchangeStreamCaptureMode(RELAXED), a thread may query during another one's capture."""
    stream, event, graph = cuda.stream(), cuda.recorded(cuda.stream()), c_void_p()
    cuda.call("cuStreamBeginCapture_v2", stream, GLOBAL)
    cuda.launch(stream)
    assert cuda.elsewhere("cuEventQuery", event, relaxed=True) == 0
    cuda.call("cuStreamEndCapture", stream, byref(graph))
    cuda.call("cuGraphDestroy", graph)


def test_graph_is_replayed(cuda: Driver, tmp_path: Path) -> None:
    """What is captured does not run; each replay of its graph runs it in order, also what another stream took part with."""
    one, two, graph, exec_ = cuda.stream(), cuda.stream(), c_void_p(), c_void_p()
    before = cuda.report(tmp_path / "before")
    at, back = cuda.allocate(64), (ctypes.c_uint8 * 64)()
    cuda.call("cuMemsetD8_v2", at, 0, c_size_t(64))
    cuda.call("cuStreamBeginCapture_v2", one, GLOBAL)
    cuda.launch(one)
    cuda.call("cuStreamWaitEvent", two, cuda.recorded(one, DISABLE_TIMING), 0)
    cuda.launch(two)
    cuda.call("cuMemsetD8Async", at, 5, c_size_t(64), two)
    cuda.call("cuStreamWaitEvent", one, cuda.recorded(two, DISABLE_TIMING), 0)
    cuda.call("cuStreamEndCapture", one, byref(graph))
    count = c_size_t()
    cuda.call("cuGraphGetNodes", graph, None, byref(count))
    assert count.value == 3
    cuda.call("cuMemcpyDtoH_v2", back, at, c_size_t(64))
    assert bytes(back) == bytes(64)

    cuda.call("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0))
    with cuda.held(one):
        began = cuda.recorded(one)
        for _ in range(2):
            cuda.call("cuGraphLaunch", exec_, one)
        ended = cuda.recorded(one)
    # A fill takes 2 µs, and 64 bytes at 50 GB/s.
    assert cuda.elapsed_ms(began, ended) == pytest.approx(4 * SLOW_KERNEL_MS + 2 * 0.002001, abs=1e-5)
    cuda.call("cuMemcpyDtoH_v2", back, at, c_size_t(64))
    assert bytes(back) == bytes([5]) * 64
    after = cuda.report(tmp_path / "after")
    assert after["graphs_launched"] == before["graphs_launched"] + 2
    assert after["kernel_names"]["slow"] == before["kernel_names"].get("slow", 0) + 4


def test_report_counts_calls(cuda: Driver, tmp_path: Path) -> None:
    """The report counts calls by function and thread, and events by kind."""
    event = cuda.recorded(cuda.stream(), DISABLE_TIMING)
    before = cuda.report(tmp_path / "before")
    for _ in range(3):
        cuda.result("cuEventQuery", event)
    cuda.elsewhere("cuEventQuery", event)
    cuda.event()
    after = cuda.report(tmp_path / "after")
    none: dict[str, Any] = {"calls": 0, "threads": {}}
    old, new = (report["functions"].get("cuEventQuery", none) for report in (before, after))
    assert new["calls"] == old["calls"] + 4
    (me,) = (name for name in new["threads"] if name.endswith(f"/{threading.get_native_id()}"))
    assert new["threads"][me] == old["threads"].get(me, 0) + 3
    assert len(new["threads"].keys() - old["threads"].keys() - {me}) == 1
    assert after["events_timed"] == before["events_timed"] + 1
    assert after["events_plain"] == before["events_plain"]


def test_report_at_exit(alone: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A process writes its report at exit, under its rank."""
    alone("print_devices", PLAYED_REPORT=str(tmp_path / "played-%r.json"), RANK="3")
    assert (
        json.loads((tmp_path / "played-3.json").read_text(encoding="utf-8"))["functions"]["cuDeviceGetCount"]["calls"]
        == 1
    )


def test_functions_that_are_not_played(cuda: Driver, tmp_path: Path) -> None:
    """A function that is not played fails, by its symbol and by its address, and the report names it."""
    assert cuda.result("cuArrayCreate_v2", None, None) == NOT_SUPPORTED
    address = c_void_p()
    for name in (b"cuTexRefCreate", b"cuOfNextYear"):
        cuda.call("cuGetProcAddress_v2", name, byref(address), 13000, c_uint64(0), None)
        assert ctypes.CFUNCTYPE(c_int)(address.value or 0)() == NOT_SUPPORTED
    assert {"cuArrayCreate_v2", "cuTexRefCreate", "cuOfNextYear"} <= cuda.report(tmp_path / "report")["missing"].keys()


def test_addresses_of_versions(cuda: Driver) -> None:
    """A name means the function of the version of CUDA that the caller was built for; one that is too new is not found."""
    address = c_void_p()

    def symbol(name: bytes, version: int) -> int | None:
        cuda.call("cuGetProcAddress_v2", name, byref(address), version, c_uint64(0), None)
        return address.value

    def own(name: str) -> int | None:
        return ctypes.cast(getattr(cuda.library, name), c_void_p).value

    assert symbol(b"cuCtxGetDevice", 12080) == own("cuCtxGetDevice")
    assert symbol(b"cuCtxGetDevice", 13000) == own("cuCtxGetDevice_v2")
    assert symbol(b"cuMemAlloc", 13000) == own("cuMemAlloc_v2")
    assert symbol(b"cuStreamQuery_ptsz", 13000) == own("cuStreamQuery")
    assert symbol(b"cuGraphInstantiate", 12000) == own("cuGraphInstantiateWithFlags")
    assert cuda.result("cuGetProcAddress_v2", b"cuInit", byref(address), 14000, c_uint64(0), None) == 500


def test_names_of_errors(cuda: Driver) -> None:
    """Errors have the names of cuda.h."""
    name = c_char_p()
    cuda.call("cuGetErrorName", NOT_READY, byref(name))
    assert name.value == b"CUDA_ERROR_NOT_READY"
    assert cuda.result("cuGetErrorName", 12345, byref(name)) == 1


def test_forked_child(cuda: Driver) -> None:
    """In a forked child the driver is not initialized, as CUDA's would be."""
    child = os.fork()
    if child == 0:
        os._exit(cuda.result("cuCtxGetDevice", byref(c_int())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == NOT_INITIALIZED


def test_device_loss(alone: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """From the moment at which the file of PLAYED_LOST exists, every call fails."""
    lost = tmp_path / "lost"
    assert alone("lose_devices", str(lost), PLAYED_LOST=str(lost)) == {"before": 0, "after": [UNAVAILABLE] * 4}


def lose_devices(cuda: Driver, path: str) -> None:
    """In a process of its own: the answers before the devices are lost, and after it."""
    stream = cuda.stream()
    event = cuda.recorded(stream)
    cuda.call("cuStreamSynchronize", stream)
    before = cuda.result("cuEventQuery", event)
    Path(path).touch()
    calls: tuple[tuple[Any, ...], ...] = (
        ("cuEventQuery", event),
        ("cuStreamQuery", stream),
        ("cuInit", 0),
        ("cuGraphUpload", None, None),
    )
    print(json.dumps({"before": before, "after": [cuda.result(*call) for call in calls]}))


def test_slow_driver(alone: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """While the file of PLAYED_SLOW exists, an event query takes as many milliseconds as it says."""
    slow = tmp_path / "slow"
    took = alone("query_slowly", str(slow), PLAYED_SLOW=str(slow))
    assert took["slow"] >= 0.08 > took["before"]


def query_slowly(cuda: Driver, path: str) -> None:
    """In a process of its own: the seconds of a query before the driver is slow, and meanwhile."""
    event = cuda.recorded(cuda.stream())
    took = {}
    for name in ("before", "slow"):
        began = time.monotonic()
        cuda.result("cuEventQuery", event)
        took[name] = time.monotonic() - began
        Path(path).write_text("80", encoding="utf-8")
    print(json.dumps(took))
