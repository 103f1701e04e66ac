"""Physical lines to messages: whose they are, through all that launchers and torn streams do to them."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.text import Head, Message, Process, clean, has_own_time, parse_line

HEAD = "gpu-a7:4411:4502 [3]"
SAID = "Connected all trees"


def messages(line: str, hosts: tuple[str, ...] = ()) -> list[Message]:
    return parse_line(clean(line), hosts)


def account_of(*lines: str) -> Account:
    account = Account()
    for number, line in enumerate(lines, 1):
        account.add(line, "log", number)
    return account


#: What stands between host:pid:tid and the text, level, origin.
HEADS = {
    " [3] NCCL INFO ": ("INFO", ""),
    " [-1] NCCL INFO ": ("INFO", ""),
    " [3] misc/socket.cc:52 NCCL WARN ": ("WARN", "misc/socket.cc:52"),
    " [3] init.cc:1409 (ncclCommInitRankFunc) NCCL WARN ": ("WARN", "init.cc:1409"),
    " [3] net_ofi_progress:88 NCCL WARN ": ("WARN", "net_ofi_progress:88"),
    " [3] /long/build/rccl/hipify/src/init.cc:19 NCCL WARN ": ("WARN", "/long/build/rccl/hipify/src/init.cc:19"),
    " NCCL CALL ": ("CALL", ""),
    " [3] 1234.500000 proxyMain:77 NCCL TRACE ": ("TRACE", "proxyMain:77"),
    " [3] 1234.500000 proxy.cc:77 NCCL TRACE ": ("TRACE", "proxy.cc:77"),
    " [3] NCCL ABORT ": ("ABORT", ""),
    " [3] static int process_err_completion(nccl_net_ofi_ep_t*, fid_cq*):311 NCCL WARN ": (
        "WARN",
        "process_err_completion:311",
    ),
    " [3] virtual int ofi::ep_t::close(bool) [with T = a::b]:88 NCCL WARN ": ("WARN", "ofi::ep_t::close:88"),
    " [3] int ofi::ep_t::post() const:9 NCCL WARN ": ("WARN", "ofi::ep_t::post:9"),
}


@pytest.mark.parametrize("between", HEADS)
def test_heads(between: str) -> None:
    """Every head that NCCL prints is read: host, pid, thread, level and where the message comes from."""
    level, origin = HEADS[between]
    (message,) = messages(f"gpu-a7:4411:4502{between}{SAID}")
    assert message == Message(level, SAID, Head(Process("", "gpu-a7", 4411), 4502, origin, "none"))


#: What launchers, runtimes and quotations put before a head; the kind, and what tells processes apart.
PREFIXES = {
    "": ("none", ""),
    "  ": ("none", ""),
    "12: ": ('slurm "N: "', "12"),
    "  3: ": ('slurm "N: "', "3"),
    "[1,7]<stdout>:": ("mpirun", "1,7"),
    "[1,7]<stderr>: ": ("mpirun", "1,7"),
    "Mon Jan  5 09:10:11 2026[1,7]<stdout>:": ("mpirun", "1,7"),
    "2026-01-05T09:10:11 [1,7]<stdout>:": ("mpirun", "1,7"),
    "[1,mpirank:7,algo-2]<stdout>:": ("mpirun", "1,mpirank:7,algo-2"),
    "[prterun-gpu-a7-99@1,7]<stdout>: ": ("mpirun", "prterun-gpu-a7-99@1,7"),
    "[1,7][gpu-a7:99]<stdout>: ": ("mpirun", "1,7"),
    "[rank3]:": ("rank", "rank3"),
    "[rank3]: ": ("rank", "rank3"),
    "[default5]:": ("rank", "default5"),
    "0: [rank3]: ": ('slurm "N: "', "0"),
    "(RayTrainWorker pid=742) ": ("ray", "RayTrainWorker pid=742"),
    "(RayTrainWorker pid=742, ip=10.0.0.3) ": ("ray", "RayTrainWorker pid=742, ip=10.0.0.3"),
    "(pid=742) ": ("ray", "pid=742"),
    "(Core_DP0 pid=742) (Worker pid=927) ": ("ray", "Worker pid=927"),
    "\x1b[36m(Worker pid=742)\x1b[0m ": ("ray", "Worker pid=742"),
    "[36m(Worker pid=742)[0m ": ("ray", "Worker pid=742"),
    "[2026-01-05 09:10:11] ": ("none", ""),
    "[2026-01-05 09:10:11.123456] ": ("none", ""),
    "2026-01-05 09:10:11,123 ": ("other", ""),
    "2026/01/05 09:10:11 ": ("other", ""),
    "2026-01-05T09:10:11.123456789Z ": ("other", ""),
    "2026-01-05T09:10:11+01:00 ": ("other", ""),
    "09:10:11 ": ("other", ""),
    "[09:10:11.5] ": ("other", ""),
    "2026-01-05T09:10:11.1Z stdout F ": ("other", ""),
    "2026-01-05T09:10:11Z 2026-01-05T09:10:12Z [2026-01-05 09:10:12] ": ("other", ""),
    "Jan  5 09:10:11 node-1 train[812]: ": ("other", ""),
    "[pod/train-0/main] ": ("other", "[pod/train-0/main]"),
    "train-0/main ": ("other", "train-0/main"),
    "worker_1  | ": ("other", "worker_1"),
    "node-4: ": ("other", "node-4"),
    "10.0.0.4: ": ("other", "10.0.0.4"),
    "[6] ": ("other", "6"),
    "[6]:": ("other", "6"),
    "train-0 pytorch ": ("other", "train-0 pytorch"),
    "train-0 pytorch   3: ": ('slurm "N: "', "3"),
    "+ train-0 pytorch ": ("other", "train-0 pytorch"),
    "\x1b[36mtrain-0\x1b[0m \x1b[96mpytorch\x1b[0m ": ("other", "train-0 pytorch"),
    "ml train-0-x7f9c pytorch-1 2026-01-05T09:10:11.1Z ": ("other", "ml train-0-x7f9c pytorch-1"),
    "[train-0 pytorch] ": ("other", "train-0 pytorch"),
    "[train-worker-0] ": ("other", "train-worker-0"),
    "train.1.x7f9@node-1    | ": ("other", "train.1.x7f9@node-1"),
    "2026-01-02 03:04:05,678 - INFO - ": ("other", ""),
    "2026-01-02 03:04:05,678 - train.run - WARNING - ": ("other", ""),
    "INFO:train.run:": ("other", ""),
    "INFO: ": ("other", ""),
    "INFO     train.run:run.py:12 ": ("other", ""),
    "2026-01-02 03:04:05,678 INFO train.run: ": ("other", ""),
    "2026-01-02 03:04:05,678 train.run INFO: ": ("other", ""),
    "2026-01-02 03:04:05,678 INFO run.py:12 - ": ("other", ""),
    "2026-01-02 03:04:05 [info     ] ": ("other", ""),
    "[2026-01-02 03:04:05] [INFO    ] [MainThread] ": ("other", ""),
    "13:00:00.123 [main] INFO train - ": ("other", ""),
    "Jan  5 09:10:11 node-1 kernel: ": ("other", ""),
    "[1767322245.123456] ": ("other", ""),
    "1767322245.123 ": ("other", ""),
    "[   12.345678] ": ("other", ""),
    "[Worker 3] ": ("other", "Worker 3"),
    "[pod/train-0/main]: ": ("other", "[pod/train-0/main]"),
    "\u2502 ": ("other", ""),
    "\ufeff": ("other", ""),
    "[m": ("other", ""),
    "I0102 03:04:05.678901 12345 logging.cc:12] ": ("other", ""),
    "2026-01-02T03:04:05.123456Z 01O ": ("other", ""),
    "2026-01-02T03:04:05.123456Z 00E+": ("other", ""),
    '2026-01-02T03:04:05Z {app="train", pod="train-0"} ': ("other", '{app="train", pod="train-0"}'),
    "[2026-01-02T03:04:05Z] [rank=1] || ": ("other", "rank=1"),
    "[2026-01-02 03:04:05,678][INFO][train.run] ": ("other", ""),
    "[2026-01-02 03:04:05,678][__main__][INFO] - ": ("other", ""),
    "[2026-01-02 03:04:05,678] [INFO] [launch.py:300:main] ": ("other", ""),
    "[2026-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank 3] ": ("other", "Rank 3"),
    "2026-01-02 03:04:05.678 | INFO     | train.run:<module>:12 - ": ("other", ""),
    "2026-01-02 03:04:05.678 | WARNING  | __main__:main:12 - ": ("other", ""),
    "INFO 01-02 03:04:05 [worker.py:70] ": ("other", ""),
    "INFO 01-02 03:04:05 vllm/worker.py:70] ": ("other", ""),
    "(Worker_TP0 pid=742) INFO 01-02 03:04:05 [worker.py:70] ": ("ray", "Worker_TP0 pid=742"),
    "[2026-01-02 03:04:05 DP0 TP1] ": ("other", "DP0 TP1"),
    "<134>1 2026-01-02T03:04:05.678Z node-1 train 812 - - ": ("other", ""),
    '<134>1 2026-01-02T03:04:05Z node-1 train 812 ID47 [a@1 b="c"] ': ("other", ""),
    "<134>Jan  5 09:10:11 node-1 train[812]: ": ("other", ""),
    "    12\t": ("other", ""),
    "12:": ("other", ""),
    "12:3: ": ('slurm "N: "', "3"),
    "12:[rank3]: ": ("rank", "rank3"),
    "12:2026-01-05T09:10:11Z ": ("other", ""),
    "logs/rank3.log:12:": ("other", "logs/rank3.log"),
    "logs/rank3.log:": ("other", "logs/rank3.log"),
    "- ": ("other", ""),
    "* ": ("other", ""),
    "1. ": ("other", ""),
    "  12) ": ("other", ""),
    "> ": ("other", ""),
    "> > ": ("other", ""),
    "`": ("other", ""),
    "\x1b[0m": ("none", ""),
    "\x1b]0;title\x07\x1b(B": ("none", ""),
    "\r": ("none", ""),
}


@pytest.mark.parametrize("prefix", PREFIXES, ids=ascii)
def test_prefixes(prefix: str) -> None:
    """Behind a launcher's prefix, a timestamp or blanks a head still gives host and pid, and what the prefix contains."""
    kind, tag = PREFIXES[prefix]
    for level in ("INFO", "WARN"):
        (message,) = messages(f"{prefix}{HEAD} NCCL {level} {SAID}")
        assert message == Message(level, SAID, Head(Process(tag, "gpu-a7", 4411), 4502, "", kind))


