"""Settings that are read again while the agent runs: which take effect now, and which after a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from commwatch_agent.config import SETTINGS, Config

_TLS = ("tls_cert", "tls_key", "tls_client_ca")


@dataclass(frozen=True)
class Change:
    """The difference between the settings of a running agent and those that were read again."""

    #: The settings that are in effect from now on.
    config: Config
    #: Keys that differ: those that take effect now, and those that need a restart.
    taken: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def says(self) -> str:
        """The change in one line."""
        parts = [f"applied {', '.join(self.taken)}"] if self.taken else []
        parts += [f"a restart is needed for {', '.join(self.left)}"] if self.left else []
        return "; ".join(parts) or "nothing has changed"


def change(now: Config, wanted: Config, *, certificate_differs: bool = False) -> Change:
    """Return which settings take effect now, and which need a restart.

    Args:
        now: the settings in effect.
        wanted: the settings that were read.
        certificate_differs: the certificate has changed, possibly under an unchanged path.
    """
    differ = [key for key in SETTINGS if getattr(now, key) != getattr(wanted, key)]
    switched = (now.tls_cert is None) != (wanted.tls_cert is None)  # from http to https, or back
    taken = [key for key in differ if SETTINGS[key].reload and not (switched and key in _TLS)]
    left = [key for key in differ if key not in taken]
    config = replace(now, **{key: getattr(wanted, key) for key in taken})
    if certificate_differs and not set(_TLS) & {*taken, *left}:
        taken.append(_TLS[0])
    return Change(config, tuple(taken), tuple(left))
