"""What the tests on the played driver share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cuda_rig.build import NotAvailable, build
from tests.cuda_rig.played_jobs import Run, runner
from tests.helpers import needs


@pytest.fixture(scope="session")
def libraries() -> Path | None:
    """The folder of the played driver; ``None`` with ``REAL_GPU=1``: tests run on the machine's GPU."""
    import torch

    needs(torch.version.cuda, "the CUDA build of torch (make test-cuda)")
    if os.environ.get("REAL_GPU") == "1":
        needs(torch.cuda.is_available(), "a GPU")
        return None
    try:
        return build()
    except NotAvailable as reason:
        pytest.skip(f"the played driver cannot be built: {reason}")


@pytest.fixture(scope="module")
def run(libraries: Path | None, native: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a scene under commwatch, each with the same settings once."""
    return runner(libraries, tmp_path_factory.mktemp)