@pytest.mark.parametrize(
    "before",
    [
        "train:  10%|#   | 1/10 [00:01<00:09, 1.0it/s]",
        "   1048576    262144   float   sum    -1",
        "loss 0.25 ",
        "hello ",
        "gpu-b1:7:8 [0] ",
        "gpu-b1:7:8 [",
        "gpu-b1:7:8 [0] NCCL ",
        "'",
    ],
)
def test_behind_other_text(before: str) -> None:
    """Behind any other text a message counts, but not its host and pid, which may be glued to something."""
    account = account_of(f"{before}{HEAD} NCCL INFO {SAID}")
    said = labels(account)
    assert (said["n_info"], said["connected_trees"], said["prefix"]) == (1, 1, {"other": 1})
    assert "hosts" not in said
    assert "n_processes" not in said
    assert account.torn == 1


@pytest.mark.parametrize(
    "head", ["", "3] ", "502 [3] ", "4411:4502 [3] ", "a7:4411 [3] ", ":4411:4502 [3] ", "gpu-a7:num:num [3] "]
)
def test_torn_heads(head: str) -> None:
    """A message whose head is torn counts for all but hosts, processes and prefixes."""
    said = labels(account_of(f"{head}NCCL INFO {SAID}"))
    assert (said["n_info"], said["connected_trees"]) == (1, 1)
    assert not {"hosts", "n_processes", "prefix"} & set(said)


