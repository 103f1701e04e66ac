"""Bytes to physical lines: the same however the stream is cut, whatever the bytes, and bounded."""

from __future__ import annotations

import io
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.nccl.input.lines import MOST_BYTES, Lines, lines_of, split_lines
from tests.helpers import examples


def cut(data: bytes, *at: int) -> list[tuple[int, str]]:
    """The lines of ``data`` that comes in pieces."""
    lines = Lines()
    ends = [0, *sorted(min(place, len(data)) for place in at), len(data)]
    found = [line for first, last in pairwise(ends) for line in split_lines(lines.feed(data[first:last]))]
    return [*found, *split_lines(lines.end())]


def test_lines() -> None:
    """Lines are numbered from 1; CR stays, empty lines count, and the last needs no newline."""
    assert cut(b"a\nb\r\n\nc") == [(1, "a"), (2, "b\r"), (3, ""), (4, "c")]
    assert cut(b"a\n") == [(1, "a")]
    assert cut(b"") == []


def test_binary() -> None:
    """Bytes that are no UTF-8 are replaced, zeros are dropped, and the lines around them are whole."""
    assert cut(b"a\n\xff\xfe\x00\n\xe2\x82\nb\n") == [(1, "a"), (2, "\ufffd\ufffd"), (3, "\ufffd"), (4, "b")]


def test_a_character_cut_in_two() -> None:
    """A character whose bytes come in two pieces is read whole."""
    assert cut("é\n".encode(), 1) == [(1, "é")]


def test_long_lines() -> None:
    """A line that is too long comes in bounded pieces under one number; the next has the next."""
    line = b"x" * (2 * MOST_BYTES + 5)
    found = cut(line + b"\nnext\n")
    assert [(number, len(text)) for number, text in found] == [(1, MOST_BYTES), (1, MOST_BYTES), (1, 5), (2, 4)]


def test_no_newline_is_bounded() -> None:
    """What never has a newline is handed on before it fills the memory."""
    lines = Lines()
    handed = sum(len(text) for _ in range(8) for _, text in lines.feed(b"y" * MOST_BYTES))
    assert handed >= 7 * MOST_BYTES
    assert handed + sum(len(text) for _, text in lines.end()) == 8 * MOST_BYTES


@given(
    st.lists(
        st.sampled_from(
            [b"a", b"\n", b"\r\n", b"\x1b[0m", b"\xff", b"\0", "é".encode(), b"0" * MOST_BYTES, b"1" * (MOST_BYTES - 1)]
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 4 * MOST_BYTES), max_size=5),
)
@examples(60)
def test_cut_anywhere(parts: list[bytes], at: list[int]) -> None:
    """However a stream is cut, its lines are the same; nothing is lost."""
    data = b"".join(parts)
    whole = cut(data)
    assert cut(data, *at) == whole
    assert list(split_lines(lines_of(io.BytesIO(data)))) == whole
    assert [number for number, _ in whole] == sorted(number for number, _ in whole)
    assert all(len(text) <= MOST_BYTES for _, text in whole)


@given(st.text(alphabet="ab\r\x1b é", max_size=40).map(str.encode), st.integers(0, 40))
@examples(100)
def test_text_is_kept(data: bytes, at: int) -> None:
    """Text comes out as it went in."""
    assert "\n".join(text for _, text in cut(data + b"\n" + data, at)) == (data + b"\n" + data).decode().removesuffix(
        "\n" * (not data)
    )
