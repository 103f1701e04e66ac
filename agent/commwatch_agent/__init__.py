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
    """Have ``import commwatch`` find the package in a folder, whatever is first on the path.

    Raises:
        ImportError: another version is in use in this process, such as its probe.
    """
    loaded = sys.modules.get("commwatch")
    if loaded is not None:
        found = Path(next(iter(loaded.__path__))).resolve()
        if found == folder:
            return
        if any(name.startswith("commwatch.") and name != "commwatch.__main__" for name in sys.modules):
            if _is_copy(found, folder):
                return
            raise ImportError(
                f"{found} is in use, and the agent needs its own {folder}: run it without that on PYTHONPATH"
            )
    spec = spec_from_file_location("commwatch", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["commwatch"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["commwatch"])


def _is_copy(folder: Path, of: Path) -> bool:
    files = {path.relative_to(of) for path in of.rglob("*.py")}
    return files == {path.relative_to(folder) for path in folder.rglob("*.py")} and all(
        (folder / path).read_bytes() == (of / path).read_bytes() for path in files
    )


_use(_own())