def test_glued_messages() -> None:
    """Messages glued to each other all count; only the first gives its process, and each text ends where the next begins."""
    line = f"{HEAD} NCCL INFO NCCL_ALGO set to Treegpu-b1:7:8 [0] NCCL INFO {SAID}"
    first, second = messages(line, ("gpu-b1",))
    assert (first.text, first.head.process) == ("NCCL_ALGO set to Tree", Process("", "gpu-a7", 4411))
    assert (second.text, second.head.process, second.head.prefix) == (SAID, None, "")
    said = labels(account_of("gpu-b1:7:8 [0] NCCL INFO x", line))
    assert (said["n_info"], said["n_lines_with_two_or_more_messages"], said["prefix"]) == (3, 1, {"none": 2})
    assert (said["hosts"], said["n_processes"], said["env"]) == (["gpu-a7", "gpu-b1"], 2, {"NCCL_ALGO": "Tree"})


def test_glued_to_a_number() -> None:
    """A host that has printed before is separated from the number that it is glued to, even if only this line names it."""
    for hosts in (("gpu-a7",), ()):
        first, _ = messages(f"{HEAD} NCCL INFO NCCL_NTHREADS set to 64{HEAD} NCCL INFO {SAID}", hosts)
        assert first.text == "NCCL_NTHREADS set to 64"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SAID, "connected_trees"),
        ("Connected all rings", "connected_rings"),
        ("comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1b000 - Init COMPLETE", "comms"),
        ("Channel 00 : 0[1b000] -> 1[43000] via P2P/IPC", "transports"),
        ("Channel 00 : 0[1b000] -> 1[43000] [send] via NET/IB/0", "gdrdma"),
        ("Using network Socket", "network"),
    ],
)
def test_glued_to_a_stranger(text: str, key: str) -> None:
    """A message is complete even if the head of an unknown host is glued to it."""
    alone = labels(account_of(f"{HEAD} NCCL INFO {text}"))
    assert labels(account_of(f"{HEAD} NCCL INFO {text}stranger:7:8 [0] NCCL INFO x"))[key] == alone[key]


