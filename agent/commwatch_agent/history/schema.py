"""SQL of the history's tables, and of the upgrades from earlier versions."""

from __future__ import annotations

from commwatch_agent.core.cells import CELL_SUMS

SCHEMA_VERSION = 8
_STEP = """CREATE TABLE step (ring INTEGER NOT NULL, seq INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, comm_ns INTEGER,
    exposed_ns INTEGER, groups TEXT NOT NULL DEFAULT '[]', p2p_wait_ns INTEGER, long INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (ring, seq)) WITHOUT ROWID"""
_JOB_EXIT = "CREATE TABLE job_exit (job TEXT PRIMARY KEY, code INTEGER NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID"
#: ``Extent`` by chunk, NULL in those of an earlier version; and its ring and times, because the data lie between a chunk's columns.
_EXTENT = (
    "CREATE TABLE extent (chunk INTEGER PRIMARY KEY, ring INTEGER NOT NULL, from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL,"
    " ops INTEGER, groups INTEGER, longest_ns INTEGER, seq_from INTEGER, seq_until INTEGER, crc INTEGER)",
    "CREATE INDEX extent_until ON extent (until_ns)",
)
#: ``CounterSample``; ``counters`` is JSON.
_NODE_SAMPLE = "CREATE TABLE node_sample (at_ns INTEGER PRIMARY KEY, counters TEXT NOT NULL, crc INTEGER)"
#: Rollups that will be merged: an hour of them, among a week of others.
_ROLLUP_FINE = "CREATE INDEX rollup_fine ON rollup (slot_ns) WHERE coarse = 0"
#: Checksum of each row; NULL in rows of an earlier version.
_CHECKSUMS = tuple(
    f"ALTER TABLE {table} ADD COLUMN crc INTEGER"
    for table in ("ring", "grp", "name", "chunk", "rollup", "step", "job_exit")
)
#: The users who own the rings, and what the retention adds up by user.
_OWNER = "CREATE TABLE IF NOT EXISTS owner (ring INTEGER PRIMARY KEY, uid INTEGER NOT NULL)"
_CHUNK_OF_RING = "CREATE INDEX IF NOT EXISTS chunk_of_ring ON chunk (ring, size)"
SCHEMA = f"""
CREATE TABLE ring (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, job TEXT NOT NULL, restart INTEGER NOT NULL, rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL, started_ns INTEGER NOT NULL, wall_offset_ns INTEGER NOT NULL, identity TEXT NOT NULL,
    next_n INTEGER NOT NULL DEFAULT 0, rolled_n INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0, seen_ns INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'running', steps_unavailable TEXT,
    ending TEXT);
CREATE INDEX ring_job ON ring (job);
CREATE TABLE grp (ring INTEGER NOT NULL, small_id INTEGER NOT NULL, group_id TEXT NOT NULL, label TEXT NOT NULL, name TEXT NOT NULL,
    description TEXT NOT NULL, ranks TEXT, size INTEGER NOT NULL, aligned INTEGER NOT NULL, backend TEXT, PRIMARY KEY (ring, small_id)) WITHOUT ROWID;
CREATE INDEX grp_id ON grp (group_id);
CREATE TABLE name (ring INTEGER NOT NULL, kind TEXT NOT NULL, code INTEGER NOT NULL, name TEXT NOT NULL, PRIMARY KEY (ring, kind, code)) WITHOUT ROWID;
CREATE TABLE chunk (id INTEGER PRIMARY KEY, ring INTEGER NOT NULL, first_n INTEGER NOT NULL, until_n INTEGER NOT NULL,
    from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (ring, first_n));
CREATE INDEX chunk_until ON chunk (until_ns, size);
CREATE TABLE span (chunk INTEGER NOT NULL, small_id INTEGER NOT NULL, seq_from INTEGER NOT NULL, seq_until INTEGER NOT NULL,
    PRIMARY KEY (chunk, small_id)) WITHOUT ROWID;
CREATE TABLE rollup (slot_ns INTEGER NOT NULL, coarse INTEGER NOT NULL DEFAULT 0, ring INTEGER NOT NULL, small_id INTEGER NOT NULL, op INTEGER NOT NULL,
    size_log2 INTEGER NOT NULL, {", ".join(f"{f} NUMERIC NOT NULL" for f in CELL_SUMS)}, durations TEXT NOT NULL, bins BLOB NOT NULL);
CREATE INDEX rollup_slot ON rollup (slot_ns);
{_ROLLUP_FINE};
{_STEP};
CREATE INDEX step_end ON step (end_ns);
{_JOB_EXIT};
{";".join((*_CHECKSUMS, *_EXTENT, _NODE_SAMPLE, _OWNER, _CHUNK_OF_RING))}
"""
#: Statements that upgrade a history of each version to the next.
UPGRADES = {
    1: (
        "ALTER TABLE grp ADD COLUMN backend TEXT",
        "ALTER TABLE step ADD COLUMN groups TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE step ADD COLUMN p2p_wait_ns INTEGER",
        "ALTER TABLE step ADD COLUMN long INTEGER NOT NULL DEFAULT 0",
    ),
    2: (
        "ALTER TABLE step RENAME TO old_step",
        _STEP,
        "INSERT INTO step SELECT ring, seq, start_ns, end_ns, comm_ns, exposed_ns, groups, p2p_wait_ns, long FROM old_step",
        "DROP TABLE old_step",
        "CREATE INDEX step_end ON step (end_ns)",
    ),
    3: ("ALTER TABLE ring ADD COLUMN ending TEXT", _JOB_EXIT, *_CHECKSUMS),
    4: (
        "DROP INDEX IF EXISTS chunk_until",
        "CREATE INDEX chunk_until ON chunk (until_ns, size)",
        _ROLLUP_FINE,
        *_EXTENT,
        "INSERT INTO extent (chunk, ring, from_ns, until_ns) SELECT id, ring, from_ns, until_ns FROM chunk",
    ),
    5: (_NODE_SAMPLE,),
    6: (),  # size classes of the startup (``rows.rollup_row``), which an earlier version does not know
    7: (_OWNER, _CHUNK_OF_RING),
}
