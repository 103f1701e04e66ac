"""commwatch: see the communication of distributed training.

The import of this package loads neither torch nor a web framework. The three functions below act inside a training
process; without torch they raise ``ImportError``.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "install", "step", "uninstall"]


def install() -> bool:
    """Switch the probe on in this process (``COMMWATCH=1`` does so without a change to the script).

    Call it on all ranks, preferably before the first process group is created. Returns True if the probe is on.
    """
    from commwatch.collectors.probe import torch_collectives

    return torch_collectives.install()


def uninstall() -> None:
    """Remove the probe from this process. Its records stay readable."""
    from commwatch.collectors.probe import torch_collectives

    torch_collectives.uninstall()


def step() -> None:
    """Mark the end of a training step. From the first call on, optimizers no longer mark steps themselves.

    Does nothing if the probe is not installed, so the call may stay in the script.
    """
    import sys

    probe = sys.modules.get("commwatch.collectors.probe.torch_collectives")
    if probe is not None:
        probe.step()
