"""Starts the ranks of test jobs as forks of one process that has imported torch, which saves 3 s of a core for each.

``command`` is used in the place of ``torchrun`` or of Python. What it starts here is a client: it hands its arguments, environment, folder,
standard streams and network to the server, and ends as the job does. The variables of the ranks and their store are those of torchrun.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

#: What the server imports; jobs that import more pay for it themselves.
PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel")
#: What a rank shares with its client: the network, and ``/sys``, where its devices are seen.
NAMESPACES = ("net", "mnt")
#: How long a rank has to end after SIGTERM, in seconds.
_GRACE_S = 30.0
_MOST_BYTES = 1 << 20


def command(script: Path, *arguments: str, ranks: int = 0) -> list[str]:
    """The command line that runs a script.

    Args:
        ranks: how many processes, as torchrun starts them; 0: one process whose environment says who it is.
    """
    return [sys.executable, "-S", "-E", __file__, str(_server()), str(ranks), str(script), *arguments]


@cache
def _server() -> Path:
    """Socket of the server, which is started with the first job and ends with the tests."""
    from tests.helpers import clean_env  # not at the top: clients and server run this file without the tests' packages

    folder = tempfile.TemporaryDirectory(prefix="commwatch-prefork-")
    path = Path(folder.name, "socket")
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", str(path)],
        env=clean_env(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.read(1), "the server has not started"
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return path


# -- the client -----------------------------------------------------------------------------------


def _client(path: str, ranks: str, *argv: str) -> int:
    """Run a job on the server; returns how it ended, as ``Popen.returncode``."""
    request = {"argv": argv, "ranks": int(ranks), "cwd": str(Path.cwd()), "env": dict(os.environ)}
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        descriptors = array.array("i", [0, 1, 2, *namespaces])
        server.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        server.sendall(json.dumps(request).encode() + b"\n")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        return int(server.recv(16) or 1)


# -- the server -----------------------------------------------------------------------------------


def _serve(path: str) -> dict[str, Any]:
    """Fork for each requested job; return only in a rank, with what it has to run."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b".")
        while True:
            readable = select.select([listener.fileno(), 0], [], [])[0]
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if 0 in readable:
                os._exit(0)
            client = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                return _supervise(client)
            client.close()


def _supervise(client: socket.socket) -> dict[str, Any]:
    """Start the ranks of a job and wait for them as torchrun does; returns in the ranks only."""
    _, ancillary, _, _ = client.recvmsg(1, socket.CMSG_SPACE((3 + len(NAMESPACES)) * array.array("i").itemsize))
    descriptors = list(array.array("i", ancillary[0][2]))
    request: dict[str, Any] = json.loads(client.makefile("rb").readline(_MOST_BYTES))
    ranks = request["ranks"]
    port_read, port_write = os.pipe()
    pids = []
    for rank in range(ranks or 1):
        pid = os.fork()
        if pid == 0:
            client.close()
            os.close(port_write)
            _become(request, descriptors)
            if ranks:
                port = os.read(port_read, 16).decode().strip()
                os.environ.update(_as_torchrun(rank, ranks, port))
            os.close(port_read)
            return request
        pids.append(pid)
    store = None
    if ranks:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public all the same

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in pids:
            os.write(port_write, f"{store.port:>16}".encode())
    code = _waited(client, {os.pidfd_open(pid): pid for pid in pids})
    if ranks:
        code = int(code != 0)
    with suppress(OSError):
        client.sendall(str(code).encode())
    os._exit(0)


def _as_torchrun(rank: int, ranks: int, port: str) -> dict[str, str]:
    at = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    of = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))
    elastic = {"RESTART_COUNT": "0", "MAX_RESTARTS": "0", "RUN_ID": "none", "USE_AGENT_STORE": "True"}
    return {
        **at,
        **of,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()},
    }


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over what the client has: streams, network, folder and environment."""
    for number, stream in enumerate(descriptors[:3]):
        os.dup2(stream, number)
    for name, theirs in zip(NAMESPACES, descriptors[3:], strict=True):
        if os.fstat(theirs).st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino:
            assert ctypes.CDLL(None).setns(theirs, 0) == 0, f"setns {name}"
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def _waited(client: socket.socket, alive: dict[int, int]) -> int:
    """Wait for all ranks; passes signals on, and ends all when one fails or the client is gone. Returns how the first that failed ended."""
    failed = 0
    patience_s: float | None = None
    while alive:
        readable = select.select([*alive, client.fileno()], [], [], patience_s)[0]
        ending = 0 if readable else int(signal.SIGKILL)
        if client.fileno() in readable:
            told = client.recv(1)
            ending = told[0] if told else int(signal.SIGKILL)
        for descriptor in alive.keys() & set(readable):
            code = os.waitstatus_to_exitcode(os.waitpid(alive.pop(descriptor), 0)[1])
            os.close(descriptor)
            if code and not failed:
                failed, ending, patience_s = code, int(signal.SIGTERM), _GRACE_S
        for descriptor in alive if ending else ():
            signal.pidfd_send_signal(descriptor, ending)
    return failed


def _run(request: dict[str, Any]) -> int:
    """Be the rank, as Python would be that has just imported torch; returns the exit code."""
    from torch.distributed import set_debug_level_from_env  # type: ignore[attr-defined]

    from commwatch.collectors.torch_entry import autoload

    script, *_ = sys.argv = request["argv"]
    sys.path[0] = str(Path(script).parent)
    set_debug_level_from_env()
    code = 0
    # A module of its own stays until the interpreter ends, which `runpy.run_path` does not allow.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    try:
        autoload()
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What an interpreter does at its end, short of taking down each module: that would copy the server's memory, for 2 s.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import importlib

        for module in PRELOADED:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # or each rank would copy what its collector looks at
        os._exit(_run(_serve(sys.argv[2])))
    else:
        ended = _client(*sys.argv[1:])
        if ended < 0:
            signal.signal(-ended, signal.SIG_DFL)
            os.kill(os.getpid(), -ended)
        sys.exit(ended)
