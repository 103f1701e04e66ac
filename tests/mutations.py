"""Some eighty faults in the core, each of which the tests of the core must find: ``python -m tests.mutations`` (``make mutations``).

Each is one changed line in a copy of the tree, so that agents, trainers and pages that a test starts have it, too. A mutation that no test
finds shows a gap in the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).parents[1]
PACKAGES = ("agent", "alerts", "collectors", "dashboards")
#: What tests build and keep, such as the native hook, under names of its source: all copies share it.
BUILT = ".stamps/cache"
AT_ONCE = 2


class Mutation(NamedTuple):
    """A line of the code, or a part of one that no other line has, and what becomes of it."""

    before: str
    after: str
    #: Folder or file of the tests that must find it, under ``tests``.
    tests: str


MUTATIONS = (
    # Bandwidths, intervals, the model of references.
    Mutation("return 2 * (n - 1) / n", "return (n - 1) / n", "agent/model/test_bandwidth.py"),
    Mutation("if factor is not None and group_size > 1 else None", "if factor is not None and group_size > 0 else None", "agent/model/test_bandwidth.py"),
    Mutation("return end - start - covered", "return end - start", "agent/model/test_intervals.py"),
    Mutation("gone = bisect_right(self.ends, before)", "gone = bisect_right(self.ends, before) + 1", "agent/model/test_intervals.py"),
    Mutation('(2 if op == "all_reduce" else 1) * (group_size - 1)', '(2 if op == "all_reduce" else 1) * group_size', "agent/model/test_alpha_beta.py"),
    Mutation("max(sizes) < LEAST_SPAN * min(sizes)", "max(sizes) < LEAST_SPAN", "agent/model/test_alpha_beta.py"),
    Mutation("rank = max(1, math.ceil(q * total))", "rank = max(1, math.floor(q * total))", "agent/model/test_sketch.py"),
    Mutation("math.exp((bin_number + 0.5) / BINS_PER_E)", "math.exp((bin_number - 0.5) / BINS_PER_E)", "agent/model/test_sketch.py"),
    # Stragglers.
    Mutation("COSTS = 0.05", "COSTS = 0.5", "agent/analysis/test_straggler_search.py"),
    Mutation("if span_ns < rules.least_ns or still_ns", "if still_ns", "agent/analysis/test_straggler_search.py"),
    Mutation("len(order) // 2 + 1), key=lambda n: total", "len(order)), key=lambda n: total", "agent/analysis/test_straggler_search.py"),
    Mutation("_CUT = 0.2", "_CUT = 0.0", "agent/analysis/test_straggler_search.py"),
    Mutation("\nRARE_STEPS = 12", "\nRARE_STEPS = 60", "agent/analysis/test_straggler_search.py"),
    Mutation("if times < _ALONE_LEAST or _ALONE_OF * by_chance > times:", "if times < _ALONE_LEAST:", "agent/analysis/test_straggler_search.py"),
    Mutation("return max(0, late_ns - self._usual_ns.get(place, late_ns))", "return late_ns", "agent/analysis/test_who_waits_for_whom.py"),
    Mutation("found if stepping or late.rank != min(waited_ns)]", "found]", "agent/analysis/test_who_waits_for_whom.py"),
    Mutation("if not rules.stepping and span_ns > WINDOWS_NS[-1]:", "if False:", "agent/analysis/test_who_waits_for_whom.py"),
    Mutation("(total < least) | (total + behind < _TIMES * behind)", "(total < least)", "agent/analysis/test_straggler_search.py"),
    Mutation("return not shed and not totals.on_device", "return not shed", "agent/analysis/test_ended_operations.py"),
    # Verdicts on what ranks have in flight.
    Mutation("if wait.since_s < CERTAIN_S:", "if wait.since_s < 0:", "agent/analysis/test_verdicts.py"),
    Mutation("is_due = certain or (wait", "is_due = (wait", "agent/analysis/test_verdicts.py"),
    Mutation("return False  # this rank waits for none", "continue  # this rank waits for none", "agent/analysis/test_verdicts.py"),
    Mutation("HANG_S, USUAL_TIMES = 10.0, 5.0", "HANG_S, USUAL_TIMES = 10.0, 1.0", "agent/analysis/test_verdicts.py"),
    Mutation("numbers += [each.seq for each in raised if", "numbers += [each.seq for each in () if", "agent/analysis/test_verdicts.py"),
    Mutation("if 2 * max(late.values()", "if max(late.values()", "agent/analysis/test_headline.py"),
    # Steps and shares.
    Mutation("exposed = min(known, comm_ns)", "exposed = max(known, comm_ns)", "agent/ingest/test_step_accounting.py"),
    Mutation("or _any_in(self._untimed, start_ns, end_ns))", "or False)", "agent/ingest/test_periods.py"),
    Mutation("if not self.duration or 10 * (self.steps - self.known) > self.steps:", "if not self.duration:", "agent/ingest/test_step_accounting.py"),
    Mutation("duration > LONG_TIMES * median(self._durations)", "duration > LONG_TIMES * max(self._durations)", "agent/ingest/test_step_accounting.py"),
    Mutation("known_from_ns = max(self.mode_since_ns, self._known_from_ns) if", "known_from_ns = self.mode_since_ns if", "agent/ingest/test_periods.py"),
    # Joins over the ranks of a group, waits.
    Mutation("part.duration_ns - late.duration_ns) for part", "part.duration_ns) for part", "agent/ingest/test_collective_join.py"),
    Mutation("NOT_KNOWN_NS, 0, own - usual[:, None])", "NOT_KNOWN_NS, 0, own)", "agent/ingest/test_collective_join.py"),
    Mutation("late[order] = np.maximum(0, own - earlier)", "late[order] = np.maximum(0, own)", "agent/ingest/test_collective_join.py"),
    Mutation("if len(ranks) == size:", "if ranks:", "agent/job/test_rank_parts.py"),
    Mutation("if part.end_ns < pending.last_launch:", "if False:", "agent/ingest/test_collective_join.py"),
    Mutation("if len(self._pending) > MOST_PENDING:", "if False:", "agent/ingest/test_collective_join.py"),
    # Retention of the history.
    Mutation("ORDER BY chunk.id LIMIT {_CHUNKS}", "ORDER BY chunk.id DESC LIMIT {_CHUNKS}", "agent/history/test_retention.py"),
    Mutation("if arrived_ns < cuts.get(", "if arrived_ns > cuts.get(", "agent/history/test_retention.py"),
    Mutation("if not ring.running:", "if ring.running or True:", "agent/history/test_store_limits.py"),
    Mutation("if deleted >= too_much[owner]:", "if False:", "agent/history/test_retention.py"),
    Mutation("WHERE arrived_ns < {before_ns:d} LIMIT {_ROWS}", "WHERE arrived_ns > {before_ns:d} LIMIT {_ROWS}", "agent/history/test_retention.py"),
    # Requests to an agent.
    Mutation("MOST_REQUESTS * (1 if self._requests[client] else 2)", "MOST_REQUESTS", "agent/web/test_gate.py"),
    Mutation("if self._requests[client] >= MOST_OF_ONE:", "if False:", "agent/web/test_gate.py"),
    Mutation("if taken > MOST_BODY_BYTES:", "if False:", "agent/web/test_gate.py"),
    Mutation('if "job" in given.get("scope", ()) or route', "if route", "agent/web/test_gate.py"),
    # Files of other users.
    Mutation("shared = trust.group and bool(found.folder.st_mode & stat.S_ISGID) and ", "shared = trust.group and ", "collectors/wire/test_crossing.py"),
    Mutation("if self._links > _MOST_LINKS or self._shared or of_others:", "if self._links > _MOST_LINKS or of_others:", "collectors/wire/test_crossing.py"),
    Mutation("if stat.S_IFMT(about.st_mode) != kind:", "if stat.S_ISDIR(about.st_mode) != (kind == stat.S_IFDIR):", "collectors/wire/test_crossing.py"),
    Mutation("content = file.read(most_bytes + 1)", "content = file.read(most_bytes)", "collectors/wire/test_crossing.py"),
    Mutation("self._names_path.name, crossing.user(self.uid)", "self._names_path.name, crossing.ANYBODY", "hostile/test_group_member.py"),
    Mutation("self._shared |= stranger or ", "self._shared |= ", "collectors/wire/test_crossing.py"),
    # Logs of NCCL, its RAS, PyTorch's Flight Recorder.
    Mutation("flushed = by_status.pop(_FLUSHED, []) if len(by_status) > 1 else []", "flushed: list[Warned] = []", "collectors/nccl/test_findings.py"),
    Mutation("_behind(log, group, by_group) - elsewhere", "_behind(log, group, by_group)", "collectors/nccl/test_timeouts.py"),
    Mutation("if self.messages - at <= _SOON:", "if True:", "collectors/nccl/test_reasons.py"),
    Mutation("for _, each in warned if is_complete else ():", "for _, each in ():", "collectors/nccl/test_reasons.py"),
    Mutation("rule.depth if error else CAUSE, at", "CAUSE, at", "collectors/nccl/test_reasons.py"),
    Mutation("    if unchanged_s < HANG_S:", "    if unchanged_s < 0:", "agent/sources/test_ras.py"),
    Mutation("self._memo[len(self._memo)] = self.stack[-1]", "self._memo[len(self._memo) + 1] = self.stack[-1]", "collectors/node/test_flight_recorder.py"),
    Mutation("raw = raw[-MOST_ENTRIES:]", "raw = raw[:MOST_ENTRIES]", "collectors/node/test_flight_recorder.py"),
    Mutation("size_bytes=max(sizes, default=None)", "size_bytes=min(sizes, default=None)", "collectors/node/test_flight_recorder.py"),
    # From the trainer to the agent: the probe, the ring.
    Mutation("return (size - 1).bit_length() if size else -1", "return size.bit_length() if size else -1", "collectors/probe/test_governor.py"),
    Mutation("return self._gap[1] > GAP_PATIENCE", "return self._gap[1] >= GAP_PATIENCE", "collectors/wire/test_ring.py"),
    Mutation("if final:  # the writer may have been killed between", "if False:  # the writer may have been killed between", "collectors/wire/test_ring.py"),
    Mutation("return sorted((r for r in records if r.stamp == r.stamp2), key", "return sorted(records, key", "collectors/wire/test_ring_file.py"),
    Mutation("idle_ns = (now_ns - self._wall_ns) - (cpu_ns - self._cpu_ns)", "idle_ns = now_ns - self._wall_ns", "collectors/probe/test_exposure.py"),
    Mutation("if not calls.running:  # nested calls", "if True:  # nested calls", "collectors/probe/test_torch_steps.py"),
    Mutation('"_reduce_scatter_base_": ("reduce_scatter", Measure.SECOND)', '"_reduce_scatter_base_": ("reduce_scatter", Measure.FIRST)', "e2e/test_wire.py"),
    # Alerts and their messages.
    Mutation("self.above is None or value > self.above", "self.above is None or value >= self.above", "alerts/test_kinds.py"),
    Mutation("min(severity, given.severity, key", "max(severity, given.severity, key", "alerts/test_kinds.py"),
    Mutation("        if given.enabled:", "        if True:", "alerts/test_kinds.py"),
    Mutation("hours * 3600 + minutes * 60 + rest", "hours * 3600 + minutes + rest", "alerts/test_catalogue.py"),
    # How jobs end.
    Mutation("if ending is not None and ending.until_ns >= began}", "if ending is not None}", "agent/analysis/test_runs_of_one_name.py"),
    Mutation("key=lambda code: (code == 0, code))", "key=lambda code: code)", "agent/job/test_answers.py"),
    Mutation("raised_ns is not None and ended_ns - raised_ns < _SHORTLY_NS", "raised_ns is not None", "agent/model/test_endings.py"),
    Mutation("apart_ns = 1 if others_raised else _APART_NS", "apart_ns = 1", "agent/model/test_endings.py"),
    Mutation("return had_hung or bool(set(condition.ranks) & set(known.waiting))", "return had_hung", "agent/incidents/test_lifecycle.py"),
    Mutation("if cause.seen_at < effect.began_at and lost <= set(cause.waiting):", "if False:", "agent/incidents/test_job_rules.py"),
    # The live page.
    Mutation("const op = rank.oldest;", "const op = job.in_flight.find((each) => each.rank === rank.rank);", "agent/web/test_live_page_modules.py"),
    Mutation("size >= SMALL ? 0 : size >= TINY ? 1 : 2", "size >= TINY ? 0 : 2", "agent/web/test_live_page_modules.py"),
    Mutation("[below(incident, 0)]", "[[{ incident, depth: 0 }]]", "agent/web/test_live_page_modules.py"),
    Mutation("if (at < latest - HOUR_S) this", "if (at < latest - 2 * HOUR_S) this", "agent/web/test_live_page_modules.py"),
    Mutation("known = [share for share in shares if share is not None]", "known = [share or 0.0 for share in shares]", "agent/questions/test_live_view.py"),
)  # fmt: skip


@cache
def sources() -> dict[Path, str]:
    """Return the text of each file that may have a mutation: code of the packages, and of the live page."""
    files = [path for package in PACKAGES for path in (TREE / package).rglob("*") if path.suffix in (".py", ".js")]
    return {path: path.read_text(encoding="utf-8") for path in files}


def place_of(mutation: Mutation) -> Path:
    """Return the file that has the line.

    Raises:
        LookupError: no line has it, or several have.
    """
    found = [path for path, text in sources().items() for _ in range(text.count(mutation.before))]
    if len(found) != 1:
        raise LookupError(f"{mutation.before}: {len(found)} times")
    return found[0]


def copy_with(mutation: Mutation, to: Path) -> None:
    """Copy the tree, and change the line there."""
    shutil.copytree(TREE, to, symlinks=True, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
    (TREE / BUILT).mkdir(parents=True, exist_ok=True)
    (to / BUILT).parent.mkdir()
    (to / BUILT).symlink_to(TREE / BUILT)
    place = place_of(mutation)
    changed = sources()[place].replace(mutation.before, mutation.after)
    (to / place.relative_to(TREE)).write_text(changed, encoding="utf-8")


def survives(number: int) -> bool:
    """Run the tests of a mutation; return True if none of them fails, or if they do not run."""
    mutation = MUTATIONS[number]
    with tempfile.TemporaryDirectory(prefix="commwatch-mutation-") as copy:
        copy_with(mutation, Path(copy))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{mutation.tests}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(f"{copy}/{package}" for package in PACKAGES)},
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    how = {0: "SURVIVES", 1: "caught"}.get(done.returncode, "TESTS DO NOT RUN")
    print(f"{number + 1:2} {how}: {mutation.after}: {first}", flush=True)
    return done.returncode != 1


def main() -> int:
    """Run all mutations; return 1 if one survives."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return int(any(list(pool.map(survives, range(len(MUTATIONS))))))


if __name__ == "__main__":
    sys.exit(main())
