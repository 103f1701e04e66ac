"""Entry point that PyTorch calls at the end of ``import torch`` (group ``torch.backends``).

It runs in every process that imports torch where commwatch is installed, so it does nothing unless asked to.
"""

import os


def autoload() -> None:
    """Install the probe if ``COMMWATCH`` is ``1`` or another word for yes; raise only what a user's signal handler raised."""
    asked = os.environ.get("COMMWATCH", "0")
    if asked in ("", "0") or os.environ.get("COMMWATCH_DISABLE") == "1":
        return
    import contextlib

    try:
        from commwatch.wire import descriptor

        write = descriptor.write  # to what descriptor 2 is now, before anything else happens

        from commwatch.wire import standard_error, variables

        if not variables.asks_for_probe(asked):
            wrong = variables.wrong({"COMMWATCH": asked})
            if wrong and os.environ.get("RANK", "0") == "0":
                standard_error.say(f"commwatch: {wrong[0]}; nothing is recorded")
            return

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
