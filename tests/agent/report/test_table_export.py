"""``commwatch export``: tables that DuckDB, pandas and pyarrow read back as the REST API has them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from commwatch_agent.cli.export import _FORMATS
from commwatch_agent.report.table_export import FORMATS, TABLES, CannotExport, export
from tests.helpers import (
    MS,
    RunningAgent,
    Watch,
    agent,
    commwatch,
    end_rank,
    group_entry,
    operation,
    wait_for,
    write_ring,
)
from tests.live import LATE_MS, HandMade, late_job

# duckdb, pandas and pyarrow are imported where they are needed: half a second, in each process that collects tests.
DOCUMENT = Path(__file__).parents[3] / "docs" / "runs.md"
STEPS = 40
#: Of ``STEP`` in tests/live.py, by two ranks.
OPERATIONS = 2 * 2 * STEPS


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """The agent of ``late_job``."""
    with late_job(tmp_path_factory.mktemp("run"), STEPS) as running:
        yield running


def exported(watched: RunningAgent, out: Path, *flags: str) -> dict[str, Path]:
    """Export; return the files by table."""
    done = commwatch("export", "train", "--dir", watched.directory, "--out", out, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return {path.stem: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def files(watched: RunningAgent, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files as they are by default."""
    return exported(watched, tmp_path_factory.mktemp("files"))


