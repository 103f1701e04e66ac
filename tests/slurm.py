"""A Slurm of two nodes on this machine, with its own folder, ports and key: real daemons, ended by their process ids.

Each node has a name of its own, memory in ``/dev/shm``, and the folders ``run`` and ``state``, which lie outside under its name. The network
and all other folders they have in common.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bare import opened
from tests.helpers import PATIENCE_S, clean_env, free_port, needs, wait_for

#: The nodes, each with the address that its name has on all of them.
ADDRESSES = {"one": "127.0.0.2", "two": "127.0.0.3"}
NODES = tuple(ADDRESSES)
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "unshare", "setpriv")
#: No cgroups and no accounting of the machine. Daemons listen on all addresses: a node names 127.0.0.2, and connects from 127.0.0.1.
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/controller
SlurmdSpoolDir={place}/%n/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
MpiDefault=none
PrologFlags=Alloc
{scripts}
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""


@dataclass(frozen=True)
class Slurm:
    """How to use it."""

    place: Path

    def user(self, user: str, *command: str | Path, **env: str) -> subprocess.Popen[str]:
        """A command of Slurm's as this user, in its home, with what it says in ``stdout``; no native hook is built where it may read."""
        home = self.place / "home"
        group = pwd.getpwnam(user).pw_gid
        become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups", "--"]
        return subprocess.Popen(
            [*become, *map(str, command)],
            cwd=home,
            env=clean_env(SLURM_CONF=str(self.place / "slurm.conf"), HOME=str(home), COMMWATCH_HOOK="python", **env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, *command: str) -> str:
        """What a command of Slurm's says to root."""
        env = clean_env(SLURM_CONF=str(self.place / "slurm.conf"))
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Of the nodes by name: ``idle``, ``mixed``, ``drained``, ..."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {name: state for name, _, state in (line.partition(" ") for line in lines)}

    def idle(self) -> bool:
        """Whether all nodes wait for work."""
        return self.states() == dict.fromkeys(NODES, "idle")

    def at(self, node: str, *command: str | Path) -> list[str]:
        """What runs a command under the name of a node."""
        return ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec {shlex.join(map(str, command))}"]

    def job(self, number: str) -> str:
        """All that the controller says of a job."""
        return self.ask("scontrol", "show", "job", number)


@contextmanager
def slurm(place: Path, **scripts: Path) -> Iterator[Slurm]:
    """Start it.

    Args:
        place: a folder that everybody may enter.
        scripts: ``Prolog``, ``Epilog``, ``TaskProlog``.
    """
    needs(os.geteuid() == 0 and all(map(shutil.which, PROGRAMS)), "root, slurmctld, slurmd, slurm-client and munge")
    host = socket.gethostname().split(".")[0]
    own = [f"{name}/{folder}" for name in NODES for folder in ("spool", "run", "state")]
    for folder in ("controller", "home", "run", "state", *own):
        (place / folder).mkdir(parents=True, exist_ok=True)
    shutil.chown(place / "home", "nobody", "nogroup")
    lines = "\n".join(f"{name}={path}" for name, path in scripts.items())
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={address} Port={free_port()} CPUs=2 RealMemory=2000"
        for name, address in ADDRESSES.items()
    )
    text = SETTINGS.format(host=host, place=place, controller=free_port(), nodes=nodes, scripts=lines)
    (place / "slurm.conf").write_text(text)
    own_names = [f"{address} {name}\n" for name, address in ADDRESSES.items()]
    (place / "hosts").write_text(f"127.0.0.1 localhost {host}\n{''.join(own_names)}")
    (place / "munge.key").write_bytes(secrets.token_bytes(128))
    (place / "munge.key").chmod(0o600)
    running = Slurm(place)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{flag}={place}/munge.{name}" for flag, name in files.items())]
    daemon = shlex.join(["slurmd", "-D", "-f", str(place / "slurm.conf")])
    with ExitStack() as ends:
        _start(ends, place, munge)
        wait_for((place / "munge.socket").exists, "munge")
        _start(ends, place, ["slurmctld", "-D", "-f", str(place / "slurm.conf")])
        for name in NODES:  # tasks run this Python, which may lie in a private folder, as another user
            names = f"hostname {name} && mount --bind {place}/hosts /etc/hosts"
            memory = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mkdir /dev/shm/hold"
            folders = " && ".join(f"mount --bind {place}/{name}/{own} {place}/{own}" for own in ("run", "state"))
            inside = f"{names} && {folders} && {memory} && {opened(Path('/dev/shm/hold'))} && exec {daemon} -N {name}"
            _start(ends, place, ["unshare", "--mount", "--uts", "sh", "-c", inside])
        wait_for(running.idle, "the nodes")
        yield running
        running.ask("scancel", "--partition=all")
        wait_for(_nothing_runs(running), "the end of all jobs")


def _nothing_runs(running: Slurm) -> Callable[[], bool]:
    return lambda: running.ask("squeue", "--noheader") == ""


def _start(ends: ExitStack, place: Path, command: list[str]) -> None:
    with open(place / "daemons.log", "ab") as log:
        process = subprocess.Popen(command, env=clean_env(), cwd=place, stdout=log, stderr=log)
    ends.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
