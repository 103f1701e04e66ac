"""GPUs as values: names that compare, who sits where, and what becomes of a card in ``/metrics``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.prometheus.metrics import METRICS
from commwatch_collectors.node.gpu import (
    THROTTLE_REASONS,
    GpuPlace,
    Measured,
    MigInstance,
    Xid,
    find,
    instance_at,
    place_of,
    plain_bus_id,
    plain_uuid,
    readings,
)
from commwatch_collectors.node.gpu_xids import XIDS, meaning
from commwatch_collectors.registry import Reading
from tests.gpus import DRIVER, UUIDS, card, full, lost

PLAIN = "5a0e1f2c-3b4d-4e6f-8a9b-000000000000"


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (f"GPU-{PLAIN}", PLAIN),
        (PLAIN.upper(), PLAIN),
        (f"MIG-{PLAIN}", PLAIN),
        (f"MIG-GPU-{PLAIN}/1/0", f"{PLAIN}/1/0"),
        ("0xDEADBEEF00000001", "deadbeef00000001"),
        (" ", ""),
    ],
)
def test_plain_uuid(written: str, plain: str) -> None:
    """The same GPU has the same UUID in every notation."""
    assert plain_uuid(written) == plain


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3b:00", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("", ""),
        ("nonsense", ""),
    ],
)
def test_plain_bus_id(written: str, plain: str) -> None:
    """PCI addresses compare as Linux writes them; a domain may be longer than four digits."""
    assert plain_bus_id(written) == plain


def test_place_by_uuid_or_bus_id() -> None:
    """A rank's card is found by UUID, else by PCI address, and never by its number in the trainer."""
    gpus = [full(0), lost(1)]
    assert find(GpuPlace(plain_uuid(UUIDS[1]), "", 0), gpus) == gpus[1]
    assert find(GpuPlace("of-another-machine", "0000:1b:00.0", 0), gpus) == gpus[0]
    assert find(GpuPlace("of-another-machine", "", 0), gpus) is None
    assert find(GpuPlace("", "", 0), gpus) is None


def test_place_with_mig() -> None:
    """A rank on a MIG instance belongs to the GPU that the instance is a part of, whichever of the two UUIDs torch reports."""
    part = MigInstance("MIG-11111111-0000-4000-8000-000000000000", "H100 MIG 3g.40gb", 1, 0)
    other = MigInstance("MIG-22222222-0000-4000-8000-000000000000", "H100 MIG 3g.40gb", 2, 0)
    gpu = replace(full(1), card=replace(card(1), mig=(other, part)))
    by_instance = GpuPlace(plain_uuid(part.uuid), "", 0)
    by_parent = GpuPlace(plain_uuid(UUIDS[1]), "", 0, plain_uuid(part.uuid))
    for place in (by_instance, by_parent):
        assert find(place, [full(0), gpu]) == gpu
        assert instance_at(place, gpu) == part
    assert instance_at(GpuPlace(plain_uuid(UUIDS[1]), "", 0), gpu) is None


@pytest.mark.parametrize("entry", [{"index": "one"}, {"index": [0]}])
def test_place_of_nonsense(entry: dict[str, Any]) -> None:
    """A damaged entry is refused."""
    with pytest.raises(TypeError, match="index"):
        place_of(entry)


def test_place_of() -> None:
    """What a trainer leaves is taken in the form that compares; what it leaves out is empty."""
    told = {"uuid": f"GPU-{PLAIN}", "bus_id": "00000000:1B:00.0", "index": 3, "mig": f"MIG-{PLAIN}"}
    assert place_of(told) == GpuPlace(PLAIN, "0000:1b:00.0", 3, PLAIN)
    assert place_of({}) == GpuPlace("", "", None, "")


def test_readings() -> None:
    """Every reading is a metric of the list with as many labels as it has; no series twice; seven reasons of throttling."""
    told = list(readings(DRIVER, [full(0), lost(1)], {Xid(UUIDS[0], 79): 2, Xid("of-another", 13): 1}))
    assert len({(reading.metric, reading.labels) for reading in told}) == len(told)
    for reading in told:
        assert len(reading.labels) == len(METRICS[reading.metric].labels)
    assert Reading("gpu_throttled", ("0", "power_cap"), 1.0) in told
    assert Reading("gpu_xid_errors_total", ("0", "79"), 2) in told
    assert tuple(full(0).measured.throttled) == THROTTLE_REASONS
    assert {reading.metric for reading in told} == {name for name in METRICS if name.startswith("gpu_")} - {
        "gpu_pcie_bytes_per_second"  # of a card without counters
    }


def test_lost_card_has_no_values() -> None:
    """A lost card has only the readings that it is lost, and its identity."""
    told = list(readings(DRIVER, [lost(1)], {}))
    assert [(reading.metric, reading.labels[0], reading.value) for reading in told] == [
        ("gpu_info", "1", 1),
        ("gpu_up", "1", 0.0),
    ]


def test_absent_is_not_zero() -> None:
    """What a card does not support has no reading; what it says is 0 has one."""
    told = list(readings(DRIVER, [replace(full(0), measured=Measured(utilization=0.0))], {}))
    assert [reading.metric for reading in told] == ["gpu_info", "gpu_up", "gpu_utilization_ratio"]
    assert told[-1].value == 0.0


def test_xids_in_words() -> None:
    """Every Xid has words and something to do; one that is not in the table leads to NVIDIA's catalogue."""
    assert all(said.title and said.do for said in XIDS.values())
    assert "bus" in meaning(79).title
    assert "docs.nvidia.com" in meaning(12345).do
