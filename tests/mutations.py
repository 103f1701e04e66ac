"""Twenty faults in the core, each of which the tests of the core must find: ``python -m tests.mutations`` (``make mutations``).

Each is one changed line. The file is found by that line, and changed while Python imports it: nothing is written. A mutation that no
test finds shows a gap in the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

TREE = Path(__file__).parents[1]
#: Set in the process that runs the tests: number of the mutation.
VARIABLE = "COMMWATCH_TEST_MUTATION"
AT_ONCE = 2


class Mutation(NamedTuple):
    """A line of the code, and what becomes of it."""

    before: str
    after: str
    #: Folder or file of the tests that must find it, under ``tests``.
    tests: str


MUTATIONS = (
    # Bandwidths, intervals, the model of references.
    Mutation("return 2 * (n - 1) / n", "return (n - 1) / n", "agent/core"),
    Mutation("if factor is not None and group_size > 1 else None", "if factor is not None and group_size > 0 else None", "agent/core"),
    Mutation("return end - start - covered", "return end - start", "agent/core"),
    Mutation("gone = bisect_right(self.ends, before)", "gone = bisect_right(self.ends, before) + 1", "agent/core"),
    Mutation('(2 if op == "all_reduce" else 1) * (group_size - 1)', '(2 if op == "all_reduce" else 1) * group_size', "agent/core"),
    Mutation("max(sizes) < LEAST_SPAN * min(sizes)", "max(sizes) < LEAST_SPAN", "agent/core"),
    Mutation("rank = max(1, math.ceil(q * total))", "rank = max(1, math.floor(q * total))", "agent/core"),
    Mutation("math.exp((bin_number + 0.5) / BINS_PER_E)", "math.exp((bin_number - 0.5) / BINS_PER_E)", "agent/core"),
    # Steps, waits, stragglers.
    Mutation("waits = [(part, part.duration_ns - late.duration_ns) for part in parts]", "waits = [(part, part.duration_ns) for part in parts]", "agent/ingest"),
    Mutation("most = np.where(own == NOT_KNOWN_NS, 0, own - usual[:, None])", "most = np.where(own == NOT_KNOWN_NS, 0, own)", "agent/ingest"),
    Mutation("COSTS = 0.05", "COSTS = 0.5", "agent/analysis"),
    Mutation("LEAST_NS, LEAST_PERIODS = 5_000_000_000, 5", "LEAST_NS, LEAST_PERIODS = 1_000_000_000, 1", "agent/analysis"),
    Mutation("exposed = min(known, comm_ns)", "exposed = max(known, comm_ns)", "agent/ingest"),
    Mutation("or _any_in(self._untimed, start_ns, end_ns))", "or False)", "agent/ingest"),
    # Verdicts, alerts, queries of rules.
    Mutation("if wait.since_s < CERTAIN_S:", "if wait.since_s < 0:", "agent/analysis"),
    Mutation("at_s - active.since_s >= rule.for_s", "at_s - active.since_s > rule.for_s", "alerts"),
    Mutation("if at_s - ended_s < rule.keep_firing_for_s:", "if at_s - ended_s < 0:", "alerts"),
    Mutation("place = q * (len(ordered) - 1)", "place = q * len(ordered)", "alerts"),
    # From the trainer to the agent.
    Mutation("return (size - 1).bit_length() if size else -1", "return size.bit_length() if size else -1", "collectors"),
    Mutation("return self._gap[1] > GAP_PATIENCE", "return self._gap[1] >= GAP_PATIENCE", "collectors/wire/test_ring.py"),
)  # fmt: skip


def place_of(mutation: Mutation) -> Path:
    """Return the one file that has the line.

    Raises:
        LookupError: no file has it, or several have.
    """
    files = [path for room in ("agent", "collectors", "alerts") for path in sorted((TREE / room).rglob("*.py"))]
    found = [path for path in files if mutation.before in path.read_text(encoding="utf-8")]
    if len(found) != 1:
        raise LookupError(f"{mutation.before}: in {len(found)} files")
    return found[0]


def install(mutation: Mutation) -> None:
    """Change the file of a mutation while this process imports it."""
    place, own = place_of(mutation), SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = Path(self.get_filename(fullname))
        if path.resolve() != place:
            return own(self, fullname)
        source = path.read_text(encoding="utf-8").replace(mutation.before, mutation.after)
        code: CodeType = self.source_to_code(source.encode(), str(path))
        return code

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def survives(number: int) -> bool:
    """Run the tests of a mutation; return True if none of them fails."""
    mutation = MUTATIONS[number]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not browser",
        "-p",
        "tests.mutations",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, str(TREE / "tests" / mutation.tests)],
        env={**os.environ, VARIABLE: str(number)},
        cwd=TREE,
        capture_output=True,
        text=True,
        check=False,
    )
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    print(f"{number + 1:2} {'caught' if done.returncode == 1 else 'SURVIVES'}: {mutation.after}: {first}", flush=True)
    return done.returncode != 1


def main() -> int:
    """Run all mutations; return 1 if one survives."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return int(any(list(pool.map(survives, range(len(MUTATIONS))))))


if VARIABLE in os.environ:
    install(MUTATIONS[int(os.environ[VARIABLE])])

if __name__ == "__main__":
    sys.exit(main())