def as_stored(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the REST API as the tables have it."""
    return {
        field: datetime.fromtimestamp(round(value * 1e6) / 1e6, timezone.utc)
        if field.endswith("_at")
        else json.dumps(value)
        if isinstance(value, dict)
        else value
        for field, value in row.items()
    }


@pytest.fixture(scope="module")
def expected(watched: RunningAgent) -> dict[str, list[dict[str, Any]]]:
    """The rows that the REST API returns."""
    operations = watched.get("/api/v1/ops?job=train&limit=10000")["operations"]
    steps = watched.get("/api/v1/steps?job=train&limit=10000")
    assert (len(operations), len(steps)) == (OPERATIONS, 2 * STEPS)
    return {"operations": operations, "steps": steps}


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_same_as_the_api(
    watched: RunningAgent, expected: dict[str, list[dict[str, Any]]], tmp_path: Path, form: str
) -> None:
    """DuckDB and pyarrow read the same rows as the REST API returns, in the same order, with times to the µs."""
    import duckdb
    import pyarrow

    files = exported(watched, tmp_path, "--format", form)
    assert files.keys() == TABLES.keys()
    for name, rows in expected.items():
        whole = (
            pyarrow.ipc.open_file(files[name]).read_all
            if form == "arrow"
            else duckdb.connect().sql(f"FROM '{files[name]}'").to_arrow_table
        )
        assert whole().to_pylist() == [as_stored(row) for row in rows]


def test_questions_in_sql(files: dict[str, Path]) -> None:
    """A question that users ask is one line of SQL, and pandas agrees with the operations that were written."""
    import duckdb
    import pandas

    query = "SELECT op, sum(size_bytes)::BIGINT, count(*) FROM read_parquet(?) GROUP BY op ORDER BY op"
    assert duckdb.connect().execute(query, [str(files["operations"])]).fetchall() == [
        ("all_gather", 4_000_000 * 2 * STEPS, 2 * STEPS), ("all_reduce", 8_000_000 * 2 * STEPS, 2 * STEPS),
    ]  # fmt: skip
    steps = pandas.read_parquet(files["steps"])
    assert steps.groupby("rank")["duration_s"].sum().round(3).to_list() == [0.12 * STEPS] * 2
    assert json.loads(steps["group_shares"][0]).keys() == {"dp", "tp"}


def test_waits(tmp_path: Path) -> None:
    """The waits of an ended job are those that were written: rank 0 waits for rank 1 in each all_reduce."""
    import pandas

    with agent(tmp_path / "run") as running, HandMade(tmp_path / "run", late=1) as job:
        job.run(STEPS)
        job.end()
        wait_for(lambda: [each["state"] for each in running.get("/api/v1/jobs")] == ["ended"], "the end of the job")
    waits = pandas.read_parquet(exported(running, tmp_path / "out")["waits"]).groupby("rank")["wait_s"].sum()
    assert waits.to_list() == pytest.approx([LATE_MS / 1000 * STEPS, 0.0])


def test_csv(watched: RunningAgent, expected: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    """CSV has the rows of the API, in their order, as DuckDB reads it too; a cell is empty for each unknown value, and times have µs."""
    files = exported(watched, tmp_path, "--format", "csv", "--last", "all")
    for name, rows in expected.items():
        with files[name].open(newline="") as file:
            found = list(csv.DictReader(file))
        assert found == [{field: as_csv(value) for field, value in as_stored(row).items()} for row in rows]
    import duckdb

    types = {name: "VARCHAR" for name, kind in get_type_hints(TABLES["steps"]).items() if "dict" in str(kind)}
    steps = duckdb.connect().sql(f"SET TimeZone='UTC'; FROM read_csv('{files['steps']}', types={types})")
    read = [dict(zip(steps.columns, row, strict=True)) for row in steps.fetchall()]
    assert [row["duration_s"] for row in read] == [row["duration_s"] for row in expected["steps"]]
    assert [row["long"] for row in read] == [row["long"] for row in expected["steps"]]
    assert [row["end_at"].timestamp() for row in read] == pytest.approx([row["end_at"] for row in expected["steps"]])


def as_csv(value: Any) -> str:
    """A cell, as text."""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%fZ")
    return {None: "", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def test_last(watched: RunningAgent, expected: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    """--last limits the tables to the end of the job."""
    import pandas

    newest = max(row["end_at"] for row in expected["steps"])
    table = pandas.read_parquet(exported(watched, tmp_path, "--last", "1s")["steps"])
    assert len(table) == sum(row["end_at"] > newest - 1 for row in expected["steps"])
    every, waits = (
        pandas.read_parquet(exported(watched, tmp_path / last, "--last", last)["waits"]) for last in ("all", "1s")
    )
    ended = max(row["end_at"] for table in ("steps", "operations") for row in expected[table])
    slot_ends = every["start_at"] + pandas.to_timedelta(every["length_s"], unit="s")
    since = pandas.Timestamp(ended - 1, unit="s", tz="UTC")
    assert len(waits) == sum(slot_ends > since) > 0, "those of the slots of this second"


def test_columns() -> None:
    """Each table has the fields of its view as columns, and may lack a value only where the view may."""
    from commwatch_agent.report.arrow_tables import schema_of

    for row in TABLES.values():
        schema, hints = schema_of(row), get_type_hints(row)
        assert schema.names == list(hints)
        assert {field.name for field in schema if field.nullable} == {
            name for name, kind in hints.items() if "None" in str(kind)
        }


def test_errors(watched: RunningAgent, tmp_path: Path) -> None:
    """A folder that cannot be written, and a missing pyarrow, are one line with the remedy; no part of a file is left."""
    (tmp_path / "file").write_text("")
    done = commwatch("export", "--dir", watched.directory, "--out", tmp_path / "file" / "x")
    assert done.returncode == 1
    assert done.stderr == f"commwatch: export: cannot write {tmp_path}/file/x/operations.parquet: Not a directory\n"
    done = without_pyarrow(watched, tmp_path, "--format", "parquet")
    remedy = "write CSV (--format csv), or install commwatch with its extra: commwatch[export]"
    assert (done.returncode, done.stderr) == (1, f"commwatch: export: pyarrow is not installed: {remedy}\n")
    assert not (tmp_path / "x").exists()
    for flags in ([], ["--format", "csv"]):
        done = without_pyarrow(watched, tmp_path, *flags)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"x/operations.csv: {OPERATIONS} rows\n" in done.stdout
    assert set(FORMATS) == set(_FORMATS) == {"parquet", "arrow", "csv"}


def without_pyarrow(watched: RunningAgent, where: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Export to the folder ``x`` where pyarrow is not installed."""
    words = ["export", "--dir", str(watched.directory), "--out", "x", *flags]
    hidden = f"import sys; sys.modules['pyarrow'] = None; sys.argv[1:] = {words}"
    command = [sys.executable, "-c", f"{hidden}; from commwatch_agent.cli import main; sys.exit(main())"]
    return subprocess.run(command, capture_output=True, text=True, cwd=where, check=False)


def test_value_that_does_not_fit(tmp_path: Path) -> None:
    """A size of 64 bits, as a damaged record may have, is one line with the remedy; no part of a file is left."""
    watch = Watch(tmp_path / "run")
    end_rank(write_ring(watch.rings, [operation(start_ns=MS, end_ns=2 * MS, size=1 << 63)], [group_entry()]))
    watch.tick(60_000 * MS)
    with pytest.raises(CannotExport, match=r"operations.parquet: a row has a value .* --last can leave it out"):
        export(watch.agent, "job", tmp_path / "out", "parquet")
    assert list((tmp_path / "out").iterdir()) == []


def test_documented() -> None:
    """docs/runs.md has all columns of each table, and no other."""
    sections = DOCUMENT.read_text().partition("\n## Export\n")[2].split("\n**")[1:]
    for (name, row), section in zip(TABLES.items(), sections, strict=True):
        assert section.startswith(name)
        cells = [line.split("|")[1] for line in section.split("\n### ")[0].splitlines() if line.startswith("| `")]
        assert re.findall(r"`(\w+)`", " ".join(cells)) == list(get_type_hints(row))


def test_documented_question(files: dict[str, Path]) -> None:
    """The documented question names the late rank."""
    import duckdb

    (query,) = re.findall(r"DuckDB.*?```sql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    query = query.replace("'operations.parquet'", f"'{files['operations']}'")
    assert duckdb.connect().sql(query).fetchall() == [(1, STEPS)]
