"""What people read as the name of a process group."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.framework_settings import is_tensor
from commwatch_agent.model.group_labels import label
from commwatch_agent.model.names_file import Names
from tests.helpers import group_entry

HASH = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"


@pytest.mark.parametrize(
    ("name", "description", "ranks", "said"),
    [
        ("0", "default_pg", (0, 1), "default_pg"),
        ("3", "mesh_tp", (0, 1), "mesh_tp"),
        ("3", "my own", (0, 1), "my own"),
        ("1", "undefined", (0, 2), "ranks 0,2"),
        ("1", "undefined", (0, 1), "ranks 0,1"),
        ("1", "", (0, 1, 2, 3), "ranks 0-3"),
        ("1", "undefined:split:4", (3, 2, 1, 0), "ranks 0-3"),
        (HASH, "undefined", tuple(range(0, 64, 8)), "ranks 0-56 step 8"),
        (HASH, "undefined", (0, 1, 2, 3, 9), "5 ranks 0-9"),
        (f"{HASH}_1", "undefined", (0, 5, 7), "ranks 0,5,7"),
        ("1", "undefined", (5,), "rank 5"),
        ("1", "undefined", (4, 4, 4), "ranks 4,4,4"),
        ("1", "undefined", None, "2 ranks 1"),
        (HASH, "undefined", None, "2 ranks 0a1b2c3d"),
        ("given", "undefined", (0, 1), "given"),
        ("5", "DATA_PARALLEL_GROUP", (0, 2), "dp"),
        ("5", "DATA_PARALLEL_GROUP_GLOO", (0, 2), "dp_gloo"),
        ("5", "TENSOR_MODEL_PARALLEL_GROUP", (0, 1), "tp"),
        ("5", "PIPELINE_MODEL_PARALLEL_GROUP", (0, 1), "pp"),
        ("5", "CONTEXT_PARALLEL_GROUP", (0, 1), "cp"),
        ("5", "EXPERT_MODEL_PARALLEL_GROUP", (0, 1), "ep"),
        ("5", "DATA_PARALLEL_GROUP_WITH_CP_GLOO", (0, 1), "dp_cp_gloo"),
        ("5", "SOME_OTHER_GROUP", (0, 1), "SOME_OTHER_GROUP"),
        ("5", "other", (0, 1), "other group"),
        ("other", "undefined", (0, 1), "other group"),
    ],
)
def test_label(name: str, description: str, ranks: tuple[int, ...] | None, said: str) -> None:
    """A description stays unless it is `other`, Megatron's descriptions become its short names, and a group without one is labelled by its members."""
    assert label(name, description, ranks, 2) == said


def test_from_the_names_file() -> None:
    """Label and description of a group come from what the trainer says of it; its identity is left alone."""
    names = Names()
    names.learn(
        [group_entry(0, (0, 1), "1", desc="undefined"), group_entry(1, (0, 1), desc="TENSOR_MODEL_PARALLEL_GROUP")]
    )
    found = [(group.label, group.description, group.group_id) for group in names.groups.values()]
    assert found == [
        ("ranks 0,1", "undefined", "1-0"),
        ("tp", "TENSOR_MODEL_PARALLEL_GROUP", "default_pg-1"),
    ]


def test_roles_are_still_seen() -> None:
    """Advice that depends on a group's role finds the role in the short names, and none in members."""
    roles = ["TENSOR_MODEL_PARALLEL_GROUP", "MODEL_PARALLEL_GROUP", "TENSOR_AND_CONTEXT_PARALLEL_GROUP"]
    assert all(is_tensor(label("1", role, (0, 1), 2)) for role in roles)
    assert not is_tensor(label("1", "DATA_PARALLEL_GROUP", (0, 1), 2))
    assert not is_tensor(label("1", "undefined", (0, 2, 4), 3))


def test_groups_with_the_same_ranks() -> None:
    """Two groups of the same ranks, such as two calls of new_group([0, 1]), have labels of their own, whatever comes again; of many, only some have."""
    names = Names()
    first, second = (group_entry(number, (0, 1), "undefined", group_id=f"g{number}") for number in (1, 2))
    other = group_entry(3, (2, 3), "tp")
    again = group_entry(4, (0, 1), "tp")
    for entries in ([first], [second], [other, again], [first, second, again]):
        names.learn(entries)
    assert {number: info.label for number, info in names.groups.items()} == {
        1: "ranks 0,1",
        2: "ranks 0,1 #2",
        3: "tp",
        4: "tp",
    }
    names.learn([group_entry(5, (0, 1), "tp", group_id="another")])
    assert names.groups[5].label == "tp #5"
    names.learn([group_entry(number, (0, 1), "tp", group_id=f"g{number}") for number in range(6, 40)])
    assert [names.groups[number].label for number in (6, 11, 12, 39)] == ["tp #6", "tp #11", "tp", "tp"]
