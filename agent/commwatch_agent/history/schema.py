"""SQL of the history's tables."""

from __future__ import annotations

import zlib

from commwatch_agent.model.cells import CELL_SUMS

#: Histories of other versions or shapes are not read: an agent sets an older one aside, and leaves a newer one.
SCHEMA_VERSION = 1
#: ``crc`` is the checksum of a row. ``run`` is the key of a ring's run; ``job`` the run's name, as it is shown. ``agent`` is the run
#: directory of the agent that concluded an incident. ``arrived_ns`` is when the data of a row came, by the clock of arrivals; the table
#: ``clock`` has its latest ``arrival.Moment``. The last index on that is of the roll-ups that will be merged: an hour of them, among a week
#: of others.
SCHEMA = f"""
CREATE TABLE ring (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, job TEXT NOT NULL, restart INTEGER NOT NULL, rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL, started_ns INTEGER NOT NULL, wall_offset_ns INTEGER NOT NULL, run TEXT NOT NULL, identity TEXT NOT NULL,
    next_n INTEGER NOT NULL DEFAULT 0, rolled_n INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0, seen_ns INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'running', steps_unavailable TEXT,
    ending TEXT, crc INTEGER NOT NULL, arrived_ns INTEGER NOT NULL);
CREATE INDEX ring_job ON ring (job);
CREATE TABLE owner (ring INTEGER PRIMARY KEY, uid INTEGER NOT NULL);
CREATE TABLE grp (ring INTEGER NOT NULL, small_id INTEGER NOT NULL, group_id TEXT NOT NULL, label TEXT NOT NULL, name TEXT NOT NULL,
    description TEXT NOT NULL, ranks TEXT, size INTEGER NOT NULL, aligned INTEGER NOT NULL, backend TEXT, crc INTEGER NOT NULL,
    PRIMARY KEY (ring, small_id)) WITHOUT ROWID;
CREATE INDEX grp_id ON grp (group_id);
CREATE TABLE name (ring INTEGER NOT NULL, kind TEXT NOT NULL, code INTEGER NOT NULL, name TEXT NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (ring, kind, code)) WITHOUT ROWID;
CREATE TABLE chunk (id INTEGER PRIMARY KEY, ring INTEGER NOT NULL, first_n INTEGER NOT NULL, until_n INTEGER NOT NULL,
    from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL, crc INTEGER NOT NULL,
    arrived_ns INTEGER NOT NULL, UNIQUE (ring, first_n));
CREATE INDEX chunk_arrived ON chunk (arrived_ns, size);
CREATE INDEX chunk_of_ring ON chunk (ring, size);
CREATE TABLE span (chunk INTEGER NOT NULL, small_id INTEGER NOT NULL, seq_from INTEGER NOT NULL, seq_until INTEGER NOT NULL,
    PRIMARY KEY (chunk, small_id)) WITHOUT ROWID;
CREATE TABLE extent (chunk INTEGER PRIMARY KEY, ring INTEGER NOT NULL, from_ns INTEGER NOT NULL, until_ns INTEGER NOT NULL,
    ops INTEGER, groups INTEGER, longest_ns INTEGER, seq_from INTEGER, seq_until INTEGER, crc INTEGER NOT NULL);
CREATE INDEX extent_until ON extent (until_ns);
CREATE TABLE rollup (slot_ns INTEGER NOT NULL, coarse INTEGER NOT NULL DEFAULT 0, ring INTEGER NOT NULL, small_id INTEGER NOT NULL, op INTEGER NOT NULL,
    size_log2 INTEGER NOT NULL, {", ".join(f"{f} NUMERIC NOT NULL" for f in CELL_SUMS)}, durations TEXT NOT NULL, bins BLOB NOT NULL, crc INTEGER NOT NULL,
    arrived_ns INTEGER NOT NULL);
CREATE INDEX rollup_slot ON rollup (slot_ns);
CREATE INDEX rollup_arrived ON rollup (arrived_ns, ring);
CREATE INDEX rollup_fine ON rollup (arrived_ns) WHERE coarse = 0;
CREATE TABLE step (ring INTEGER NOT NULL, seq INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, comm_ns INTEGER,
    exposed_ns INTEGER, groups TEXT NOT NULL, p2p_wait_ns INTEGER, long INTEGER NOT NULL, crc INTEGER NOT NULL,
    arrived_ns INTEGER NOT NULL, PRIMARY KEY (ring, seq)) WITHOUT ROWID;
CREATE INDEX step_end ON step (end_ns);
CREATE INDEX step_arrived ON step (arrived_ns, ring);
CREATE TABLE run_exit (job TEXT NOT NULL, run TEXT NOT NULL, code INTEGER NOT NULL, at_ns INTEGER NOT NULL, crc INTEGER NOT NULL,
    arrived_ns INTEGER NOT NULL, PRIMARY KEY (job, run)) WITHOUT ROWID;
CREATE TABLE incident (id TEXT NOT NULL, agent TEXT NOT NULL, job TEXT NOT NULL, run TEXT NOT NULL, state TEXT NOT NULL,
    began_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, data TEXT NOT NULL, crc INTEGER NOT NULL, arrived_ns INTEGER NOT NULL,
    PRIMARY KEY (id, agent)) WITHOUT ROWID;
CREATE INDEX incident_run ON incident (run, job);
CREATE INDEX incident_arrived ON incident (arrived_ns);
CREATE TABLE node_sample (at_ns INTEGER PRIMARY KEY, counters TEXT NOT NULL, crc INTEGER NOT NULL, arrived_ns INTEGER NOT NULL);
CREATE INDEX node_sample_arrived ON node_sample (arrived_ns);
CREATE TABLE clock (id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, monotonic_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
    arrived_ns INTEGER NOT NULL, crc INTEGER NOT NULL)
"""
#: The shape of the tables, SQLite's ``application_id``: states of development have the version of the next release.
SHAPE = zlib.crc32(" ".join(SCHEMA.split()).encode()) >> 1
