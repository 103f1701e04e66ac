"""Where settings come from: defaults, ``commwatch.toml``, environment and flags; later ones override earlier ones. Errors name the key."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from commwatch.wire import crossing, variables
from commwatch.wire.identity import run_dir
from commwatch_agent.config import NOT_LABELS, REMOVED, SETTINGS, Config
from commwatch_agent.config_checks import ConfigError
from commwatch_agent.text.nearest import nearest
from commwatch_alerts.receivers.settings import KEYS
from commwatch_alerts.values import BadValue, TableOf, Type

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Names the settings file.
FILE_VARIABLE = "COMMWATCH_CONFIG"
#: Bytes of a settings file.
_MOST_BYTES = 1 << 20
#: Variables of the probe in the trainer; listed only to distinguish them from misspelt names.
_OF_THE_PROBE = (
    "COMMWATCH_BUDGET", "COMMWATCH_CHECKSUMS", "COMMWATCH_CHECKSUM_BUDGET", "COMMWATCH_CHECKSUM_EVERY", "COMMWATCH_DISABLE", "COMMWATCH_GROUP",
    "COMMWATCH_HOOK", "COMMWATCH_JOB", "COMMWATCH_JOB_OUTPUT", "COMMWATCH_NCCL_PLUGIN", "COMMWATCH_RUN", "COMMWATCH_SLOTS", "COMMWATCH_TIMING",
)  # fmt: skip
_TLS, _OTLP = "TLS needs tls_cert and tls_key", "nothing would be pushed"
#: Settings that need another one, with the reason.
_NEEDS = (
    ("tls_cert", "tls_key", _TLS), ("tls_key", "tls_cert", _TLS), ("tls_client_ca", "tls_cert", _TLS),
    *((key, "otlp_endpoint", _OTLP) for key in ("otlp_headers_file", "otlp_ca_file", "otlp_client_cert")),
)  # fmt: skip
#: By table: keys that it or its entries may have; some have the name of a setting.
_ALSO_KEYS = {"receivers": {key for keys in KEYS.values() for key in keys}, "labels": SETTINGS.keys() - NOT_LABELS}
#: Variables that Kubernetes sets in every container if there is a Service called commwatch.
_OF_KUBERNETES = re.compile(r"COMMWATCH_(SERVICE|PORT_\d+)_")


def load(env: Mapping[str, str], file: Path | None = None, **flags: Any) -> Config:
    """Return the settings; arguments and errors as for ``explained``."""
    return explained(env, file, **flags)[0]


def explained(env: Mapping[str, str], file: Path | None = None, **flags: Any) -> tuple[Config, dict[str, str]]:
    """Return the settings, and the source of each.

    Args:
        file: ``commwatch.toml``; ``None``: as for ``settings_file``.
        flags: from the command line; ``None``: not given.

    Returns:
        The settings; and the flag, variable or file of each that is not the default. An entry from another source than its
        table is ``TABLE.ENTRY``.

    Raises:
        ConfigError: unknown key, wrong type or range, unreadable file.
    """
    found = settings_file(env, file)
    try:
        given = {} if found is None else _read(found)
    except ConfigError as error:
        raise ConfigError(
            f"{FILE_VARIABLE}: {error}" if file is None and env.get(FILE_VARIABLE) else str(error)
        ) from None
    origins = dict.fromkeys(given, str(found))
    _take_variables(env, given, origins)
    for key, value in flags.items():
        if value is not None:
            flag = f"--{key.replace('_', '-')}"
            given[key], origins[key] = checked(key, value, flag), flag
    for key, other, why in _NEEDS:
        if key in given and other not in given:
            raise ConfigError(f"{origins[key]}: {key} is set and {other} is not; {why}")
    if "dir" in given and "state" not in given:  # a chosen run directory holds the state, too
        given["state"], origins["state"] = given["dir"], origins["dir"]
    _check_alerts(given, origins)
    given.setdefault("dir", run_dir(env).absolute())
    # The default is on disk: the default run directory may be in memory.
    if "state" not in given:
        given["state"] = (_state_home(env) / "commwatch").absolute()
    return Config(**given), origins


def _check_alerts(given: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Check thresholds and kinds by the list of alerts; the message names what sets the wrong one."""
    if not given.keys() & {"thresholds", "kinds"}:
        return
    from commwatch_alerts.catalogue import RULES, CatalogueError, read, shipped

    try:
        read(shipped(RULES), given.get("thresholds"), given.get("kinds"))
    except CatalogueError as error:
        table = error.setting.partition(".")[0]
        raise ConfigError(f"{origins.get(error.setting) or origins[table]}: {error}") from None


