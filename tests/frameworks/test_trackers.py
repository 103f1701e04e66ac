"""commwatch's figures in experiment trackers: logged by a job through its framework's loggers, and read back (``make frameworks``)."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frameworks.workloads import PATIENCE_S, by_accelerate, by_torchrun, python
from tests.helpers import clean_env, free_port

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(2 * PATIENCE_S)]
#: As in jobs/with_trackers.py.
EVERY = 10
#: By step: name and value of each figure.
Logged = dict[int, dict[str, float]]


def logged(where: Path, command: Callable[[], list[str]]) -> None:
    """Run the job in an empty folder."""
    env = clean_env(
        COMMWATCH_DIR=str(where / "run"), COMMWATCH_STATE=str(where / "state"), MASTER_PORT=str(free_port()),
        HF_HUB_OFFLINE="1", WANDB_MODE="offline", PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1",
        MLFLOW_ALLOW_FILE_STORE="true",
    )  # fmt: skip
    done = subprocess.run(
        command(), env=env, cwd=where, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "commwatch" not in done.stderr


def check(found: Logged) -> None:
    """The figures are logged every so many steps, and are those of a job in which one rank keeps the other waiting."""
    found = {step: figures for step, figures in found.items() if any(name.startswith("comm/") for name in figures)}
    assert len(found) >= 5
    assert all(step % EVERY == 0 for step in found)
    latest = found[max(found)]
    assert latest["comm/straggler_rank"] == 1
    assert latest["comm/problems"] == 1
    assert latest["comm/incidents/straggler"] == 1
    # Half of the mean of both ranks: rank 0 waits nearly all of its step, rank 1 does not.
    assert 0.2 < latest["comm/share"] < 0.8
    assert latest["comm/exposed_share"] <= latest["comm/share"]
    assert 0.03 <= latest["comm/step_time"] < 1
    assert latest["comm/busbw/all_reduce"] > 0


def in_tensorboard(where: Path, prefix: str = "") -> Logged:
    """Read event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Logged = {}
    for path in where.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.setdefault(event.step, {})[name.removeprefix(prefix)] = event.value
    return found


def leveldb_log(data: bytes, at: int = 7, block: int = 32_768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, whose header ends at ``at``: blocks of fragments of records."""
    record = b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for the head of a fragment
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield record
            record = b""


def in_wandb(where: Path) -> Logged:
    """Read the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = where.rglob("*.wandb")
    found: Logged = {}
    for data in leveldb_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "trainer/global_step" in items:
            found[items["trainer/global_step"]] = items
    return found


def in_mlflow(where: Path) -> Logged:
    """Read a local file store."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{where}")
    found: Logged = {}
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    (run,) = client.search_runs([experiment.experiment_id])
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            found.setdefault(point.step, {})[name] = point.value
    return found


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's TensorBoard, W&B and MLflow loggers get the same figures."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logged(tmp_path, python("with_trackers.py", "lightning"))
    board, wandb, mlflow = in_tensorboard(tmp_path / "tensorboard"), in_wandb(tmp_path), in_mlflow(tmp_path / "mlflow")
    for found in (board, wandb, mlflow):
        check(found)
    step = max(step for step, figures in board.items() if "comm/share" in figures)
    for name, value in board[step].items():
        if name.startswith("comm/"):
            assert wandb[step][name] == pytest.approx(value)
            assert mlflow[step][name] == pytest.approx(value)


def test_transformers(tmp_path: Path) -> None:
    """Hugging Face's trainer reports the figures to TensorBoard."""
    logged(tmp_path, by_torchrun(2, "with_trackers.py", "transformers"))
    check(in_tensorboard(tmp_path, "train/"))


def test_accelerate(tmp_path: Path) -> None:
    """The accelerator's TensorBoard tracker gets the figures."""
    logged(tmp_path, by_accelerate("with_trackers.py", "accelerate"))
    check(in_tensorboard(tmp_path))
