"""Prefixes that launchers, container runtimes, loggers, tools and quotations add to a line. Pure."""

from __future__ import annotations

import re

_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_STAMP = (
    rf"\[?(?:\d{{4}}[-/]\d\d[-/]\d\d[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    rf"|(?:[A-Z][a-z][a-z],? )?[A-Z][a-z][a-z] {{1,2}}\d{{1,2}} {_CLOCK}(?: (?:[A-Z]{{3,4}} )?\d{{4}})?(?= |\[|\]|:)"
    rf"|\d\d-\d\d {_CLOCK}(?= |\])"
    rf"|{_CLOCK}(?= |\]))\]?:?"
)
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SUCCESS)"
#: What may follow the number of a line: not the rest of a head, whose pid the number would be.
_NO_PID = r"(?!\d{1,10}(?: |:\d|\Z))"
#: A named group identifies a process.
_PREFIX = re.compile(
    r"(?:[\s\ufeff]"
    r"|\[ *\d{1,10}\.\d{1,9}\]|\d{10}\.\d{1,9}(?= )"  # seconds, since 1970 or the start
    r"|(?<=\d\d )[A-Za-z][\w.-]{0,254} [\w./-]{1,80}: "  # syslog without a pid
    rf"|\[\d{{4}}-\d\d-\d\d {_CLOCK} (?P<sglang>[A-Z]{{2}}\d{{1,5}}(?: [A-Z]{{2}}\d{{1,5}}){{0,3}})\]"
    r"|<\d{1,3}>1 \S{1,40} \S{1,255} \S{1,48} \S{1,128} \S{1,32} (?:-|(?:\[[^\]]{0,400}\]){1,8})(?: \ufeff?|\Z)"  # RFC 5424
    r"|<\d{1,3}>"
    rf"|{_STAMP}"
    r"|(?P<slurm>\d+):(?=\s)"
    r"|\[(?P<mpi>[\w@.:-]+,[\w@.:,-]+)\](?:\[[^][]*\])?<std(?:out|err|diag)>:"
    r"|\[(?P<rank>[A-Za-z][\w-]*?-?\d+)\]:"
    r"|\((?P<ray>[^()]*\bpid=\d+[^()]*)\)"
    r"|(?P<pod>\[?[\w.-]+(?:/[\w.-]+)+\]?):? "
    rf"|{_LEVEL}:[\w.<>-]{{1,80}}:{_NO_PID}"
    rf"|{_LEVEL} +[A-Za-z_][\w.]{{0,80}}:(?= )"
    rf"|(?![NR]CCL )[A-Za-z_][\w.]{{0,80}} +(?={_LEVEL}(?:[:\s]|\Z))"
    rf"|(?:{_LEVEL}|\[{_LEVEL} *\]):?(?=[\s|\[-]|\Z)"
    rf"|[IWEF]\d{{4,8}} {_CLOCK} +\d{{1,10}} [\w./-]{{1,80}}:\d{{1,7}}\]"  # glog
    r"|(?P<compose>[A-Za-z][\w.@-]*) +\| "
    r"|\A(?P<pdsh>[A-Za-z][\w.-]*|\d+(?:\.\d+){3}): "
    r"|\[(?P<mpich>\d+)\][: ]"
    r"|(?P<syslog>[\w.-]+ [\w./-]+\[\d+\]): "
    r"|std(?:out|err) [FP] "
    r"|\[(?:\d{1,3}(?:;\d{1,3})*m|m(?![\w.:-]{0,80} *\]))"  # a colour that has lost its escape
    r"|\[(?P<named>(?:[Rr]ank|[Ww]orker|GPU|[Nn]ode|[Tt]ask|[Pp]rocess)[ :=#]?\d+)\](?!:)"
    r"|\[(?P<kubetail>[a-z0-9][a-z0-9.-]{0,252} [a-z0-9][a-z0-9-]{0,62}|[a-z][a-z0-9]*(?:-[a-z0-9]+){1,20})\] "
    r"|\[[A-Za-z_][\w.<>-]{0,80}(?::\d{1,7})?(?::[\w.<>]{1,80})? *\](?!:)"  # logger, file:line:function
    r"|(?:[A-Za-z_][\w.]{0,80}:)?[\w./-]{1,80}\.py:\d{1,7}(?::\w{1,80})?[]:]?(?=\s)"
    r"|(?P<loki>\{[^{}]{0,400}\}) "
    r"|(?<= )\d\d[OE][ +]"  # GitLab
    r"|[A-Za-z_][\w.<>]{0,80}(?::[\w.<>]{1,80}:\d{1,7})? -(?= )"  # logger, module:function:line
    rf"|(?<![^\s:\]>])(?P<grep>[^\s:[\]]{{0,200}}[./][^\s:[\]]{{0,200}}):(?:\d{{1,9}}:)?{_NO_PID}"
    rf"|(?<![^\s:\]>])\d{{1,9}}:(?!\s){_NO_PID}"
    r"|(?<!\S)\d{1,9}\t"  # numbered lines
    r"|(?<![^\s:\]>])(?:[-*+\u2022]|\d{1,3}[.)])(?= )"  # lists
    r"|(?<![^\s:\]>])(?P<stern>(?:[a-z][a-z0-9-]{0,62} )?[a-z][a-z0-9]*(?:[.-][a-z0-9]+){1,40} [a-z0-9-]{0,62}[a-z][a-z0-9-]{0,62}) "
    r"|[>|`\u2502\u2503])*"
)
#: Blanks, and the timestamp that NCCL itself prints.
_NOTHING = re.compile(r"\s*(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\] ?)?")
_KINDS = {"slurm": 'slurm "N: "', "mpi": "mpirun", "rank": "rank", "ray": "ray"}
_OTHERS = ("pod", "compose", "pdsh", "mpich", "kubetail", "stern", "sglang", "named", "loki", "grep")


def prefix(line: str) -> tuple[int, str, str]:
    """Return the length of the prefixes that ``line`` begins with, their kind, and the part that identifies the process.

    Kinds: ``none``, ``slurm "N: "``, ``mpirun``, ``rank``, ``ray``, ``other``.
    """
    found = _PREFIX.match(line)
    assert found is not None  # it also matches an empty text
    for name, kind in _KINDS.items():
        if found[name] is not None:
            return found.end(), kind, found[name]
    for name in _OTHERS:
        if found[name] is not None:
            return found.end(), "other", found[name]
    return found.end(), ("none" if _NOTHING.fullmatch(found[0]) else "other"), ""
