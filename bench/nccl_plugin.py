"""What a profiler plugin costs NCCL's threads: ns of a collective, and of each of its channels.

Calls the plugin as NCCL does. The cost of a channel is the slope between one and sixteen channels. An empty plugin shows what the calls
themselves cost; all figures are without it. NVIDIA's example and Inspector are measured in the same run if NCCL_SOURCES is a checkout of
NVIDIA/nccl. They are on the simulated driver of ``tests/cuda_rig`` then, which Inspector asks for the name of the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from bench.common import emit, scratch
from commwatch.probe.native.library import PLUGIN
from tests.cuda_rig.build import build
from tests.cuda_rig.nccl_sources import build_plugin

COLLECTIVES, ROUNDS, MANY = 200_000, 7, 16
#: It reads all sources of the driver each time.
simulated_driver = cache(build)
#: Of NCCL's sources.
PEERS = ("example", "inspector")
#: What the peers take: operations, messages and kernels of any size. Without a file the example writes nothing; it keeps 16 operations by default.
ON = {
    "NCCL_PROFILE_EVENT_MASK": "70",
    **{f"NCCL_PROFILE_{kind}_POOL_SIZE": "512" for kind in ("GROUP", "COLL", "GROUP_API", "COLL_API")},
    "NCCL_INSPECTOR_ENABLE": "1",
    "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES": "0",
}
#: It returns a handle for each event, and does nothing with it.
EMPTY = """#include "interface.h"
static int init(void** c, uint64_t i, int* m, const char* n, int o, int r, int k, log_function l) {
  (void)i, (void)n, (void)o, (void)r, (void)k, (void)l;
  *c = (void*)1;
  *m = kColl | kP2p | kKernelCh;
  return 0;
}
static int start(void* c, void** h, struct event* e) { (void)c, (void)e; *h = (void*)1; return 0; }
static int stop(void* h) { (void)h; return 0; }
static int state(void* h, int s, union state_args* a) { (void)h, (void)s, (void)a; return 0; }
static int finalize(void* c) { (void)c; return 0; }
const struct profiler ncclProfiler_v6 = {"empty", init, start, stop, state, finalize};
"""


class Cost(NamedTuple):
    """ns of a collective with one channel, and of each more channel; calls of malloc for a collective with one channel."""

    one_ns: float
    #: ``None``: with more channels, the plugin soon takes no more collectives, as NVIDIA's example does.
    channel_ns: float | None
    mallocs: float

    def over(self, empty: Cost) -> Cost:
        """The cost beyond that of the empty plugin."""
        channel = None if self.channel_ns is None else self.channel_ns - (empty.channel_ns or 0)
        return Cost(self.one_ns - empty.one_ns, channel, self.mallocs)


def once(program: Path, plugin: str, channels: int, in_calls: bool) -> dict[str, float]:
    """ns and calls of malloc for one collective."""
    env = {**os.environ, **ON, "COMMWATCH_NCCL_CHAIN": "/nowhere", "NCCL_INSPECTOR_DUMP_DIR": str(program.parent)}
    if "NCCL_SOURCES" in os.environ:
        env["LD_LIBRARY_PATH"] = f"{simulated_driver()}:{env.get('LD_LIBRARY_PATH', '')}"
    command = [str(program), plugin, str(COLLECTIVES), str(channels), str(int(in_calls))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr or f"{plugin}: exit code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def cost(program: Path, plugin: str, in_calls: bool) -> Cost:
    """Of one round."""
    one, many = once(program, plugin, 1, in_calls), once(program, plugin, MANY, in_calls)
    assert not one["dropped"], f"{plugin}: {one['dropped']:.0f} collectives were dropped"
    channel = None if many["dropped"] else (many["ns"] - one["ns"]) / (MANY - 1)
    return Cost(one["ns"], channel, one["mallocs"])


def figures(rounds: list[dict[str, Cost]], name: str) -> dict[str, float | None]:
    """Medians of one plugin over the rounds: ns of a collective without its channels (with one, if the cost of a channel is not known)."""
    found = [each[name].over(each["empty"]) for each in rounds]
    channels = [one.channel_ns for one in found if one.channel_ns is not None]
    channel = median(channels) if len(channels) == len(found) else None
    return {
        "collective_ns": median(one.one_ns for one in found) - (channel or 0),
        "channel_ns": channel,
        "mallocs": found[0].mallocs,
    }


def main() -> None:
    """Measure all plugins in turn, round by round, and print."""
    sources = os.environ.get("NCCL_SOURCES")
    with scratch() as where:
        others = {name: str(build_plugin(Path(sources), name, where)) for name in PEERS} if sources else {}
        (where / "empty.c").write_text(EMPTY)
        gcc = ["gcc", "-std=c11", "-O2", f"-I{PLUGIN}"]
        shared = ["-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run([*gcc, str(Path(__file__).with_suffix(".c")), "-o", str(where / "bench"), "-ldl"], check=True)
        subprocess.run(
            [*gcc, *shared, str(PLUGIN / "plugin.c"), "-o", str(where / "ours.so"), "-ldl", "-pthread"], check=True
        )
        subprocess.run([*gcc, "-fPIC", "-shared", str(where / "empty.c"), "-o", str(where / "empty.so")], check=True)
        arms = {
            "empty": (str(where / "empty.so"), True),
            "ours": (str(where / "ours.so"), True),
            "ours, of other libraries": (str(where / "ours.so"), False),
            **{name: (path, False) for name, path in others.items()},
        }
        rounds = [{name: cost(where / "bench", *arm) for name, arm in arms.items()} for _ in range(ROUNDS)]
    emit(
        {
            "of_pytorch": figures(rounds, "ours"),
            "of_others": figures(rounds, "ours, of other libraries"),
            "peers": {name: figures(rounds, name) for name in others},
        }
    )


if __name__ == "__main__":
    main()
