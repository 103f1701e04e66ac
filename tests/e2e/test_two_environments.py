"""The agent in one environment, the job in another: the job's has torch alone, and stays as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch_agent.analysis.queries import QueryService
from tests.bare import bare_python
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, agent, clean_env, commwatch, free_port, wait_for
from tests.test_packaging import TREE

#: A job of single collectives, and one of DDP, whose optimizer alone takes each rank 2 s of a core.
SMALL, DDP = ("ops.py", "30"), ("train.py",)
HOOKS_AND_JOBS = pytest.mark.parametrize(
    ("hook", "job"),
    [
        pytest.param("native", SMALL, id="native-small"),
        pytest.param("native", DDP, id="native-ddp", marks=pytest.mark.long),
        pytest.param("python", DDP, id="python-ddp", marks=pytest.mark.long),
    ],
    indirect=["hook"],
)
#: The program `torchrun` of an environment.
TORCHRUN = "#!{python}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"


def environment(place: Path) -> Path:
    """The folder of programs of a new environment with torch and its `torchrun`, and without commwatch."""
    python = bare_python(place / "training")
    torchrun = python.with_name("torchrun")
    torchrun.write_text(TORCHRUN.format(python=python))
    torchrun.chmod(0o755)
    return python.parent


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Such an environment."""
    return environment(tmp_path)


