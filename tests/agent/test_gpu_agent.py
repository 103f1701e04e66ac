"""A real agent over the stand-in for NVIDIA's library: ``/metrics``, ``/api/v1/gpus`` and ``doctor``, through every fault."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from commwatch_agent.commands.doctor import examine
from commwatch_agent.commands.network_checks import Check
from commwatch_agent.config_sources import load
from tests import prefork
from tests.agent.web.routes.test_jobs import rings_of
from tests.gpus import UUIDS, Script, build
from tests.helpers import (
    MS,
    RunningAgent,
    agent,
    clean_env,
    end_rank,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

INFO = 'commwatch_rank_info{{gpu="{gpu}",hook="native",job_id="job",local_rank="{rank}",rank="{rank}"}}'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the stand-in; agents that look for libraries there are forked."""
    folder = build(tmp_path_factory.mktemp("nvml")).parent
    with prefork.started_with("agent", LD_LIBRARY_PATH=str(folder)):
        yield folder


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """The script of the stand-in."""
    return Script(tmp_path / "script.txt")


@pytest.fixture
def running(library: Path, script: Script, tmp_path: Path) -> Iterator[RunningAgent]:
    """An agent that reads two cards, and two ranks on them in crosswise order."""
    env = clean_env(LD_LIBRARY_PATH=str(library), FAKE_NVML=str(script.path))
    directory = tmp_path / "run"
    with agent(directory, env=env) as started, trainer(started, 0, UUIDS[1]), trainer(started, 1, UUIDS[0]):
        wait_for(lambda: len(started.get("/api/v1/gpus")["gpus"]) == 2, "the cards")
        wait_for(lambda: len(ranks(started)) == 2, "the ranks")
        yield started


@contextmanager
def trainer(running: RunningAgent, rank: int, uuid: str) -> Iterator[None]:
    """A rank on a card, which spends a fifth of its steps communicating."""
    place = {"uuid": uuid.removeprefix("GPU-"), "bus_id": "", "index": 0}
    records = [mark(0, MS)]
    for n in range(1, 9):
        at = n * 100 * MS
        records += [operation(start_ns=at - 30 * MS, end_ns=at - 10 * MS, seq=n), mark(n, at)]
    writer = write_ring(rings_of(running.directory), records, [group_entry(), {"gpu": place}], rank=rank, hook="native")
    try:
        yield
    finally:
        end_rank(writer)


def ranks(running: RunningAgent) -> dict[int, int]:
    """Rank to the number of its card."""
    view = running.get("/api/v1/gpus?job=job") if running.get("/api/v1/jobs") else {"gpus": []}
    return {on["rank"]: each["gpu"]["card"]["index"] for each in view["gpus"] for on in each["ranks"]}


def checks(running: RunningAgent) -> list[Check]:
    """What doctor says of the cards."""
    found = examine(load({}, None, dir=running.directory), wait_s=0.1)
    return [check for check in found if check.what == "gpus"]


def view(running: RunningAgent) -> Any:
    """The cards."""
    return running.get("/api/v1/gpus")


def test_all_well(running: RunningAgent) -> None:
    """GPUs, values and ranks agree in metrics, API and doctor, and the trainer's own numbering has no effect."""
    found = running.samples()
    assert found['commwatch_gpu_utilization_ratio{gpu="0"}'] == 0.98
    assert found['commwatch_gpu_nvlink_bytes_total{direction="transmit",gpu="0"}'] == 4_000_000_000 * 1024
    assert found['commwatch_collector_up{collector="gpu"}'] == 1
    assert ranks(running) == {0: 1, 1: 0}
    assert found[INFO.format(gpu=1, rank=0)] == found[INFO.format(gpu=0, rank=1)] == 1
    told = view(running)
    assert (told["state"], told["driver"]["version"], told["driver"]["cuda"]) == ("up", "550.54.15", "12.4")
    assert (told["gpus"][0]["gpu"]["measured"]["power_watts"], told["elsewhere"]) == (612.0, [])
    placed = {rank["rank"]: (rank["gpu"], rank["gpu_uuid"]) for rank in running.get("/api/v1/ranks?job=job")}
    assert placed == {0: (1, UUIDS[1][4:]), 1: (0, UUIDS[0][4:])}
    assert [(check.result, check.says) for check in checks(running)] == [
        ("pass", "2, nvidia driver 550.54.15, CUDA 12.4; 2 of 2 ranks placed")
    ]


def test_rated_link(running: RunningAgent) -> None:
    """The rated link of known cards is kept beside the references, for reports without the agent."""
    path = running.directory / "references" / f"{gethostname()}.link"
    wait_for(path.exists, "the link of the cards")
    assert path.read_text() == "2 x nvlink4\n"


