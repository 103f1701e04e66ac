"""What collectives should have sent, against what the network device between two hosts really counted."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts import Host
from tests.e2e.torchjob import results, run_on
from tests.helpers import RunningAgent, agent, wait_for

#: On top of the data come 54 to 66 bytes of headers for a packet of 1500, and the other way what acknowledges them.
LOW, HIGH = 0.99, 1.15
SENDS = 3 * 4_800_000


@pytest.mark.parametrize("layout", ["ab", pytest.param("aabb", marks=pytest.mark.long), "abab"])
def test_bytes_on_the_wire(hosts: list[Host], tmp_path: Path, layout: str) -> None:
    """Per op and host the expected bytes are those of the device, wherever the ranks are; it is named as the carrier."""
    by_name = dict(zip("ab", hosts, strict=True))
    places = {name: tmp_path / name for name in by_name}
    for host, place in zip(hosts, places.values(), strict=True):
        host.shape("400mbit")
        place.mkdir(mode=0o700)
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(agent(places[name], beside=host.process, fetch=host.fetch))
            for name, host in by_name.items()
        }
        for watching in agents.values():
            wait_for(partial(_looked, watching), "the first look")
        said = results(run_on([by_name[name] for name in layout], [places[name] for name in layout], "wire.py"))
        for name, watching in agents.items():
            wait_for(watching.job_has_ended, "the end of the job")
            _compare(watching, by_name[name].device, said[layout.index(name)], layout, name)


def _looked(watching: RunningAgent) -> bool:
    return bool(watching.get("/api/v1/host")["nics"])


def _compare(watching: RunningAgent, device: str, counted: dict[str, int], layout: str, name: str) -> None:
    def settled() -> Any:
        traffic = watching.get("/api/v1/host?job=link")["traffic"]
        expected = {group["group"]: group["expected_sent_bytes"] for group in traffic["groups"]}
        whole = expected.get("send") == sends and traffic["sent_bytes"].get(device, 0) >= sum(counted.values())
        return (traffic, expected) if whole else None

    # Rank 0 sends a message to each rank on the other host.
    sends = SENDS * sum(host != "a" for host in layout) if name == "a" else 0
    traffic, expected = wait_for(settled, f"a look after the job, with {sends} bytes in messages")
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert LOW < counted[op] / expected[op] < HIGH, (layout, name, op, counted[op], expected[op])
    assert counted["send"] >= sends
    assert traffic["carriers"] == [device]
    assert LOW < traffic["sent_bytes"][device] / traffic["expected_sent_bytes"] < HIGH
    samples = watching.samples()
    assert samples[f'commwatch_network_bytes_total{{device="{device}",direction="transmit"}}'] >= sum(counted.values())
    assert samples[f'commwatch_network_up{{device="{device}"}}'] == 1
