"""``/api/v1/past``: what the live page shows of a time range, of jobs whose records are written by hand."""

from __future__ import annotations

import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.agent.web.routes.test_jobs import rings_of
from tests.helpers import MS, agent, end_rank, group_entry, mark, operation, wait_for, write_ring

S = 1000 * MS


def written(rings: Path, restart: int, base_s: int, began_s: int, **who: Any) -> None:
    """Two ranks of the job ``train`` that reduce once a second for half a minute; rank 1 comes 100 ms late.

    Args:
        base_s: Unix time of the begin of their clock.
        began_s: when they begin, on that.
    """
    for rank in (0, 1):
        records: list[tuple[int, ...]] = [mark(0, began_s * S + 1)]
        for n in range(30):
            second_ns = (began_s + n) * S
            records += [
                operation(
                    "all_reduce", start_ns=second_ns + rank * 100 * MS, end_ns=second_ns + 150 * MS, seq=n, size=1 << 20
                ),
                mark(n + 1, second_ns + S),
            ]
        end_rank(
            write_ring(
                rings, records, [group_entry(0, (0, 1), group_id="world")], job="train", rank=rank, restart=restart,
                world_size=2, wall_offset_ns=base_s * S, started_ns=began_s * S, **who,
            )
        )  # fmt: skip


def bars_of(found: dict[str, Any], rank: int) -> list[list[int]]:
    """The bars of one rank."""
    (bars,) = [track["bars"] for track in found["timeline"]["tracks"] if track["rank"] == rank]
    return bars  # type: ignore[no-any-return]


def test_past(tmp_path: Path) -> None:
    """A range has its slots, and the latest operations that ended in it with their waits; after a restart those of the run in the range."""
    base_s = int(time.time()) // 10 * 10 - 300
    rings = rings_of(tmp_path / "run")
    written(rings, 0, base_s, 0, boot_id="one")
    written(rings, 1, base_s, 100, boot_id="one")
    with agent(tmp_path / "run") as running:
        wait_for(lambda: sum(r["records"] for r in running.get("/api/v1/ranks")) >= 2 * 61, "the records")
        url = "/api/v1/past?job=train"
        answer = running.get(f"{url}&since={base_s}&until={base_s + 20}")
        assert answer["nodes"] == {"answered": 1, "silent": {}}
        found = answer["data"]
        assert (found["length_s"], found["busbw_length_s"]) == (10.0, 10.0)
        assert [slot["at"] for slot in found["slots"]] == [base_s + 10, base_s + 20]
        for slot in found["slots"]:
            assert slot["comm"] == pytest.approx(0.1, abs=0.01)
            assert slot["busbw"] == {"all_reduce": pytest.approx((1 << 20) / 0.1, rel=0.01)}
        assert found["timeline"]["ops"] == ["all_reduce"]
        assert [bar[1:3] for bar in bars_of(found, 0)][-3:] == [[150_000, 100_000]] * 3
        assert [bar[1:3] for bar in bars_of(found, 1)][-3:] == [[50_000, 0]] * 3
        assert bars_of(found, 0)[-1][5] == 19
        later = running.get(f"{url}&since={base_s}&until={base_s + 300}")["data"]
        assert bars_of(later, 0)[-1][5] == 29
        assert len(bars_of(later, 0)) <= 10
        nothing = running.get(f"{url}&since={base_s - 100}&until={base_s - 50}")["data"]
        assert (nothing["slots"], nothing["timeline"]) == ([], None)
        week = running.get(f"{url}&since=7d")["data"]
        assert (week["length_s"], week["busbw_length_s"]) == (1800.0, 1800.0)
        ends_s = [base_s + run_s + n + 1 for run_s in (0, 100) for n in range(30)]
        # An operation that ended on the bound of two slots is in either: the clocks are read one after another.
        assert len(week["slots"]) in [len({-(-(end_s + late_s) // 1800) for end_s in ends_s}) for late_s in (0, 0.01)]
        older = running.get(f"{url}&since={base_s - 3590}&until={base_s + 200}")["data"]
        assert (older["length_s"], older["busbw_length_s"]) == (30.0, 300.0)
        assert {bool(slot["busbw"]) for slot in older["slots"] if slot["comm"] is None} == {True}
        bars = running.get(f"/api/v1/bars?job=train&since={base_s}&until={base_s + 20}")
        assert [(rank["rank"], len(rank["ended"])) for rank in bars["ranks"]] == [(1, 11), (0, 11)]
        for query in ("since=5&until=4", "job=no"):
            with pytest.raises(urllib.error.HTTPError, match=r"40[04]"):
                running.get(f"/api/v1/past?{query}" + ("" if "job" in query else "&job=train"))
        classes = running.get(f"/api/v1/summary?job=train&since={base_s}&size={1 << 20}")["rows"]
        assert [row["by"]["op"] for row in classes] == ["all_reduce"]
        assert running.get(f"/api/v1/summary?job=train&since={base_s}&size=2")["rows"] == []
