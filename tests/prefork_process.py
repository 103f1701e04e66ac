"""The servers of ``prefork.py``, and the client that is a job's command line: run as a file, without the tests' packages.

``serve SOCKET KIND``: a server. ``SOCKET RANKS ARGV...``: a client.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING or sys.argv[1:2] == ["serve"]:  # a client, of which each rank has one, would import them for 14 ms
    import atexit
    import ctypes
    import gc
    import importlib
    import io
    import select
    import threading
    import types
    from collections.abc import Mapping, Sequence
    from contextlib import suppress
    from importlib.util import find_spec
    from pathlib import Path
    from typing import Any

#: What the servers import, for jobs and for agents. A process that needs other modules imports them itself.
PRELOADED = {
    # The first use of an optimizer imports `torch._dynamo`, which takes 2 s of a core.
    "job": (
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.tensor",
        "torch.nn.parallel",
        "torch._dynamo",
    ),
    "agent": (
        "commwatch_agent.cli",
        "commwatch.api.client",
        "commwatch_agent.daemon",
        "commwatch_agent.questions.worker_process",
        "commwatch_agent.web.listener",
        "commwatch_agent.web.application",
    ),
}
#: The constants of an agent, for the processes that it starts.
_CONSTANTS = "TESTED_CONSTANTS"
#: What a rank shares with its client: the network, ``/sys``, where its devices are seen, and the clock.
NAMESPACES = ("net", "mnt", "time")
#: How long a rank has to end after SIGTERM, in seconds.
_GRACE_S = 30.0
#: How long the others have to end by themselves once one has failed, so that it is clear which was first. torchrun looks every 0.1 s.
_LOOK_S = 1.0
_MOST_BYTES = 1 << 20


# -- the client -----------------------------------------------------------------------------------


def connected(
    path: str,
    ranks: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | str,
    streams: Sequence[int],
    beside: int | None = None,
    constants: Mapping[str, float | str] | None = None,
    in_session: bool = False,
) -> socket.socket:
    """Start a program on a server. The connection yields its pid (the first rank's), and its end, as ``Popen.returncode``: a line each."""
    umask = os.umask(0o077)
    os.umask(umask)
    request = {"argv": argv, "ranks": ranks, "cwd": str(cwd), "env": dict(env), "umask": umask}
    request |= {"constants": dict(constants or {}), "in_session": in_session}
    namespaces = [os.open(f"/proc/{beside or 'self'}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    descriptors = array.array("i", [*streams, *namespaces])
    server.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    server.sendall(json.dumps(request).encode() + b"\n")
    for namespace in namespaces:
        os.close(namespace)
    return server


def _client(path: str, ranks: str, *argv: str) -> int:
    """Run a job on the server; returns how it ended, as ``Popen.returncode``."""
    try:
        here = os.getcwd()  # noqa: PTH109 - pathlib is one of the imports that a client does without
    except FileNotFoundError:  # it was deleted
        here = f"/proc/{os.getpid()}/cwd"
    constants = json.loads(os.environ.get(_CONSTANTS, "{}"))
    server = connected(path, int(ranks), argv, os.environ, here, (0, 1, 2), constants=constants)
    with server, server.makefile() as replies:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        replies.readline()
        return int(replies.readline() or 1)


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
    client.sendall(b"%d\n" % pids[0])
    code = _waited(client, {os.pidfd_open(pid): pid for pid in pids})
    if ranks:
        code = int(code != 0)
    with suppress(OSError):
        client.sendall(b"%d\n" % code)
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
    if request["in_session"]:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    # Python looks at the streams when it starts: whether they can be rewound, for one.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        raw = open(number, "wb" if number else "rb", 0 if number else -1, closefd=False)  # noqa: SIM115 - it stays open
        again = io.TextIOWrapper(raw, before.encoding, before.errors, write_through=bool(number))
        setattr(sys, name, again)
        setattr(sys, f"__{name}__", again)


def _waited(client: socket.socket, alive: dict[int, int]) -> int:
    """Wait for all ranks; passes signals on, and ends all when the client is gone or one has failed, shortly after that, as torchrun looks
    now and then. Returns how the first that failed ended."""
    failed = 0
    endings: list[tuple[float, int]] = []
    while alive:
        readable = select.select([*alive, client.fileno()], [], [], endings[0][0] if endings else None)[0]
        ending = 0
        if not readable:
            _, ending = endings.pop(0) if len(endings) > 1 else endings[0]
        if client.fileno() in readable:
            told = client.recv(1)
            ending = told[0] if told else int(signal.SIGKILL)
        for descriptor in alive.keys() & set(readable):
            code = os.waitstatus_to_exitcode(os.waitpid(alive.pop(descriptor), 0)[1])
            os.close(descriptor)
            if code and not failed:
                failed, endings = code, [(_LOOK_S, int(signal.SIGTERM)), (_GRACE_S, int(signal.SIGKILL))]
        for descriptor in alive if ending else ():
            signal.pidfd_send_signal(descriptor, ending)
    return failed


def _be_rank(script: str) -> None:
    """Do what Python does that has just imported torch."""
    from torch.distributed import set_debug_level_from_env  # type: ignore[attr-defined]

    from commwatch.torch_entry import autoload

    sys.path[0] = str(Path(script).parent)
    set_debug_level_from_env()
    autoload()


def _set(constants: Mapping[str, float | str]) -> None:
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        place = importlib.import_module(module)
        assert hasattr(place, constant), name
        setattr(place, constant, value)


def _run(request: dict[str, Any], kind: str) -> int:
    """Be the rank or agent; returns the exit code."""
    script, *_ = sys.argv = request["argv"]
    code = 0
    # A module of its own stays until the interpreter ends, which `runpy.run_path` does not allow.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    try:
        if kind == "job":
            _be_rank(script)
        else:
            with suppress(FileNotFoundError):
                sys.path[0] = str(Path.cwd())
            _set(request["constants"])
            os.environ[_CONSTANTS] = json.dumps(request["constants"])
        text = sys.argv.pop(1) if script == "-c" else Path(script).read_bytes()
        exec(compile(text, script, "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    # What an interpreter does at its end, short of taking down each module: that would copy the server's memory, for 2 s.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _fork_what_they_start(path: str) -> None:
    """Have ``commwatch run`` start its agent, and an agent its history worker, on the server on which they were started themselves."""
    from commwatch_agent.commands import run
    from commwatch_agent.questions import worker

    program = find_spec("commwatch_agent.__main__")
    assert program is not None
    assert program.origin is not None
    client = (sys.executable, "-S", "-E", __file__, path, "0")
    run.AGENT = (*client, program.origin, "agent")
    worker.COMMAND = (*client, *worker.COMMAND[1:])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _, _, socket_path, kind = sys.argv
        for module in PRELOADED[kind]:
            importlib.import_module(module)
        if kind == "agent":
            _fork_what_they_start(socket_path)
        gc.collect()
        gc.freeze()  # or each rank would copy what its collector looks at
        os._exit(_run(_serve(socket_path), kind))
    else:
        ended = _client(*sys.argv[1:])
        if ended < 0:
            if ended != -signal.SIGKILL:
                signal.signal(-ended, signal.SIG_DFL)
            os.kill(os.getpid(), -ended)
        sys.exit(ended)