def test_cut_level() -> None:
    """A head ends the text before it, also where its own level was cut away; it counts as no message."""
    for rest in ("NCCL", "NCCL "):
        said = labels(account_of(f"{HEAD} NCCL INFO NCCL_NTHREADS set to 64{HEAD} {rest}"))
        assert (said["env"], said["n_info"]) == ({"NCCL_NTHREADS": "64"}, 1)


def test_glued_level() -> None:
    """The words of a level count also with foreign text glued to them; longer words are none."""
    assert [message.level for message in messages(f"{HEAD} NCCL INFOgpu-b1:7:8 [0] NCCL WARN x")] == ["INFO", "WARN"]
    assert [message.level for message in messages("see NCCL WARNINGS and NCCL INFORMATION")] == [""]


def test_versions_glued() -> None:
    """Bare version lines count each, even glued to each other, to a message or to an unknown host."""
    for line, expected in (
        ("NCCL version 2.7.8+cuda10.2NCCL version 2.7.8+cuda10.2", 2),
        (f"NCCL version 2.7.8+cuda10.2{HEAD} NCCL INFO {SAID}", 1),
        (f"{HEAD} NCCL INFO {SAID}NCCL version 2.7.8+cuda10.2", 1),
        (f"{HEAD} NCCL INFO NCCL version 2.7.8+cuda10.2", 1),
        ("3: NCCL version 2.7.8+cuda10.2", 1),
    ):
        said = labels(account_of(line))
        assert (said["version_line_count"], said["nccl_version"], said["cuda_version"]) == (
            expected,
            ["2.7.8"],
            ["10.2"],
        ), line
        assert said.get("n_lines_with_two_or_more_messages") is None


def test_quoted_version() -> None:
    """A version in an exception's text is no version line of the library's."""
    said = labels(
        account_of("torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled error, NCCL version 2.20.5")
    )
    assert said["nccl_version"] == ["2.20.5"]
    assert "version_line_count" not in said


def test_own_time() -> None:
    """NCCL's own timestamp is one directly before a head or a bare version, behind any prefix."""
    stamp = "[2026-01-05 09:10:11] "
    assert has_own_time(f"{stamp}{HEAD} NCCL WARN x")
    assert has_own_time(f"3: {stamp}{HEAD} NCCL WARN x")
    assert has_own_time(f"{stamp}NCCL version 2.28.3+cuda13.0")
    assert has_own_time(f"[2026-01-05 09:10:11.250] {HEAD} NCCL WARN x")
    assert not has_own_time(f"{stamp}[rank3]: {HEAD} NCCL WARN x")
    assert not has_own_time(f"{stamp}a log of somebody else")
    assert not has_own_time(f"{HEAD} NCCL INFO x")


