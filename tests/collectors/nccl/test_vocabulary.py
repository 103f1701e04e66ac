"""The vocabulary: known warnings have a class and the remedy of their own cause; others have the subsystem of their file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.views import SEVERITIES
from commwatch_collectors.nccl.vocabulary import known
from commwatch_collectors.nccl.vocabulary.known import WORDS, words_for
from commwatch_collectors.nccl.vocabulary.places import PLACES, subsystem
from commwatch_collectors.nccl.vocabulary.words import KINDS, Words
from tests.collectors.nccl.sites import text_of
from tests.collectors.nccl.test_classes import WARNINGS
from tests.collectors.nccl.test_sites import LISTS, rows
from tests.helpers import examples

OFI = "static int process_err_completion(nccl_net_ofi_ep_t*, fid_cq*):311"
#: Warning, where it was printed, its class, and regular expressions for what its remedy names and does not name.
REMEDIES = [
    line.split("\t")
    for line in (Path(__file__).parents[2] / "fixtures/nccl/remedies.tsv").read_text(encoding="utf-8").splitlines()[1:]
]


@pytest.mark.parametrize(("text", "origin", "kind", "names", "without"), REMEDIES)
def test_remedies(text: str, origin: str, kind: str, names: str, without: str) -> None:
    """A warning has the class and the remedy of its cause, and no advice for another one."""
    words = words_for(text, origin)
    assert words is not None
    assert words.kind == kind
    assert re.search(names, words.do)
    assert not re.search(without, words.do)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in WARNINGS.items() for text in texts])
def test_classes_are_kept(kind: str, text: str) -> None:
    """A warning that has a class keeps it."""
    words = words_for(text, "")
    assert kind == "other" or (words is not None and words.kind == kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Got completion after an async fatal event", "ib_completion_error"),
        ("Call to ibv_poll failed: timeout", "system_error"),
        ("Cuda failure 'launch timed out'", "cuda_error"),
        ("collective mismatch: version mismatch", "version_mismatch"),
        ("NET/XYZ : handshake timed out after 20 s", "timeout"),
    ],
)
def test_precedence(text: str, kind: str) -> None:
    """Where two entries fit, the first counts."""
    words = words_for(text, "")
    assert words is not None
    assert words.kind == kind


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.pattern[:40])
def test_entries(words: Words) -> None:
    """Each entry is complete: a class that exists, a severity, sentences, and patterns with bounded repetitions."""
    kind, pattern, means, do, alone, file, *_ = words
    assert kind in KINDS
    assert alone in SEVERITIES
    for sentence in (means, do):
        assert re.fullmatch(r"[A-Z].+[.)]", sentence)
        assert "  " not in sentence
    for expression in (pattern, file):
        assert unbounded(expression) == []


def test_no_entry_is_hidden() -> None:
    """Each entry is the first that fits some warning of the lists or of the tests."""
    texts = [(text, origin) for text, origin, *_ in REMEDIES]
    texts += [(text, "") for forms in WARNINGS.values() for text in forms]
    texts += [(text_of(call), file) for path in LISTS for file, call, _ in rows(path)]
    assert set(WORDS) - {words_for(text, origin) for text, origin in texts} == set()


def unbounded(expression: str) -> list[str]:
    """Return the repetitions without an upper bound in a regular expression."""
    bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\[^\[\]]", "x", expression))
    return re.findall(r"[*+]|\{\d*,\}", bare)


def test_unbounded_is_found() -> None:
    """The check of the patterns finds what it looks for."""
    assert [unbounded(text) for text in (r"a{0,9}\+[+*]\w", "ab*", "(?:x|y+)z", "[a-z]{2,}")] == [
        [],
        ["*"],
        ["+"],
        ["{2,}"],
    ]


@pytest.mark.parametrize(
    ("place", "name", "do"),
    [
        ("transport/net_ib.cc:420", "InfiniBand", "NCCL_IB_DISABLE=1"),
        ("transport/net_ib/p2p.cc:42", "InfiniBand", "NCCL_IB_DISABLE=1"),
        ("/build/rccl/hipify/src/transport/net_ib.cc:420", "InfiniBand", "NCCL_IB_DISABLE=1"),
        ("transport/nvls.cc:158", "NVLS", "NCCL_NVLS_ENABLE=0"),
        ("mnnvl.cc:61", "MNNVL", "NCCL_MNNVL_ENABLE=0"),
        ("transport/p2p.cc:250", "P2P", "NCCL_P2P_DISABLE=1"),
        ("transport/shm.cc:114", "SHM", "--shm-size"),
        ("bootstrap.cc:98", "bootstrap", "NCCL_SOCKET_IFNAME"),
        ("misc/socket.cc:518", "sockets", "NCCL_SOCKET_IFNAME"),
        ("gin/gin_host.cc:86", "GIN", "NCCL_GIN_ENABLE=0"),
        ("rma/rma_proxy.cc:320", "RMA", "NCCL_GIN_ENABLE=0"),
        ("transport/coll_net.cc:727", "SHARP", "sharp_am"),
        ("plugin/net.cc:349", "plug-ins", "NCCL_NET_PLUGIN"),
        ("graph/topo.cc:104", "topology", "NCCL_TOPO_FILE"),
        ("misc/msccl/msccl_parser.cc:290", "MSCCL", "RCCL_MSCCL_ENABLE=0"),
        ("misc/alt_rsmi.cc:79", "ROCm", "/dev/kfd"),
        (OFI, "libfabric", "security group"),
        ("ofi_process_cq:1039", "libfabric", "security group"),
        ("void some::part::call(int):7", "a plug-in", "version"),
        ("transport/net.cc:77", "network", "NCCL_NET"),
        ("net.cc:580", "plug-ins", "NCCL_NET_PLUGIN"),
        ("/opt/rocm/cuda/build/hipify/src/init.cc:77", "setting up a communicator", "first error"),
        ("init.cc:77", "setting up a communicator", "first error"),
        ("new_file.cc:1", "NCCL", "issue tracker"),
        ("", "NCCL", "issue tracker"),
    ],
)
def test_subsystems(place: str, name: str, do: str) -> None:
    """A file of NCCL, RCCL or a plug-in has its subsystem, and the remedy of that for words that are not known."""
    found = subsystem(place)
    assert name in found[0]
    assert do in found[1]


def test_places_are_complete() -> None:
    """Each subsystem has one entry, and its advice is a sentence."""
    assert len({place.name for place in PLACES}) == len(PLACES)
    assert all(place.do.endswith(".") for place in PLACES)


pieces = st.sampled_from([text for text, *_ in REMEDIES] + ["a" * 3000, "NET/OFI " * 200, "(", "::", "\n", " failed"])


@given(st.lists(pieces | st.text(max_size=40), max_size=6).map("".join), st.text(max_size=40) | st.just(OFI))
@examples(150)
def test_any_text(text: str, origin: str) -> None:
    """Any text and origin can be looked up, and has a subsystem."""
    words = words_for(text, origin)
    assert words is None or words in WORDS
    assert all(subsystem(origin))


def test_long_text() -> None:
    """Of a long text the beginning counts, where the words of a warning are."""
    assert words_for("x" * 5000 + "Duplicate GPU detected", "") is None
    assert words_for("Duplicate GPU detected" + "x" * 100_000, "") is not None


def test_repeated_words() -> None:
    """Warnings that differ in pointers and counters alone are searched once: a flood of them costs little."""
    for number in range(1000):
        assert (
            words_for(f"Proxy response for opId={hex(number << 20)} of {number + 10**6} is late", "proxy.cc:5")
            is not None
        )
        if not number:
            searched = known._words_for.cache_info().misses
    assert known._words_for.cache_info().misses == searched
