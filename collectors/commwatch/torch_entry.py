"""Entry point that PyTorch calls at the end of ``import torch`` (group ``torch.backends``).

It runs in every process that imports torch where commwatch is installed, so it does nothing unless asked to.
"""

import os


def autoload() -> None:
    """Install the probe if ``COMMWATCH=1``; raise only what a user's signal handler raised."""
    if os.environ.get("COMMWATCH") != "1" or os.environ.get("COMMWATCH_DISABLE") == "1":
        return
    import contextlib

    try:
        from commwatch.wire import descriptor

        write = descriptor.write  # to what descriptor 2 is now, before anything else happens

        from commwatch.probe import torch_collectives
        from commwatch.wire import identity

        with contextlib.suppress(OSError):  # only ``commwatch run`` creates the mark file
            identity.mark_probe(os.environ)
        torch_collectives.install()
    except Exception as error:
        problem = f"commwatch: probe not loaded: {type(error).__name__}: {error}"
        try:
            from commwatch.wire.handlers import raised_by_handler
            from commwatch.wire.standard_error import say
        except ImportError:  # an incomplete installation: it may be what ``error`` is about
            with contextlib.suppress(Exception):  # standard error may be closed or full
                write(f"{problem}\n".encode(errors="backslashreplace"))
            return
        if raised_by_handler(error):
            raise
        say(problem)
