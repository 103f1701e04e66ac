"""What the tests on the played driver share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_rig.build import NotAvailable, build
from tests.helpers import needs


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the played driver."""
    import torch

    needs(torch.version.cuda, "the CUDA build of torch (make test-cuda)")
    try:
        return build()
    except NotAvailable as reason:
        pytest.skip(f"the played driver cannot be built: {reason}")