def test_no_such_job(running: RunningAgent) -> None:
    """A job that the history does not know is refused."""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        running.get("/api/v1/gpus?job=of-nobody")


def test_lost_card_with_xid(running: RunningAgent, script: Script) -> None:
    """A card that falls off the bus: down, without values, its Xid in words; the other card and the agent go on."""
    script.say("event 1 1 79", "1.* !15", "0.nvmlDeviceGetCurrentClocksEventReasons 0x48")
    wait_for(lambda: running.samples()['commwatch_gpu_up{gpu="1"}'] == 0, "the loss")
    found = running.samples()
    assert found['commwatch_gpu_xid_errors_total{gpu="1",xid="79"}'] == 1
    assert 'commwatch_gpu_power_watts{gpu="1"}' not in found
    assert found['commwatch_gpu_power_watts{gpu="0"}'] == 612
    assert found[INFO.format(gpu=1, rank=0)] == 1
    assert view(running)["gpus"][1]["xids"][0]["title"] == "the GPU has fallen off the bus"
    warned = [check for check in checks(running) if check.result == "warn"]
    assert all(check.remedy for check in warned)
    said = "; ".join(check.says for check in warned)
    for part in ("GPU 0 is throttled: hardware, hardware_thermal", "GPU 1 does not answer", "GPU 1: Xid 79 0 min ago"):
        assert part in said
    assert running.get("/healthz") == "ok\n"


def test_driver_restart(running: RunningAgent, script: Script) -> None:
    """While the driver is away the collector is down and nothing is shown; it is taken up again by itself."""
    script.say("* !9", "init !9")
    wait_for(lambda: running.samples()['commwatch_collector_up{collector="gpu"}'] == 0, "the driver's going")
    assert not any(name.startswith("commwatch_gpu_") for name in running.samples())
    assert (view(running)["state"], view(running)["gpus"]) == ("down", [])
    (check,) = checks(running)
    assert (check.result, check.remedy != "") == ("warn", True)
    script.say("*", "init", "generation 2")
    wait_for(lambda: running.samples()['commwatch_collector_up{collector="gpu"}'] == 1, "the driver's return")
    assert ranks(running) == {0: 1, 1: 0}


def test_driver_that_hangs(running: RunningAgent, script: Script) -> None:
    """Calls that do not return cost ten seconds of old values, then the collector is down; nothing waits, nor does the end."""
    script.say("sleep_ms 600000")
    wait_for(lambda: running.samples()['commwatch_collector_up{collector="gpu"}'] == 0, "the collector to be down")
    began = time.monotonic()
    assert running.get("/healthz") == "ok\n"
    assert "has not answered" in view(running)["says"]
    running.process.terminate()
    assert running.process.wait(30) == 0
    assert time.monotonic() - began < 10


def test_rank_on_a_card_that_is_not_seen(running: RunningAgent) -> None:
    """A rank on a card outside the agent's container is named, with what to do."""
    with trainer(running, 2, UUIDS[7]):
        wait_for(lambda: view(running)["elsewhere"], "the stranger")
        warned = [check for check in checks(running) if check.result == "warn"]
    assert [check.says for check in warned] == ["the agent does not see the GPU of job rank 2"]
    assert "NVIDIA_VISIBLE_DEVICES" in warned[0].remedy


def test_no_driver(tmp_path: Path) -> None:
    """Without a library there is not one series of GPUs, no alert, and doctor gives the reason."""
    with agent(tmp_path / "run") as running:
        wait_for(lambda: view(running)["says"] != "not checked yet", "the look")
        if view(running)["state"] != "none":
            pytest.skip("this machine has a card")
        assert not any("gpu" in name for name in running.samples())
        (check,) = checks(running)
    assert check.result == "pass"
    assert "no NVIDIA driver is installed" in check.says


def test_setting(library: Path, script: Script, tmp_path: Path) -> None:
    """`gpus = "off"` leaves the driver alone; `"required"` makes its absence a fault."""
    settings = tmp_path / "commwatch.toml"
    there = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(script.path)}
    for gpus, driver, state in (("off", there, "off"), ("required", {}, "down")):
        settings.write_text(f'gpus = "{gpus}"')
        env = clean_env(HOME=str(tmp_path), **driver)
        with agent(tmp_path / gpus, "--config", str(settings), env=env) as running:
            wait_for(lambda: running.get("/api/v1/gpus")["state"] == state, "the state")  # noqa: B023
            up = running.samples().get('commwatch_collector_up{collector="gpu"}')
            assert up == (None if gpus == "off" else 0)
