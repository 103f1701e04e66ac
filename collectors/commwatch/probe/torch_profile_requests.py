"""Looks for requests for profiles at step marks, and keeps the errors of profiling from the training and from the records."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from commwatch.wire import profile_files
from commwatch.wire.handlers import raised_by_handler

if TYPE_CHECKING:
    from commwatch.probe.torch_profile import Profiling


class ProfiledProbe(Protocol):
    """What profiles need of a probe (``torch_probe.Probe``)."""

    env: Mapping[str, str]

    @property
    def place(self) -> tuple[str, int]:
        """The job and the rank of this process."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""

    def say(self, text: str, about: str) -> None:
        """Print one line to standard error, once per topic ``about``."""


class Profiles:
    """The profiles of one probe. The module for them is loaded at the first request."""

    def __init__(self, probe: ProfiledProbe) -> None:
        self._probe = probe
        #: Path of a request for a profile.
        self._request = ""
        self._profiling: Profiling | None = None
        self._may_profile = True

    def look_for(self, job: str) -> None:
        """Look for requests for this job from now on."""
        self._request = str(profile_files.request_path(self._probe.run_dir, job))

    def mark(self, optimizer: int, number: int, ended: int) -> None:
        """At a step mark, look for a request, or continue a profile."""
        self._guard(self._profile, optimizer, number, ended)

    def end(self) -> None:
        """End a profile, if there is one."""
        if self._profiling is not None:
            self._guard(self._profiling.end)

    def forget(self) -> None:
        """In a forked child: the profile is the parent's."""
        if self._profiling is not None:
            self._profiling.forget()

    def _profile(self, optimizer: int, number: int, ended: int) -> None:
        if self._profiling is None:
            try:
                os.stat(self._request)  # noqa: PTH116 - half the time of Path's, once a step
            except OSError as error:
                if raised_by_handler(error):
                    raise
                return
            from commwatch.probe.torch_profile import Profiling

            job, rank = self._probe.place
            say = partial(self._probe.say, about="profiles")
            self._profiling = Profiling(Path(self._request), job, rank, self._probe.env, say)
        self._profiling.mark(optimizer, number, ended)

    def _guard(self, do: Callable[..., None], *args: int) -> None:
        """Call ``do``; its errors end profiling, but reach neither the training nor the records."""
        try:
            if self._may_profile:
                do(*args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._may_profile = False
            self._probe.say(f"no profiles of rank {self._probe.place[1]}: {type(error).__name__}: {error}", "profiles")
