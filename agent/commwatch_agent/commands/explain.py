"""``commwatch explain LOG...``: a summary of NCCL's debug output, on one screen or as JSON."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commwatch_agent.commands.log_files import expand, read
from commwatch_agent.text import terminal_text
from commwatch_agent.text.units import counted, size
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.belonging import OF_FAULTS
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.facts import Died, Speaks, Ucx, Uncaught, Xid
from commwatch_collectors.nccl.labels import labels
from commwatch_collectors.nccl.topology import choices, hosts, views
from commwatch_collectors.nccl.views import SEVERITIES, ChoiceView, CommunicatorView, Finding, HostView

#: Most entries shown of long lists; ``--json`` has all entries.
_MOST_HOSTS, _MOST_COMMS, _MOST_SETTINGS, _MOST_CHOICES = 6, 8, 12, 8
#: Most files that are named because they are damaged or no text.
_MOST_REMARKS = 10
#: Facts that any line of a rank, or a program that handles its exceptions, may have; and those of other programs than PyTorch.
_SHOW_NOTHING = frozenset({Speaks, Uncaught})
_OF_OTHERS = frozenset({Died, Ucx, Xid})


def matching(patterns: Iterable[str]) -> dict[str, os.stat_result]:
    """Return the files that match any of ``patterns``, with their file status."""
    found = {}
    for path in sorted({path for pattern in patterns for path in glob.glob(pattern)}):  # noqa: PTH207 - whole paths
        with contextlib.suppress(OSError):
            found[path] = Path(path).stat()
    return found


def as_json(account: Account, names: list[str]) -> dict[str, Any]:
    """Return all findings and facts, for programs."""
    return {
        **labels(account),
        "files": names,
        "communicators": [asdict(view) for view in views(account)],
        "choices": [asdict(choice) for choice in choices(account)],
        "unknown_messages": account.unknown,
        "unknown_samples": [{"file": seen.source, "line": seen.number, "text": seen.line} for seen in account.samples],
        "damaged_messages": account.torn,
        "findings": [asdict(finding) for finding in findings(account)],
    }


def text(account: Account, names: list[str], found: list[Finding]) -> str:
    """Return one screen of text for people."""
    width = min(terminal_text.output_cells(), 120)
    return terminal_text.lines(_lines(account, names, found, width))


def _lines(account: Account, names: list[str], found: list[Finding], width: int) -> Iterator[str]:
    label_values = labels(account)
    yield f"{names[0] if len(names) == 1 else f'{len(names)} files'}: {_amount(account)}"
    yield ""
    yield from _row("Library", _library(label_values, account), width)
    where = hosts(account)
    if where:
        yield from _row("Hosts", _hosts(where), width)
    if "network" in label_values or "transports" in label_values:
        yield from _row("Network", _network(label_values), width)
    if "env" in label_values:
        yield from _row("Settings", _settings(label_values["env"]), width)
    yield from _communicators(views(account), width)
    chosen = choices(account)
    if chosen:
        yield from _row(
            "Choices",
            "; ".join(_choice(choice) for choice in chosen[:_MOST_CHOICES]) + _more(chosen, _MOST_CHOICES),
            width,
        )
    if not account.levels["INFO"] and not label_values["library"].startswith("none"):
        yield from _row("", "No topology: it requires NCCL_DEBUG=INFO.", width)
    yield ""
    yield from _findings(account, found, width)


def _amount(account: Account) -> str:
    messages = sum(account.levels.values())
    parts = [f"{account.n_lines:,} lines, {messages:,} NCCL messages"]
    if account.unknown:
        parts.append(f"{account.unknown:,} of unknown form")
    if account.torn:
        parts.append(f"{account.torn:,} damaged")
    return ", ".join(parts)


def _library(label_values: dict[str, Any], account: Account) -> str:
    parts = [f"{label_values['library']} {', '.join(label_values.get('nccl_version', ['of unknown version']))}"]
    for key, name in (("cuda_version", "CUDA"), ("hip_version", "HIP"), ("rocm_version", "ROCm")):
        if key in label_values:
            parts.append(f"{name} {', '.join(label_values[key])}")
    if "cuda_driver_version" in label_values:
        parts.append(
            "driver " + ", ".join(f"{v // 1000}.{v % 1000 // 10}" for v in label_values["cuda_driver_version"])
        )
    if label_values["library"].startswith("none"):
        kinds = {kind for kind, _ in account.loose.items() if kind not in _SHOW_NOTHING}
        if not kinds:
            return "none: no lines from NCCL, or from PyTorch about NCCL"
        return "none: only lines of other programs" if kinds <= _OF_OTHERS else "none: only PyTorch's lines"
    return ", ".join(parts)


def _hosts(where: list[HostView]) -> str:
    alike: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for host in where:
        alike.setdefault((host.processes, tuple(host.hcas)), []).append(host.host)
    parts = []
    for (processes, hcas), names in list(alike.items())[:_MOST_HOSTS]:
        who = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        each = " each" if len(names) > 1 else ""
        cards = f" ({', '.join(hcas[:8])}{' ...' if len(hcas) > 8 else ''})" if hcas else ""
        parts.append(f"{who}: {processes} process{'es' * (processes > 1)}{each}{cards}")
    return "; ".join(parts) + _more(list(alike), _MOST_HOSTS)


def _network(label_values: dict[str, Any]) -> str:
    parts = [", ".join(label_values["network"])] if "network" in label_values else []
    if "gdrdma" in label_values:
        with_gdr, without = label_values["gdrdma"]["lines_with"], label_values["gdrdma"]["lines_without"]
        some = f"on {with_gdr} of {with_gdr + without} connections"
        parts.append(f"GPUDirect RDMA {'on all connections' if not without else some if with_gdr else 'not used'}")
    if "bootstrap_interfaces" in label_values:
        parts.append(f"bootstrap on {', '.join(label_values['bootstrap_interfaces'])}")
    if "transports" in label_values:
        parts.append(
            "transports " + ", ".join(f"{kind} ({lines})" for kind, lines in label_values["transports"].items())
        )
    if label_values.get("collnet_lines"):
        parts.append("CollNet")
    return "; ".join(parts)


def _settings(env: dict[str, Any]) -> str:
    parts = [f"{name}={value if isinstance(value, str) else '|'.join(value)}" for name, value in sorted(env.items())]
    return ", ".join(parts[:_MOST_SETTINGS]) + _more(parts, _MOST_SETTINGS)


def _communicators(found: list[CommunicatorView], width: int) -> Iterator[str]:
    alike: dict[str, list[CommunicatorView]] = {}
    for comm in found:
        alike.setdefault(_communicator(comm), []).append(comm)
    for number, (about, comms) in enumerate(list(alike.items())[:_MOST_COMMS]):
        first = comms[0]
        name = f"{len(comms)} of {first.nranks} ranks" if len(comms) > 1 else first.name.removeprefix("communicator ")
        yield from _row("" if number else "Comms", f"{name}: {about}", width)
    if len(alike) > _MOST_COMMS:
        yield from _row("", f"... and {len(alike) - _MOST_COMMS} more", width)


def _communicator(comm: CommunicatorView) -> str:
    nodes = comm.nnodes or len(comm.hosts)
    parts = [counted(nodes, "node")] if nodes else []
    if not comm.complete:
        parts.append("init not complete")
    if comm.missing_ranks:
        parts.append(f"only rank{'s' * (not comm.in_sight.isdigit())} {comm.in_sight} in the logs")
    if comm.coll_channels is not None:
        parts.append(f"{comm.coll_channels} channels")
    if comm.transports:
        parts.append(", ".join(f"{kind} {lines}" for kind, lines in comm.transports.items()))
    if comm.rings and comm.nranks > 1:
        order = next(iter(comm.rings.values()))
        parts.append("ring " + " ".join(map(str, order[:16])) + (" ..." if len(order) > 16 else ""))
    return "; ".join(parts) or "no details"


def _choice(choice: ChoiceView) -> str:
    low, high = size(choice.min_bytes), size(choice.max_bytes)
    sizes = low if low == high else f"{low} to {high}"
    return f"{choice.collective + ' ' if choice.collective else ''}{sizes}: {choice.algo}/{choice.proto}"


def _nothing_found(account: Account) -> str:
    """Return what a log without findings is worth: lines that were read, or none."""
    loose = {
        kind: sum(seen.lines for seen in found.values())
        for kind, found in account.loose.items()
        if kind not in _SHOW_NOTHING
    }
    of_torch = sum(lines for kind, lines in loose.items() if kind in OF_FAULTS)
    of_nccl = sum(account.levels.values()) or sum(loose.values()) - of_torch
    if not of_nccl + of_torch:
        return (
            "No line of NCCL, RCCL, PyTorch, Gloo, MPI or UCX was recognised, so this text shows nothing about communication. "
            "NCCL prints its lines with NCCL_DEBUG=INFO."
        )
    counts = [
        f"{number:,} line{'s' * (number > 1)} of {name}"
        for number, name in ((of_nccl, "NCCL"), (of_torch, "PyTorch"))
        if number
    ]
    return f"No findings in {' and '.join(counts)}."


def _findings(account: Account, found: list[Finding], width: int) -> Iterator[str]:
    if not found:
        yield from textwrap.wrap(_nothing_found(account), width, break_on_hyphens=False)
        return
    counts = [(sum(finding.severity == severity for finding in found), severity) for severity in SEVERITIES]
    yield "Findings: " + ", ".join(
        f"{count} {severity}{'s' * (count > 1 and severity != 'info')}" for count, severity in counts if count
    )
    for finding in found:
        yield ""
        yield from _wrapped(f"{finding.severity.upper()} {finding.title}: {finding.says}", "", width)
        if finding.evidence:
            first = finding.evidence[0]
            # In one line, so that the place can be copied.
            yield "  " + textwrap.shorten(f"{first.file}:{first.line}: {first.text}", width * 2, placeholder=" ...")
        if finding.severity == "info":
            continue
        yield from _wrapped(f"{finding.means} {finding.do}", "  ", width)


def _row(name: str, value: str, width: int) -> Iterator[str]:
    lines = textwrap.wrap(value, width - 10, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield f"{name if number == 0 else '':<10}{line}"


def _wrapped(value: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(value, width, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False)


def _more(parts: list[Any], most: int) -> str:
    return f", ... and {len(parts) - most} more" if len(parts) > most else ""


def explain(patterns: list[str], json_wanted: bool) -> int:
    """Print the summary of the logs; return 1 if a finding has the severity ``error``, else 0.

    Raises:
        UnreadableLog: a log does not exist or cannot be read.
    """
    files, account = expand(patterns), Account()
    names, remarks = read(files.names, account, files.found)
    for remark in remarks[:_MOST_REMARKS]:
        terminal_text.complain(remark)
    if len(remarks) > _MOST_REMARKS:
        terminal_text.complain(f"{len(remarks) - _MOST_REMARKS} more files were damaged or left out")
    found = findings(account)
    if json_wanted:
        print(json.dumps(as_json(account, names), indent=2))
    else:
        print(text(account, names, found))
    return int(any(finding.severity == "error" for finding in found))
