"""Settings from defaults, ``commwatch.toml``, environment and flags; later ones override earlier ones. Errors name the key."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from commwatch.wire import crossing, variables
from commwatch.wire.identity import run_dir
from commwatch_agent.config_checks import FILES, GPUS_AUTO, JOB_INFO, LOG_INFO, LOG_TEXT, ConfigError, checked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
if TYPE_CHECKING:
    from commwatch_alerts.model import KindSettings
    from commwatch_alerts.receivers.settings import ReceiverConfig


#: Bytes of a settings file.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """All settings of the agent. Each can be set in ``commwatch.toml`` under its own name."""

    #: Run directory, shared by trainers and agent.
    dir: Path
    #: Directory of the history.
    state: Path
    #: Name of the node in the names of the agent's files; not set: the host name.
    node: str | None = None
    #: Address the agent listens on.
    host: str = "127.0.0.1"
    #: Port; 0: any free one; not set: 9477, or any free one where that is taken.
    port: int | None = None
    #: ``text`` or ``json``; and the least level of what the agent logs.
    log_format: str = LOG_TEXT
    log_level: str = LOG_INFO
    #: Seconds between two looks at the trainers; every second look drains the rings.
    interval: float = 0.25
    #: File with the token for requests that make the agent act; not set: the agent makes its own.
    token_file: Path | None = None
    #: Reading requires the token, too, except for ``/metrics`` and health.
    require_token: bool = False
    #: Reading ``/metrics`` requires the token.
    require_token_for_metrics: bool = False
    #: Names by which the agent may be called, in addition to those of its machine; ``.example.org``: all that end so.
    allowed_hosts: tuple[str, ...] = ()
    #: Allows the agent to listen beyond loopback without TLS.
    insecure: bool = False
    #: Certificate (with intermediate ones) and key of the agent, PEM; if set, it listens with TLS.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    #: CA of client certificates; if set, a client needs one.
    tls_client_ca: Path | None = None
    #: For requests to agents: CA of their certificates; not set: the CAs that the system trusts.
    ca_file: Path | None = None
    #: For requests to agents: a client certificate with its key, for agents that require one.
    client_cert: Path | None = None
    #: The agents of other nodes: addresses, target files in Prometheus' ``file_sd`` format, ``dns+NAME:PORT``.
    peers: tuple[str, ...] = ()
    #: Agents that listen beyond loopback find each other through the jobs of their nodes.
    discover_peers: bool = True
    #: Raw records kept, in bytes on disk.
    raw_bytes: int = 256 * 1024 * 1024
    #: Roll-ups, steps and all else of the history, in bytes on disk.
    summary_bytes: int = 1024 * 1024 * 1024
    #: One step in so many is profiled, to measure the exposed share of ranks for which it is not known otherwise; 0: none.
    profile_every: int = 0
    #: Days that rollups and steps are kept.
    keep_days: float = 7.0
    #: Seconds the metrics of an ended job stay in /metrics.
    keep_ended: float = 300.0
    #: ``auto``: read GPUs if there are any; ``required``: none to read is a fault; ``off``: the driver is not used.
    gpus: str = GPUS_AUTO
    #: Label of a group, or ``*`` for all others, to the key of its link in the catalogue.
    links: Mapping[str, str] = field(default_factory=dict)
    #: A folder with NCCL Inspector's files, in addition to those that probes report.
    inspector_dir: Path | None = None
    #: Addresses of NCCL's RAS to poll, comma-separated; not set: none.
    ras: str | None = None
    #: Receivers of alerts; their secrets are stored elsewhere.
    receivers: tuple[ReceiverConfig, ...] = field(default_factory=tuple)
    #: Thresholds of alerts that differ from the default, by the names in the list of alerts.
    thresholds: Mapping[str, float] = field(default_factory=dict)
    #: Settings of kinds of incidents that differ from the default, by the names in the list of alerts.
    kinds: Mapping[str, KindSettings] = field(default_factory=dict)
    #: Labels of every ``commwatch_job_info`` of this agent, by name: cluster, user, team.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Which of user, script and node every ``commwatch_job_info`` names.
    job_info: tuple[str, ...] = JOB_INFO
    #: Base URL to which metrics and incidents are pushed over OTLP/HTTP; not set: nothing is pushed.
    otlp_endpoint: str | None = None
    #: File with headers of these requests, ``Name: value`` in each line.
    otlp_headers_file: Path | None = None
    #: CA of the endpoint's certificate (not set: the CAs that the system trusts), and a client certificate with its key.
    otlp_ca_file: Path | None = None
    otlp_client_cert: Path | None = None
    #: Seconds between two pushes.
    otlp_interval: float = 15.0
    #: Alerts and verdicts are pushed, too, as log records.
    otlp_logs: bool = True

    @property
    def rings(self) -> Path:
        """Directory of the ring files."""
        return self.dir / "rings"

    @property
    def expects_tls(self) -> bool:
        """True if agents named without a scheme are called over TLS, because a CA or a client certificate is set."""
        return self.ca_file is not None or self.client_cert is not None

    @property
    def node_name(self) -> str:
        """The node in the names of files, of which there is one per node, because hosts may share the state directory."""
        return self.node or gethostname()

    @property
    def evidence(self) -> Path:
        """Directory for evidence of alerts."""
        return self.state / f"evidence-{self.node_name}"

    @property
    def history(self) -> Path:
        """The history file."""
        return self.state / f"history-{self.node_name}.sqlite"

    @property
    def sent_alerts(self) -> Path:
        """File of the alerts that were sent to receivers."""
        return self.state / f"told-{self.node_name}.json"


#: Tables whose entries can be set in the environment: prefix before the entry's name in capitals.
_TABLE_VARIABLES = {"thresholds": "COMMWATCH_THRESHOLD_", "labels": "COMMWATCH_LABEL_"}
#: Settings that no longer exist, and what to do instead.
REMOVED = {
    "rules": "commwatch no longer reads lists of alerts; put rules of your own into Prometheus (rule_files), "
    "and change ours with [thresholds] and [kinds.NAME]"
}
#: Variables of the probe in the trainer; listed only to distinguish them from misspelt names.
_OF_THE_PROBE = (
    "COMMWATCH_BUDGET", "COMMWATCH_CHECKSUMS", "COMMWATCH_CHECKSUM_BUDGET", "COMMWATCH_CHECKSUM_EVERY", "COMMWATCH_DISABLE", "COMMWATCH_GROUP",
    "COMMWATCH_HOOK", "COMMWATCH_JOB", "COMMWATCH_JOB_OUTPUT", "COMMWATCH_NCCL_PLUGIN", "COMMWATCH_SLOTS", "COMMWATCH_TIMING",
)  # fmt: skip
#: Variables that Kubernetes sets in every container if there is a Service called commwatch.
_OF_KUBERNETES = re.compile(r"COMMWATCH_(SERVICE|PORT_\d+)_")
_ENVIRONMENT = {
    "dir": "COMMWATCH_DIR",
    "state": "COMMWATCH_STATE",
    "node": "COMMWATCH_NODE",
    "host": "COMMWATCH_HOST",
    "port": "COMMWATCH_PORT",
    "log_format": "COMMWATCH_LOG_FORMAT",
    "log_level": "COMMWATCH_LOG_LEVEL",
    "job_info": "COMMWATCH_JOB_INFO",
    "token_file": "COMMWATCH_TOKEN_FILE",
    "ca_file": "COMMWATCH_CA_FILE",
    "client_cert": "COMMWATCH_CLIENT_CERT",
    "peers": "COMMWATCH_PEERS",
    "profile_every": "COMMWATCH_PROFILE_EVERY",
    "otlp_endpoint": "COMMWATCH_OTLP_ENDPOINT",
    "otlp_headers_file": "COMMWATCH_OTLP_HEADERS_FILE",
    "otlp_ca_file": "COMMWATCH_OTLP_CA_FILE",
    "otlp_client_cert": "COMMWATCH_OTLP_CLIENT_CERT",
}
#: Settings that take effect when a running agent reads them again. TLS files may change; TLS on or off needs a restart.
RELOADED = frozenset({
    "allowed_hosts", "ca_file", "client_cert", "interval", "job_info", "keep_days", "kinds", "labels", "links", "log_format", "log_level",
    "peers", "raw_bytes", "receivers", "require_token", "require_token_for_metrics", "summary_bytes", "thresholds", "tls_cert",
    "tls_client_ca", "tls_key", "token_file",
})  # fmt: skip


def load(env: Mapping[str, str], file: Path | None = None, **flags: Any) -> Config:
    """Return the settings; arguments and errors as for ``explained``."""
    return explained(env, file, **flags)[0]


def explained(env: Mapping[str, str], file: Path | None = None, **flags: Any) -> tuple[Config, dict[str, str]]:
    """Return the settings, and the source of each.

    Args:
        file: ``commwatch.toml``; ``None``: ``./commwatch.toml`` if it exists.
        flags: from the command line; ``None``: not given.

    Returns:
        The settings; and the flag, variable or file of each that is not the default. An entry from another source than its
        table is ``TABLE.ENTRY``.

    Raises:
        ConfigError: unknown key, wrong type or range, unreadable file.
    """
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    found = settings_file(file)
    if found is not None:
        given.update(_read(found))
        origins.update(dict.fromkeys(given, str(found)))
    for key, instead in REMOVED.items():
        if env.get(variable := f"COMMWATCH_{key.upper()}"):
            raise ConfigError(f"{variable}: {instead}")
    for key, variable in _ENVIRONMENT.items():
        if env.get(variable):
            given[key] = checked(key, _from_text(key, env[variable], variable), variable)
            origins[key] = variable
    for table, prefix in _TABLE_VARIABLES.items():
        entries = {
            name.removeprefix(prefix).lower(): name for name, text in env.items() if name.startswith(prefix) and text
        }
        for entry, variable in entries.items():
            value = _from_text(table, env[variable], variable)
            given[table] = {**given.get(table, {}), **checked(table, {entry: value}, variable)}
            origins[f"{table}.{entry}"] = variable
    for key, value in flags.items():
        if value is not None:
            flag = f"--{key.replace('_', '-')}"
            given[key], origins[key] = checked(key, value, flag), flag
    directory = Path(given.get("dir", run_dir(env))).absolute()
    if "dir" in given and "state" not in given:  # a chosen run directory holds the state, too
        origins["state"] = origins["dir"]
    # The default is on disk: the default run directory may be in memory.
    state = given.get("state") or (directory if "dir" in given else _state_home(env) / "commwatch")
    rest = {key: value for key, value in given.items() if key not in ("dir", "state")}
    rest |= {key: rest[key].absolute() for key in ("inspector_dir", *FILES) if key in rest}
    return replace(Config(dir=directory, state=state.absolute()), **rest), origins


def check_variables(env: Mapping[str, str]) -> None:
    """Check for invalid variables of the probe, and for unknown ones that begin with ``COMMWATCH_``.

    Raises:
        ConfigError: there are some; the message names valid values, or the nearest known name.
    """
    if bad := variables.wrong(env):
        raise ConfigError("; ".join(bad))
    known = {*_ENVIRONMENT.values(), *_OF_THE_PROBE}
    for name in sorted(env):
        ours = name.startswith("COMMWATCH_") and not name.startswith(tuple(_TABLE_VARIABLES.values()))
        if ours and name not in known and not _OF_KUBERNETES.match(name):
            raise ConfigError(f"{name}: no such variable; {_nearest(name, sorted(known))}")


def _nearest(name: str, known: Collection[str]) -> str:
    meant = "".join(f"did you mean {near}? " for near in get_close_matches(name, known, 1))
    return f"{meant}known are {', '.join(known)}"


def settings_file(file: Path | None) -> Path | None:
    """Return the file of the settings: ``file``, else ``./commwatch.toml`` if it exists; ``None``: there is none."""
    default = Path("commwatch.toml")
    return file or (default if default.is_file() else None)


def _state_home(env: Mapping[str, str]) -> Path:
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"])
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError("this user has no home directory for the history; choose a directory with --state") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(crossing.read(file, _MOST_BYTES, crossing.operator()).decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    known = [one.name for one in fields(Config)]
    for key in table:
        if key in REMOVED:
            raise ConfigError(f"{file}: {key}: {REMOVED[key]}")
        if key not in known:
            raise ConfigError(f"{file}: unknown key '{key}'; {_nearest(key, known)}")
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if key in table and other not in table:
            raise ConfigError(f"{file}: {key} is set and {other} is not; TLS needs tls_cert and tls_key")
    return {key: checked(key, value, f"{file}: {key}") for key, value in table.items()}


def _from_text(key: str, text: str, variable: str) -> Any:
    if key in ("port", "profile_every"):
        if not text.isdecimal():
            raise ConfigError(f"{variable}={text}: not a {'port number' if key == 'port' else 'whole number'}")
        return int(text)
    if key in ("peers", "job_info"):
        return [part.strip() for part in text.split(",") if part.strip()]
    if key == "thresholds":
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{variable}={text}: not a number") from None
    return text