def ran(cwd: Path, *command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command that has run to its end."""
    words = list(map(str, command))
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)


def two_ranks() -> tuple[str, ...]:
    """The arguments of `torchrun` for a job of two ranks, before its script."""
    return "--nproc-per-node", "2", "--master-port", str(free_port())


def one_rank() -> dict[str, str]:
    """The variables of a job of one process, without a launcher."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def files(environment: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file and link of an environment."""
    found = [(path, path.lstat()) for path in environment.rglob("*")]
    return {str(path.relative_to(environment)): (about.st_size, about.st_mtime_ns) for path, about in found}


@HOOKS_AND_JOBS
def test_job_of_another_environment(training: Path, hook: str, job: tuple[str, ...], tmp_path: Path) -> None:
    """`commwatch run` records a job of an environment without commwatch, with the hook that it can load, and changes nothing there."""
    before = files(training.parent)
    place = ("--dir", tmp_path / "run", "--state", tmp_path / "state", "--port", "0")
    command: tuple[str | Path, ...] = (training / "torchrun", *two_ranks(), JOBS / job[0], *job[1:])
    done = commwatch("run", *place, "--", *command, cwd=tmp_path, env=clean_env(COMMWATCH_JOB="apart"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"2 of 2 ranks on \S+, hook {hook}\n", done.stderr), done.stderr
    assert "records, none lost" in done.stderr
    assert files(training.parent) == before
    (history,) = (tmp_path / "state").glob("history*.sqlite")
    (job_view,) = QueryService(history).jobs()
    assert (job_view.job_id, job_view.lost) == ("apart", 0)


def test_job_with_another_version(training: Path, tmp_path: Path) -> None:
    """Probe and agent have one version, whatever commwatch the job's environment has."""
    (site,) = (training.parent).glob("lib/python*/site-packages")
    (site / "commwatch").mkdir()
    (site / "commwatch" / "__init__.py").write_text("raise SystemExit('the commwatch of the environment')")
    code = "import commwatch, commwatch.wire.ring as ring; print(commwatch.__version__, ring.__file__)"
    place = ("--dir", tmp_path / "run", "--state", tmp_path / "state", "--port", "0")
    done = commwatch("run", *place, "--", training / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(site) not in done.stdout
    assert "the commwatch of the environment" not in done.stderr


@pytest.mark.parametrize("cache", ["/dev/null/cache", pytest.param("/proc/1", marks=pytest.mark.long)])
def test_user_without_a_cache(cache: str, training: Path, tmp_path: Path) -> None:
    """A job is recorded, too, where the user's cache cannot be written; nothing of the probe stays behind."""
    (tmp_path / "tmp").mkdir()
    chosen = {"COMMWATCH_HOOK": "auto", "XDG_CACHE_HOME": cache, "TMPDIR": str(tmp_path / "tmp")}
    env = clean_env(COMMWATCH_JOB="apart", **chosen, **one_rank())
    place = ("--dir", tmp_path / "run", "--state", tmp_path / "state", "--port", "0")
    done = commwatch("run", *place, "--", training / "python", JOBS / SMALL[0], *SMALL[1:], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"1 of 1 ranks on \S+, hook python\n", done.stderr), done.stderr
    assert not list((tmp_path / "tmp").glob("commwatch-probe-*"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    out = tmp_path_factory.mktemp("dist")
    done = ran(out, sys.executable, "-m", "build", "--wheel", "--outdir", out, TREE, env=clean_env())
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Such an environment with the wheel, installed without what the agent needs."""
    training = environment(tmp_path_factory.mktemp("thin"))
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        training / "python",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
        wheel,
    )
    done = ran(training, *pip, env=clean_env())
    assert done.returncode == 0, done.stderr
    (site,) = training.parent.glob("lib/python*/site-packages")
    for needed in ("fastapi", "uvicorn", "prometheus_client", "pydantic", "psutil", "rich", "yaml"):
        (site / needed).unlink(missing_ok=True)
    return training


@HOOKS_AND_JOBS
def test_thin_install(thin: Path, hook: str, job: tuple[str, ...], tmp_path: Path) -> None:
    """The wheel without its dependencies is enough for a trainer: an agent elsewhere reads the records of a job."""
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path / "run"), COMMWATCH_JOB="thin", **one_rank())
    with agent(tmp_path / "run", "--state", str(tmp_path / "state")) as watching:
        done = ran(tmp_path, thin / "python", JOBS / job[0], *job[1:], env=env)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: watching.get("/api/v1/ranks?job=thin"), "the ranks")
        ranks = watching.get("/api/v1/ranks?job=thin")
        assert [rank["hook"] for rank in ranks] == [hook]
        wait_for(
            lambda: sum(row["count"] for row in watching.get("/api/v1/summary?job=thin")["rows"]) > 20,
            "the records",
        )


def test_commands_of_a_thin_install(thin: Path, tmp_path: Path) -> None:
    """Where the agent's packages are missing, its commands print one line with a remedy, and `watch` trains without an agent."""
    for command in ((thin / "commwatch", "agent"), (thin / "python", "-m", "commwatch", "agent")):
        done = ran(tmp_path, *command, env=clean_env())
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "uv tool install" in done.stderr
    code = """if True:
        import commwatch, torch, torch.distributed as dist
        with commwatch.watch():
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(4))
        print("trained")
    """
    env = clean_env(COMMWATCH_DIR=str(tmp_path / "run"), COMMWATCH_STATE=str(tmp_path / "state"), **one_rank())
    done = ran(tmp_path, thin / "python", "-c", code, env=env)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "uv tool install" in done.stderr
    beside = {
        **env,
        "PATH": f"{thin}:{Path(sys.executable).parent}:/usr/bin:/bin",
    }  # a whole commwatch is on the path, too
    done = ran(tmp_path, thin / "python", "-c", code, env={**beside, "MASTER_PORT": str(free_port())})
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "uv tool install" not in done.stderr
    assert list((tmp_path / "state").glob("history*.sqlite"))


@pytest.mark.long
def test_watch_without_an_agent_beside_it(training: Path, tmp_path: Path) -> None:
    """`watch` where only the probe is installed uses the `commwatch` on the path, and names the remedy if there is none."""
    commwatch("probe", "install", tmp_path / "probe")
    code = "import commwatch\nwith commwatch.watch(): print('inside')"
    ours = {"COMMWATCH_DIR": str(tmp_path / "run"), "COMMWATCH_STATE": str(tmp_path / "state")}
    env = clean_env(PYTHONPATH=str(tmp_path / "probe"), PATH=str(training), **ours)
    done = ran(tmp_path, training / "python", "-c", code, env=env)
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
    assert "no agent" in done.stderr
    assert "uv tool install" in done.stderr
    there = {**env, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = ran(tmp_path, training / "python", "-c", code, env=there)
    assert (done.returncode, done.stdout, done.stderr) == (0, "inside\n", "")
    assert list((tmp_path / "state").glob("history*.sqlite"))
