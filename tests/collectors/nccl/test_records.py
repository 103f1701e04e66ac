"""JSON records: the message is read as if it had been printed, whatever program put it into JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.input.lines import lines_of, split_lines
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.text import Process
from tests.helpers import examples

SAID = "ant:7:9 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0"

#: Records of programs that write logs as JSON.
RECORDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "docker": lambda text: {"log": text + "\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"},
    "fluent-bit": lambda text: {"log": text, "kubernetes": {"pod_name": "train-0", "labels": {"log": "no"}}},
    "zap": lambda text: {"level": "info", "ts": 1.5, "caller": "a/b.go:7", "msg": text},
    "loguru": lambda text: {"text": f"2026 | INFO - {text}\n", "record": {"message": text, "level": {"no": 20}}},
    "python-json-logger": lambda text: {"asctime": "2026-01-02 03:04:05,678", "levelname": "INFO", "message": text},
    "structlog": lambda text: {"event": text, "level": "info", "timestamp": "2026-01-02T03:04:05Z"},
    "cloud-logging": lambda text: {"insertId": "x", "textPayload": text, "severity": "ERROR"},
    "cloud-logging-structured": lambda text: {"jsonPayload": {"message": text}, "severity": "ERROR"},
    "ecs": lambda text: {"@timestamp": "2026", "log": {"level": "info"}, "message": text},
    "opentelemetry": lambda text: {"body": text, "severity_text": "INFO"},
    "journald": lambda text: {"MESSAGE": text, "_PID": "7", "_HOSTNAME": "bee"},
    "journald-bytes": lambda text: {"MESSAGE": list(f"\x1b[0m{text}".encode()), "_PID": "7"},
    "nested": lambda text: {"log": json.dumps({"msg": text}) + "\n", "stream": "stdout"},
}


def read(*lines: str) -> Account:
    """The account of a file of these lines."""
    account = Account()
    account.add_lines(lines_of(io.BytesIO("\n".join([*lines, ""]).encode())), "log")
    return account


@pytest.mark.parametrize("program", RECORDS)
@pytest.mark.parametrize(
    "around", ["{}", "2026-01-02T03:04:05Z {}", "[train-0 main] {}", "\x1b[36mtrain-0\x1b[0m main {}", "[{},", "{}]"]
)
def test_programs(program: str, around: str) -> None:
    """Host, process and setting are those of the message, without a character of the record; the line counts once."""
    account = read(around.replace("{}", json.dumps(RECORDS[program](SAID))))
    found = labels(account)
    assert (found["hosts"], found["env"], found["n_lines"]) == (["ant"], {"NCCL_IB_HCA": "mlx5_0"}, 1)
    assert not account.torn


def test_indented() -> None:
    """The message is also found in a record of several lines."""
    found = labels(read(*json.dumps([RECORDS["cloud-logging"](SAID)], indent=2).split("\n")))
    assert (found["hosts"], found["env"]) == (["ant"], {"NCCL_IB_HCA": "mlx5_0"})


def test_lines_of_a_message() -> None:
    """The lines of one message have the number of its record, and the next record its own."""
    record = json.dumps({"msg": "one\ntwo\n", "exc_info": "Traceback\nValueError: x"})
    found = list(split_lines(lines_of(io.BytesIO(f"{record}\nthree\n".encode()))))
    marked = list(split_lines(lines_of(io.BytesIO(f"[rank3]: {record}\nthree\n".encode()))))
    assert [(1, f"[rank3]: {text}") for number, text in found if number == 1] == marked[:-1]
    assert found == [(1, "one"), (1, "two"), (1, ""), (1, "Traceback"), (1, "ValueError: x"), (2, "three")]


def test_parts() -> None:
    """A message over several entries of Docker is one; an entry of the other stream between them is another."""

    def entry(text: str, stream: str = "stderr") -> str:
        return json.dumps({"log": text, "stream": stream, "time": "2026"})

    entries = [entry("begin\n"), entry("a" * 16_384), entry("other\n", "stdout"), entry(f"b {SAID}\n"), entry("rest")]
    found = [text for _, text in split_lines(lines_of(io.BytesIO("\n".join(entries).encode())))]
    assert found == ["begin", "other", f"{'a' * 16_384}b {SAID}", "rest"]
    (whole,) = split_lines(lines_of(io.BytesIO(entry("a" * 16_384).encode())))
    assert len(whole[1]) == 16_384


def test_entries_without_newlines() -> None:
    """Entries that some program has stripped of their newlines are messages of their own."""
    entries = [json.dumps({"log": SAID, "stream": "stderr", "time": "2026"})] * 2
    assert labels(read(*entries))["n_info"] == 2


def test_parts_without_end() -> None:
    """Entries that never end a message are handed on before they fill the memory."""
    entries = [json.dumps({"log": "a" * 16_384, "stream": "stderr", "time": "2026"})] * 50
    found = [text for _, text in split_lines(lines_of(io.BytesIO("\n".join(entries).encode())))]
    assert sum(map(len, found)) == 50 * 16_384
    assert max(map(len, found)) < 100_000


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 7, "loss": 0.5}',
        '{"log": ',
        "{" * 5_000 + '":',
        '[{"msg": "x"} and more',
        '["msg": {}]',
        'the "msg": was {"msg": "x"}',
        '"msg": "\\x"',
        '"msg": "x" and more',
    ],
)
def test_other_json(line: str) -> None:
    """What is no record with a message is read as the text that it is."""
    assert list(split_lines(lines_of(io.BytesIO(line.encode())))) == [(1, line)]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 300) | st.text(max_size=20) | st.just(SAID),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["log", "msg", "message", "record", "stream", "text", "exc_info", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.tuples(values, st.integers(0, 400), st.sampled_from(["", "  ", "> ", "[", ","])), max_size=8))
@examples(200)
def test_any_record(records: list[tuple[Any, int, str]]) -> None:
    """Whatever records contain, and wherever they were cut, they are read, each under its number."""
    lines = [before + json.dumps(value)[: size if size < 200 else None] for value, size, before in records]
    found = list(split_lines(lines_of(io.BytesIO("\n".join(lines).encode()))))
    numbers = [number for number, _ in found]
    assert set(numbers) <= set(range(1, len(lines) + 1))
    indented = "\n".join(json.dumps(value, indent=1) for value, _, _ in records)
    assert labels(read(indented))["n_lines"] == indented.count("\n") + 1


HINT = (
    " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see "
    "https://docs.ray.io/en/master/ray-observability/user-guides/configure-logging.html#log-deduplication for more options.)"
)


@pytest.mark.parametrize("remark", ["[repeated 7x across cluster]", "\x1b[32m [repeated 7x across cluster]\x1b[0m"])
@pytest.mark.parametrize("hint", ["", HINT])
def test_repeated_by_ray(remark: str, hint: str) -> None:
    """Ray's remark is no part of a message; a warning counts as often as the remark gives, another line once."""
    head = "(Worker pid=8, ip=10.0.0.2) ant:8:9 [1]"
    account = read(
        f"{head} misc/x.cc:1 NCCL WARN odd {remark}{hint}", f"{head} NCCL INFO Using network IB {remark}{hint}"
    )
    (warned,) = account.warnings.values()
    assert (warned.text, warned.seen.lines, warned.process) == (
        "odd",
        7,
        Process("Worker pid=8, ip=10.0.0.2", "ant", 8),
    )
    assert (labels(account)["network"], labels(account)["n_info"], account.n_lines) == (["IB"], 1, 2)
