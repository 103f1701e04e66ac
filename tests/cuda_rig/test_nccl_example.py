"""NVIDIA's example of a profiler plugin, chained behind ours, sees what NCCL does."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from tests.cuda_rig.nccl_sources import build_plugin
from tests.cuda_rig.played_jobs import Run

pytestmark = [pytest.mark.nccl_example, pytest.mark.timeout(600)]

ON = {"COMMWATCH_NCCL_PLUGIN": "on", "NCCL_ALLGATHERV_ENABLE": "0"}
#: Operations, messages and kernels of channels.
MASK = 2 | 4 | 64
#: The example keeps the latest operations only, by default 16 of a kind; each takes megabytes.
POOLS = {
    f"NCCL_PROFILE_{kind}_POOL_SIZE": "512" for kind in ("GROUP", "COLL", "P2P", "GROUP_API", "COLL_API", "P2P_API")
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built in a temporary folder from the sources in NCCL_SOURCES."""
    return build_plugin(Path(os.environ["NCCL_SOURCES"]), "example", tmp_path_factory.mktemp("example"))


def seen(dump: Path) -> Counter[str]:
    """Events of the example by category, each once."""
    events = json.loads(dump.read_text())
    return Counter(str(event["cat"]) for event in events if event.get("ph") == "b")


@pytest.mark.parametrize("scene", ["sharded", "replicated", "messages", "inference"])
def test_both_see_the_same(run: Run, example: Path, tmp_path: Path, scene: str) -> None:
    """Both plugins see as many collectives and messages as PyTorch made, or replayed, and the example its kernels, too. Ours times collectives only."""
    dumps = tmp_path / "example"
    played = run(
        scene,
        **ON,
        **POOLS,
        NCCL_PROFILER_PLUGIN=str(example),
        NCCL_PROFILE_EVENT_MASK=str(MASK),
        NCCL_PROFILE_DUMP_FILE=str(dumps),
    )
    found = sum((seen(path) for path in tmp_path.glob("example*")), Counter[str]())
    recorded = Counter(
        "P2P" if rank.op(record) in ev.P2P else "COLL" for rank in played.ranks for record in rank.operations
    )
    assert {kind: found[kind] for kind in ("COLL", "P2P")} == {kind: recorded[kind] for kind in ("COLL", "P2P")}
    assert found["GPU"] >= recorded.total()
    by_nccl = any(record.timing == ev.BY_NCCL for rank in played.ranks for record in rank.operations)
    assert by_nccl is (scene != "messages")
