"""Where no reference tells whether a bandwidth is good, report and top name the command or setting that provides one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commwatch_agent.cli.command_line import _parser
from commwatch_agent.config_sources import checked
from commwatch_agent.model.api_views import Row, Summary
from commwatch_agent.reference.links import find
from commwatch_agent.reference.missing import SHORT, how_to_judge
from tests.agent.commands.test_top import NOW, of_job, row, text

KIND: dict[str, str | int | None] = {"group": "dp", "op": "all_reduce"}
GOOD, UNKNOWN = row(KIND), row(KIND, efficiency=None, reference=None)
OWN, BARRIER = row(KIND, reference="own_best"), row(KIND, efficiency=None, reference=None, busbw=None)


@pytest.mark.parametrize(
    ("rows", "which"),
    [
        ([GOOD, BARRIER], ""),
        ([], ""),
        ([row({**KIND, "group": "tp"}), UNKNOWN], "Efficiency –:"),
        ([OWN], "Efficiency of own best:"),
        ([OWN, UNKNOWN, BARRIER], "Efficiency – or of own best:"),
        ([row(KIND, reference="catalogue"), UNKNOWN], "Efficiency –:"),
        ([row(KIND, reference="bench"), UNKNOWN], ""),  # of sizes that were not measured
    ],
)
def test_what_is_not_known(rows: list[Row], which: str) -> None:
    """Operations without a reference of their link are explained, those without a bandwidth are not."""
    said = how_to_judge(rows, 8)
    assert said.startswith(which)
    assert bool(said) == bool(which)


def test_what_to_do_works() -> None:
    """The command and the setting that are recommended exist, with this spelling."""
    said = how_to_judge([UNKNOWN], 8)
    (command,) = re.findall("`commwatch (.*?)`", said)
    assert _parser().parse_args(command.split()).job == ["--", "torchrun", "--nproc-per-node", "8"]
    (group, link) = re.findall('"([^"]+)"', said)
    assert checked("links", {group: link}, "here") == {"*": find(link).key}
    assert "docs/hardware.md" in said
    assert (Path(__file__).parents[3] / "docs" / "hardware.md").exists()


def test_no_link_between_ranks_of_one_cpu() -> None:
    """Where all ranks use Gloo on one node, there is neither a link to name nor a rated one of its GPUs, only something to measure."""
    said = how_to_judge([UNKNOWN], 8, has_links=False)
    assert said.endswith(
        "Measure one with `commwatch bench -- torchrun --nproc-per-node 8` (your launcher, without the script)."
    )
    assert "link" not in said
    assert "GPU" not in said


def test_in_top() -> None:
    """``top`` says in one line what measures a reference, where an efficiency is unknown and there is room for it."""
    unknown = of_job(by_operation=Summary(NOW - 10, NOW, ["group", "op"], [UNKNOWN]))
    assert text(unknown).splitlines()[-1] == SHORT
    assert SHORT not in text(of_job())
    of_other_sizes = [row(KIND, reference="bench"), UNKNOWN]
    assert SHORT not in text(of_job(by_operation=Summary(NOW - 10, NOW, ["group", "op"], of_other_sizes)))
    assert SHORT not in text(unknown, cells=len(SHORT) - 1)
    height = len(text(unknown).splitlines()) - 1
    assert SHORT not in text(unknown, height=height)
