"""The agent: watches the ranks of this node. Its commands, history, metrics and pages.

The agent uses the package ``commwatch`` that was installed with it. In the environment of a job another one may be first on the path: that of
``commwatch run`` or ``commwatch probe install``, which may be of another version.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _own() -> Path:
    """Return the folder of the package ``commwatch`` that belongs to this agent: beside it, or in its tree."""
    here = Path(__file__).resolve().parent
    beside = here.with_name("commwatch")
    return beside if beside.is_dir() else here.parents[1] / "collectors" / "commwatch"


def _use(folder: Path) -> None:
    """Import ``commwatch`` from a folder, whatever is first on the path.

    Raises:
        ImportError: another version is in use in this process, such as its probe.
    """
    import commwatch

    found = Path(str(commwatch.__file__))
    if found.resolve().parent == folder:
        return
    own = folder / "__init__.py"
    if any(name.startswith("commwatch.") and name != "commwatch.__main__" for name in sys.modules):
        if found.read_bytes() == own.read_bytes():
            return
        raise ImportError(
            f"{found.parent} is in use, and the agent needs its own {folder}: run it without that on PYTHONPATH"
        )
    spec = spec_from_file_location("commwatch", own, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["commwatch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["commwatch"])


_use(_own())