def test_numeric_hosts() -> None:
    """A host whose name begins with digits, or is nothing else, is no rank of slurm's."""
    for host in ("10", "4node", "0-a", "10.0.0.4", "a.b"):
        for between in (" [0] NCCL INFO x", " NCCL CALL x"):
            (message,) = messages(f"{host}:345:678{between}")
            assert message.head.process == Process("", host, 345)


def test_a_time_is_no_head() -> None:
    """A timestamp before a message without a head is not taken for host, pid and thread."""
    for stamp in ("2026-01-05T09:10:11", "09:10:11"):
        (*_, message) = messages(f"{stamp} [0] NCCL INFO x")
        assert (message.level, message.head.process) == ("INFO", None)


def test_processes() -> None:
    """Processes are distinguished by launcher, host and pid; threads of one process are one."""
    lines = [
        f"{rank}: gpu-a7:{pid}:{tid} [0] NCCL INFO x" for rank, pid, tid in ((0, 9, 1), (0, 9, 2), (1, 9, 1), (1, 8, 3))
    ]
    account = account_of(*lines)
    assert len(account.lives) == 3
    assert labels(account)["n_processes"] == 2


def test_other_text() -> None:
    """Text without a message is kept as such, and an empty line says nothing."""
    assert messages("epoch 3") == [Message("", "epoch 3")]
    assert messages("export NCCL_DEBUG=INFO") == [Message("", "export NCCL_DEBUG=INFO")]
    assert messages("our NCCL wrapper") == [Message("", "our NCCL wrapper")]
    said = labels(account_of("", "\r", "epoch 3"))
    assert (said["n_lines"], said["n_info"], said["library"], said["line_endings"]) == (
        3,
        0,
        "none (torch side only)",
        "mixed",
    )


def test_rccl_is_said_by_messages() -> None:
    """RCCL is known by a path in a message, also of a warning's origin, but not by a shell's echo."""
    assert labels(account_of("+ /opt/rccl-tests/build/all_reduce", f"{HEAD} NCCL INFO x"))["library"] == "NCCL"
    assert labels(account_of("gpu-a7:1:2 [0] /build/rccl/src/init.cc:19 NCCL WARN any"))["library"] == "RCCL"
    assert labels(account_of("Librccl path : /opt/rocm/lib/librccl.so.1"))["library"] == "RCCL"


def test_orphan_setting() -> None:
    """A setting whose name has lost its beginning is none."""
    assert "env" not in labels(account_of("CCL_ALGO set by environment to Ring"))
    assert labels(account_of("NCCL_ALGO set by environment to Ring"))["env"] == {"NCCL_ALGO": "Ring"}


HOSTILE = [
    "a", "1", "A_A", ":", "[", "a.a", "a:1:",
    "a:1:1 a)", "a:1:1 a(", "a-a ", "[a ", "a -", "- ", "INFO:", "NCCL INFO ", f"{HEAD} NCCL ", "NCCL version 2", "\x1b[0", "\x1b]0", "(a pid=1) ",
    "2026-01-05 09:10:11 ", "comm 0x1 rank 1 nranks 1 commId 0x1 ", "Channel 0 : 0[0] -> 1[1] via SHM", "A: opCount 1 sendbuff x ",
    "Rank 1] last enqueued", "RAS declaring peer ", "a/a.cc:1 -> ", "connect returned ", "[0]={", "ranks [", "Cuda failure '",
]  # fmt: skip
NEEDLES = " via  COMPLETE - Init START opCount Bytes -> Algo -> retrying Watchdog ast enqueued :GPU/ NET/IB : Using NCCL INFO "


@pytest.mark.timeout(60)  # half a second where this was written; trying each place from each other takes minutes
@pytest.mark.parametrize("seed", HOSTILE, ids=ascii)
def test_hostile_lines(seed: str) -> None:
    """Lines of 64 KiB made to be tried again and again are read in the time that their length needs."""
    line = (seed * 65_536)[: 65_536 - len(NEEDLES)] + NEEDLES
    account_of(line, f"{line} ", f" {line}")
