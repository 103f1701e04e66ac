"""The settings of the agent. Each is declared once: type, default, text, and what follows from a change while the agent runs.

Parsing, checks, environment variables, ``commwatch config``, the table in ``docs/settings.md`` and the values of the Helm chart follow
from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from socket import gethostname
from typing import Any

from commwatch_agent import config_checks as checks
from commwatch_agent.config_checks import GPUS_AUTO
from commwatch_agent.prometheus.metrics import NAMED
from commwatch_alerts.model import KindSettings
from commwatch_alerts.receivers.settings import RECEIVERS, ReceiverConfig
from commwatch_alerts.values import SWITCH, Type, number, whole_number


def setting(
    kind: Type,
    default: Any = MISSING,
    text: str = "",
    *,
    reload: bool = False,
    flag: bool = False,
    prefix: str | None = None,
    shown: str | None = None,
) -> Any:
    """Return the field of a setting.

    Args:
        default: or a function that returns it.
        text: what it does, for ``docs/settings.md``.
        reload: it takes effect when a running agent reads its settings again; otherwise it needs a restart.
        flag: commands have a flag of this name.
        prefix: of a table: begins variables of single entries, before the entry's name in capitals.
        shown: the default in the documentation, if it depends on the environment.
    """
    about = {"kind": kind, "text": text, "reload": reload, "flag": flag, "prefix": prefix, "shown": shown}
    return field(**{"default_factory" if callable(default) else "default": default}, metadata=about)


# fmt: off
@dataclass(frozen=True)
class Config:
    """All settings of the agent. Each can be set in ``commwatch.toml`` under its own name."""

    dir: Path = setting(
        checks.DIRECTORY, MISSING,
        "run directory, shared by trainers and agent. Only its owner (or the group `COMMWATCH_GROUP`) has access",
        flag=True, shown="/dev/shm/commwatch-<uid>",
    )
    state: Path = setting(
        checks.DIRECTORY, MISSING,
        "directory of the history. If `dir` is set and `state` is not set, it is the value of `dir`",
        flag=True, shown="$XDG_STATE_HOME/commwatch",
    )
    node: str | None = setting(
        checks.NODE, None,
        "name of the node in the names of the agent's files. Not set: the host name",
    )
    host: str = setting(
        checks.ADDRESS, "127.0.0.1",
        "address on which the agent listens. An address that other machines can reach requires `tls_cert` or "
        "`insecure`",
        flag=True,
    )
    port: int | None = setting(
        whole_number(0, 65535), None,
        "not set: 9477, or any free port if 9477 is taken; 0: any free port; any other value: only this port",
        flag=True,
    )
    token_file: Path | None = setting(
        checks.FILE, None,
        "file with the [token](security.md#the-token) that the agent accepts and that commands send. Not set: "
        "`agent.token` in the run directory; the agent creates this file",
        reload=True, flag=True,
    )
    require_token: bool = setting(
        SWITCH, False,
        "`true`: reading also requires the token, except for `/metrics`, `/healthz` and `/readyz`",
        reload=True, flag=True,
    )
    require_token_for_metrics: bool = setting(
        SWITCH, False,
        "`true`: `/metrics` requires the token, too",
        reload=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        checks.HOSTS, (),
        "list of additional host names that the agent accepts, besides its address and the name of its machine; "
        "`.example.org` covers all names with this ending",
        reload=True,
    )
    insecure: bool = setting(
        SWITCH, False,
        "`true`: the agent may listen without TLS on addresses that other machines can reach",
        flag=True,
    )
    tls_cert: Path | None = setting(
        checks.FILE, None,
        "certificate of the agent, with the intermediate certificates, in PEM format: the agent [listens with "
        "TLS](security.md#tls). To switch TLS on or off, restart the agent",
        reload=True,
    )
    tls_key: Path | None = setting(
        checks.FILE, None,
        "private key of `tls_cert`, without a password",
        reload=True,
    )
    tls_client_ca: Path | None = setting(
        checks.FILE, None,
        "CA certificates: only clients with a certificate that one of these CAs has signed can connect",
        reload=True,
    )
    ca_file: Path | None = setting(
        checks.FILE, None,
        "for requests of commands and of the agent to other agents: certificate of the CA that signs the agents' "
        "certificates. Not set: the CAs that the system trusts",
        reload=True, flag=True,
    )
    client_cert: Path | None = setting(
        checks.FILE, None,
        "for the same requests: one file with a client certificate and its key, for agents that require a client "
        "certificate",
        reload=True, flag=True,
    )
    peers: tuple[str, ...] = setting(
        checks.PEERS, (),
        "list of the agents of the other nodes, for [answers about the whole job](api.md#the-whole-job): host names, "
        "`host:port`, URLs, target files (`.json`) in Prometheus' `file_sd` format, and `dns+host:port` for all "
        "addresses of a DNS name",
        reload=True,
    )
    discover_peers: bool = setting(
        SWITCH, True,
        "an agent that listens beyond loopback tells the ranks of its node its address, and they exchange the "
        "addresses of all nodes through the TCPStore of `torch.distributed` ([details](api.md#the-whole-job)). "
        "`false`: only `peers` counts",
    )
    log_format: str = setting(
        checks.LOG_FORMAT, checks.LOG_TEXT,
        "format of [the agent's log](deploy.md#the-agents-log): `text`, or `json` with one object in each line",
        reload=True,
    )
    log_level: str = setting(
        checks.LOG_LEVEL, checks.LOG_INFO,
        "least important lines of the log: `debug`, `info`, `warning` or `error`. `--quiet` means `warning`",
        reload=True, flag=True,
    )
    interval: float = setting(
        number(0.01, 60, "seconds"), 0.25,
        "seconds between two looks at the trainers, from 0.01 to 60; every second look reads the records in the rings",
        reload=True,
    )
    raw_bytes: int = setting(
        whole_number(1 << 20, 1 << 50, "bytes"), 256 << 20,
        "maximum size of the raw records on disk, in bytes; at least 1 MiB. Users, and the jobs of a user, [share "
        "it](reliability.md#bounds). One million records take about 12 MB",
        reload=True,
    )
    summary_bytes: int = setting(
        whole_number(1 << 20, 1 << 50, "bytes"), 1 << 30,
        "maximum size of the rest of the history on disk, most of it steps and roll-ups, in bytes; at least 1 MiB. "
        "Users, and the jobs of a user, [share it](reliability.md#bounds); the oldest of those with more than their "
        "share are deleted first. Eight ranks with a step a second take about 0.1 GB a day",
        reload=True,
    )
    profile_every: int = setting(
        whole_number(0, 10**9, "steps"), 0,
        "the agent has one in so many steps [profiled](numbers.md#regular-profiles), to know the exposed share of "
        "ranks for which it is not measured otherwise; the number grows while profiles take more than 0.1% of the "
        "time. 0: none",
    )
    keep_days: float = setting(
        number(0.01, 3650, "days"), 7.0,
        "days after their [arrival](reliability.md#clocks) after which the agent deletes raw records, roll-ups, "
        "steps, [incidents](incidents.md), profiles, and the NCCL logs that commwatch has created; from 0.01 to 3650",
        reload=True,
    )
    keep_ended: float = setting(
        number(0, 86400, "seconds"), 300.0,
        "seconds for which the metrics of an ended job stay in `/metrics`, from 0 to 86400",
    )
    gpus: str = setting(
        checks.GPU_USE, GPUS_AUTO,
        "`auto`: the agent reads [GPUs](hardware.md#gpus) if there are any; `required`: the agent reports a fault if there are "
        "none; `off`: the agent does not use the driver",
    )
    inspector_dir: Path | None = setting(
        checks.DIRECTORY, None,
        "folder with the dumps of [NCCL Inspector](nccl.md#nccl-inspector), in addition to the folders that "
        "probes report",
    )
    ras: str | None = setting(
        checks.RAS, None,
        "addresses of [NCCL's RAS](nccl.md#nccls-ras) that the agent polls, such as `localhost:28028`, separated "
        "by commas. Not set: none",
    )
    links: Mapping[str, str] = setting(
        checks.LINKS, dict,
        "table: the label of a group, or `*` for all other groups, and the [link](hardware.md#the-link-catalogue) that the group uses, or "
        "several parallel links (`8 x ib-ndr`). commwatch derives expected times from the link if there is [no "
        "measurement](references.md)",
        reload=True,
    )
    receivers: tuple[ReceiverConfig, ...] = setting(
        RECEIVERS, (),
        "tables: the [receivers of alerts](alerts.md#receivers)",
        reload=True,
    )
    thresholds: Mapping[str, float] = setting(
        checks.THRESHOLDS, dict,
        "table: [thresholds of alerts](alerts.md#thresholds) that differ from the default.",
        reload=True, prefix="COMMWATCH_THRESHOLD_",
    )
    kinds: Mapping[str, KindSettings] = setting(
        checks.KINDS, dict,
        "tables: [settings of kinds of incidents](alerts.md#kinds): whether a kind is enabled, its highest severity, "
        "its duration",
        reload=True,
    )
    labels: Mapping[str, str] = setting(
        checks.LABELS, dict,
        "table: labels of every `commwatch_job_info` and every alert of this agent, such as `cluster` or `team`. "
        "See [how to join them](metrics.md#labels-of-your-own)",
        reload=True, prefix="COMMWATCH_LABEL_",
    )
    job_info: tuple[str, ...] = setting(
        checks.JOB_INFO, NAMED,
        "what `commwatch_job_info` names of a job: any of `user`, `script` and `node`. An empty list: "
        "[none of them](metrics.md#labels-of-your-own), also in alerts and the log",
        reload=True,
    )
    otlp_endpoint: str | None = setting(
        checks.ENDPOINT, None,
        "base URL of a receiver to which the agent pushes metrics and incidents over [OTLP](metrics.md#push-over-otlp). Needs the extra "
        "`commwatch[otlp]`",
    )
    otlp_headers_file: Path | None = setting(
        checks.FILE, None,
        "file with headers of these requests, one `Name: value` in each line; the agent reads it for each push",
    )
    otlp_ca_file: Path | None = setting(
        checks.FILE, None,
        "certificate of the CA that signs the receiver's certificate. Not set: the CAs that the system trusts",
    )
    otlp_client_cert: Path | None = setting(
        checks.FILE, None,
        "one file with a client certificate and its key, for a receiver that requires a client certificate",
    )
    otlp_interval: float = setting(
        number(1, 3600, "seconds"), 15.0,
        "seconds between two pushes, from 1 to 3600",
    )
    otlp_logs: bool = setting(
        SWITCH, True,
        "`false`: the agent pushes only metrics",
    )

    # fmt: on

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
        return self.state / f"sent-{self.node_name}.json"


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting; the fields are the arguments of ``setting``."""

    key: str
    default: Any
    kind: Type
    text: str
    reload: bool
    flag: bool
    prefix: str | None
    shown: str | None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"COMMWATCH_{self.key.upper()}"


SETTINGS = {each.name: Setting(each.name, each.default, **each.metadata) for each in fields(Config)}
#: Names of settings that no label of a file has: such a line is a setting below ``[labels]``. Of ``NAMED`` each may be replaced by a label.
NOT_LABELS = SETTINGS.keys() - {*NAMED}
#: The settings that are folders to which the agent writes.
FOLDERS = ("dir", "state")
#: Settings that no longer exist, and what to do instead.
REMOVED = {
    "rules": "commwatch no longer reads lists of alerts; put rules of your own into Prometheus (rule_files), "
    "and change ours with [thresholds] and [kinds.NAME]"
}
