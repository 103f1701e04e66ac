"""``commwatch config``: show the settings with their origin, or check them."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from commwatch.wire.addresses import BadAddress
from commwatch.wire.errors import UsageError
from commwatch_agent.cli.common_flags import flags_of
from commwatch_agent.config import FOLDERS, SETTINGS, Config
from commwatch_agent.config_checks import GPUS_REQUIRED, ConfigError
from commwatch_agent.config_sources import check_variables, explained, settings_file
from commwatch_agent.text.terminal_text import complain, line
from commwatch_alerts.model import KindSettings

if TYPE_CHECKING:
    from commwatch_alerts.receivers.settings import ReceiverConfig

DEFAULT = "default"
#: Of the parsed command line: the user that the command continues as.
AS_USER = "as_user"


class Setting(NamedTuple):
    """One setting, or one entry of a table."""

    key: str
    value: str | float | None
    #: A flag, an environment variable, a file, or ``default``.
    origin: str


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command and its verbs."""
    config = commands.add_parser(
        "config",
        help="show the settings and their origins, or check them",
        description="Show or check the settings (docs/settings.md) that a command has here, with the same flags.",
    )
    verbs = config.add_subparsers(dest="command_verb", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show",
        parents=[common],
        help="show each setting with its value and origin, without secrets",
        description="Show each setting with its value, and the flag, variable or file that sets it. Secrets are not shown.",
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(command=_show)
    check = verbs.add_parser(
        "check",
        parents=[common],
        help="check the settings file, the environment and the list of alerts",
        description="Check the settings file, the environment and the list of alerts. "
        "If something is wrong, print one line and exit with code 2.",
    )
    check.add_argument(
        "--user",
        dest=AS_USER,
        metavar="NAME",
        help="for root: check as this user, as which a unit runs the agent, and only with "
        "folders that the settings name (default: as the user who runs the command)",
    )
    check.set_defaults(command=_check)


def settings(config: Config, origins: Mapping[str, str]) -> Iterator[Setting]:
    """Yield every setting; of a table every entry, or the table itself if it is empty.

    Args:
        origins: the origin of each key that is not a default, from ``explained``.
    """
    for name in SETTINGS:
        value, origin = getattr(config, name), origins.get(name, DEFAULT)
        entries = _entries(value)
        if entries is None:
            plain = value if value is None or isinstance(value, (int, float)) else _plain(value)
            yield Setting(name, plain, origin)
        elif not entries:
            yield Setting(name, None, origin)
        for entry_name, entry in (entries or {}).items():
            key = f"{name}.{entry_name}"
            yield Setting(key, entry, origins.get(key, origin))


def _entries(value: object) -> Mapping[str, str | float] | None:
    if isinstance(value, tuple) and not any(isinstance(each, str) for each in value):
        return {receiver.name: _without_secrets(receiver) for receiver in value}
    if not isinstance(value, Mapping):
        return None
    return {name: _of_kind(entry) if isinstance(entry, KindSettings) else entry for name, entry in value.items()}


def _of_kind(given: KindSettings) -> str:
    from commwatch_alerts.durations import duration

    parts = [] if given.enabled else ["disabled"]
    parts += [f"at most {given.severity}"] if given.severity is not None else []
    parts += [f"for {duration(given.for_s)}"] if given.for_s is not None else []
    return ", ".join(parts) or "as listed"


def _plain(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _without_secrets(receiver: ReceiverConfig) -> str:
    """Return a receiver as text. Of a URL only the host, of a command only the program: the rest is often secret."""
    where = [f"{urlsplit(url).scheme}://{urlsplit(url).netloc}" for url in receiver.urls]
    where += [receiver.command[0]] if receiver.command else []
    where += [f"{secret.key} {secret.file or secret.variable}" for secret in receiver.secrets]
    return f"{receiver.kind}: {', '.join(where)}"


def _show(config: Config, arguments: argparse.Namespace) -> int:
    found = list(settings(*explained(os.environ, arguments.config, **flags_of(arguments))))
    if arguments.json:
        print(json.dumps({one.key: {"value": one.value, "origin": one.origin} for one in found}, indent=2))
        return 0
    shown = [(one.key, _as_in_file(one.value), one.origin) for one in found]
    wide, long = (max(len(row[column]) for row in shown) for column in (0, 1))
    for key, value, origin in shown:
        print(line(f"{key:{wide}}  {value:{long}}  {origin}"))
    return 0


def _as_in_file(value: str | float | None) -> str:
    """Return a value as text: truth values in the form of TOML, a dash for none."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def become(name: str) -> None:
    """Continue as another user, with that user's groups and home folder, as a service manager starts the agent.

    Raises:
        UsageError: there is no such user, this user may not become another one, or the user cannot read this installation.
    """
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"--user {shlex.quote(name)}: no such user on this machine") from None
    if os.geteuid() != account.pw_uid:
        if os.geteuid() != 0:
            raise UsageError(f"--user {name}: only root can check as another user; use sudo")
        os.initgroups(name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    os.environ["HOME"] = account.pw_dir
    for path in (sys.executable, __file__):
        if not os.access(path, os.R_OK):
            raise UsageError(
                f"--user {name}: this user cannot read {path}, so the agent cannot start; install commwatch into a folder that "
                "every user can read, such as /opt/commwatch-agent"
            )


def _check(config: Config, arguments: argparse.Namespace) -> int:
    if getattr(arguments, AS_USER) is None:
        check(config, os.environ)
    else:  # the service manager makes the folders that the settings do not name
        named = explained(os.environ, arguments.config, **flags_of(arguments))[1]
        check(config, os.environ, [name for name in FOLDERS if name in named])
    _check_receivers(config)
    _check_peers(config)
    _check_what_it_reads(config)
    file = settings_file(os.environ, arguments.config)
    print(
        f"the settings are valid: {line(str(file)) if file is not None else 'no settings file; flags, variables and defaults'}"
    )
    return 0


def _check_receivers(config: Config) -> None:
    """Raise ``ConfigError`` for a receiver whose secret cannot be read, or whose program is missing; warn of variables, which only the agent may have."""
    from commwatch_agent.notify.delivery_setup import unusable

    for trouble in unusable(config.receivers, variables=False):
        raise ConfigError(trouble)
    for receiver in config.receivers:
        for secret in receiver.secrets:
            if secret.variable is not None and not os.environ.get(secret.variable):
                where = f"receiver {receiver.name}: {secret.key} = {secret.variable}"
                complain(f"config check: warning: {where}: not set here: checked when the agent starts")


def _check_peers(config: Config) -> None:
    """Raise ``ConfigError`` for a target file that cannot be read; warn of hosts without an address, which they may get later."""
    from commwatch_agent.runtime.agents import without_address

    try:
        for trouble in without_address(config.peers, config.expects_tls):
            complain(f"config check: warning: peers: {trouble}")
    except BadAddress as error:
        raise ConfigError(f"peers: {error}") from None


def _check_what_it_reads(config: Config) -> None:
    """Warn of GPUs that are required, and of a folder of NCCL Inspector, if they are not there: they may come later."""
    if config.inspector_dir is not None:
        try:
            os.scandir(config.inspector_dir).close()
        except OSError as error:
            complain(f"config check: warning: inspector_dir {config.inspector_dir}: {error.strerror}")
    if config.gpus == GPUS_REQUIRED:
        from commwatch_agent.sources.gpus import opened, vendors
        from commwatch_collectors.node.gpu import DriverTrouble, NoGpus

        try:
            opened(vendors())[0].close()
        except (NoGpus, DriverTrouble) as error:
            complain(f'config check: warning: gpus = "{GPUS_REQUIRED}": {error}')


def check(config: Config, env: Mapping[str, str], folders: Collection[str] = FOLDERS) -> None:
    """Check all that an agent with these settings needs for its start, and the variables of commwatch; raise ``ConfigError``.

    Args:
        folders: the settings whose folders are checked.
    """
    from commwatch_agent.notify.alert_rules import catalogue
    from commwatch_agent.otlp import opening
    from commwatch_agent.runtime.run_lock import check_folders, check_group
    from commwatch_agent.web import listener

    check_variables(env)
    catalogue(config)
    check_group(env)
    check_folders(config, folders)
    listener.check(config)
    opening.check(config)
