"""What the report says where it is not known whether a bandwidth is good."""

from __future__ import annotations

from pathlib import Path

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.reference.hardware import GpuLink
from commwatch_agent.reference.references import References, directory, save_link
from commwatch_agent.report import report_page, report_text
from commwatch_agent.report.charts import NOTHING
from commwatch_agent.report.report import Report, build
from tests.helpers import MS, Watch, group_entry, operation, write_ring

GIB = 1 << 30


def report_of(directory_: Path, backend: str = "nccl", world_size: int = 2) -> Report:
    """The report of two ranks that exchange one size, 1 GiB at 100 GB/s; there is no curve of their own."""
    watch = Watch(directory_)
    records = [
        operation(start_ns=n * 100 * MS, end_ns=n * 100 * MS + round(GIB / 100), seq=n, size=GIB) for n in range(1, 6)
    ]
    for rank in range(2):
        write_ring(watch.rings, records, [group_entry(0, (0, 1), backend=backend)], rank=rank, world_size=world_size)
    watch.tick()
    queries = QueryService(watch.path, references=References(directory(directory_)))
    found = build(queries, "job", watch.path, "commwatch report")
    assert found is not None
    return found


def test_unknown(tmp_path: Path) -> None:
    """Text and page say what to run below the operations."""
    found = report_of(tmp_path)
    text, page = report_text.text(found, 1000), report_page.html(found, NOTHING)
    assert report_text.judging(found) in text
    assert "`commwatch bench -- torchrun --nproc-per-node 2`" in text
    assert "<code>commwatch bench -- torchrun --nproc-per-node 2</code>" in page


def test_links_to_name(tmp_path: Path) -> None:
    """A link is named only where there may be one: not where all ranks of the job use Gloo on one node."""
    for backend, world_size, named in (
        ("nccl", 2, True),
        ("gloo", 2, False),
        ("gloo", 4, True),
        ("cpu:gloo,cuda:nccl", 2, True),
    ):
        directory = tmp_path / f"{backend.replace(':', '-')}{world_size}"
        directory.mkdir()
        found = report_text.judging(report_of(directory, backend, world_size))
        assert "commwatch bench" in found
        assert ("[links]" in found) == named


def test_known_gpus(tmp_path: Path) -> None:
    """Where the GPUs are known, the efficiency is of the rated link, and nothing needs to be run."""
    save_link(directory(tmp_path), "host", GpuLink("nvlink4", 2))
    found = report_of(tmp_path)
    text = report_text.text(found, 1000)
    assert "22% of rated link" in text
    assert "commwatch bench" not in text