def _take_variables(env: Mapping[str, str], given: dict[str, Any], origins: dict[str, str]) -> None:
    """Add the settings that environment variables have; an empty variable sets nothing."""
    for key, instead in REMOVED.items():
        if env.get(variable := f"COMMWATCH_{key.upper()}"):
            raise ConfigError(f"{variable}: {instead}")
    for key, setting in SETTINGS.items():
        if text := env.get(setting.variable):
            given[key] = checked(key, _parsed(setting.kind, text, setting.variable), setting.variable)
            origins[key] = setting.variable
        if setting.prefix is None:
            continue
        assert isinstance(setting.kind, TableOf)
        for name in sorted(each for each in env if each.startswith(setting.prefix) and env[each]):
            entry = name.removeprefix(setting.prefix).lower()
            value = _parsed(setting.kind.entry, env[name], name)
            given[key] = {**given.get(key, {}), **checked(key, {entry: value}, name)}
            origins[f"{key}.{entry}"] = name


def _parsed(kind: Type, text: str, variable: str) -> Any:
    try:
        return kind.parsed(text)
    except BadValue as error:
        raise ConfigError(f"{variable}: {error}") from None


def checked(key: str, value: Any, where: str) -> Any:
    """Return the value of a setting as ``Config`` has it.

    Args:
        where: where the value was given, for the message.

    Raises:
        ConfigError: wrong type or range.
    """
    try:
        return SETTINGS[key].kind.checked(value, where)
    except BadValue as error:
        raise ConfigError(str(error)) from None


def check_variables(env: Mapping[str, str]) -> None:
    """Check for invalid variables of the probe, and for unknown ones that begin with ``COMMWATCH_``.

    Raises:
        ConfigError: there are some; the message names valid values, or the nearest known name.
    """
    for bad in ["; ".join(variables.wrong(env)), *unknown_variables(env)]:
        if bad:
            raise ConfigError(bad)


def unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable that begins with ``COMMWATCH_`` and has no meaning; it names the nearest known one."""
    known = {*(each.variable for each in SETTINGS.values()), FILE_VARIABLE, *_OF_THE_PROBE}
    prefixes = tuple(each.prefix for each in SETTINGS.values() if each.prefix is not None)
    for name in sorted(env):
        ours = name.startswith("COMMWATCH_") and not name.startswith(prefixes)
        if ours and name not in known and not _OF_KUBERNETES.match(name):
            yield f"{name}: no such variable; {_nearest(name, sorted(known))}"


def _nearest(name: str, known: Collection[str]) -> str:
    near = nearest(name, known, "COMMWATCH_") or nearest(name.lower(), known)
    return f"did you mean {near}?" if near else f"known are {', '.join(known)}"


def settings_file(env: Mapping[str, str], file: Path | None) -> Path | None:
    """Return the file of the settings: ``file``, else that of ``COMMWATCH_CONFIG``, else ``./commwatch.toml`` if it exists."""
    if file is not None or env.get(FILE_VARIABLE):
        return file or Path(env[FILE_VARIABLE])
    default = Path("commwatch.toml")
    return default if default.is_file() else None


def keys_in(file: Path) -> list[str]:
    """Return the keys of the settings that a settings file has; raise ``ConfigError`` as ``explained`` does."""
    return list(_read(file))


def _state_home(env: Mapping[str, str]) -> Path:
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"])
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError("this user has no home directory for the history; choose a directory with --state") from None


def _misplaced(value: Any, table: str) -> Iterator[str]:
    """Yield the settings in a table of a file, which end up there if they are written below its head; some names are also keys of the table."""
    own = _ALSO_KEYS.get(table, ())
    for entry in value if isinstance(value, list) else [value]:
        for key, inner in entry.items() if isinstance(entry, dict) else ():
            if key in SETTINGS and key not in own:
                yield key
            yield from _misplaced(inner, table)


def _read(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(crossing.read(file, _MOST_BYTES, crossing.operator()).decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for key in table:
        if key in REMOVED:
            raise ConfigError(f"{file}: {key}: {REMOVED[key]}")
        if key not in SETTINGS:
            raise ConfigError(f"{file}: unknown key '{key}'; {_nearest(key, SETTINGS)}")
        for setting in _misplaced(table[key], key):
            raise ConfigError(f"{file}: {setting}: is below [{key}]; write it above the first table")
    return {key: checked(key, value, f"{file}: {key}") for key, value in table.items()}
