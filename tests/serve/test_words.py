"""Figures for people."""

from __future__ import annotations

import pytest

from torpor.serve.words import count, duration, printable, size


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (94_371_840, "94.4 MB"),
        (538_060_032, "538 MB"),
        (999_600, "1.00 MB"),
        (999_999_999, "1.00 GB"),
        (25_276_059_648, "25.3 GB"),
        (3e15, "3000 TB"),
        (None, "unknown"),
    ],
)
def test_sizes_have_three_digits(nbytes: float | None, words: str) -> None:
    assert size(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.00 µs"),
        (2.4e-6, "2.40 µs"),
        (0.0014, "1.40 ms"),
        (0.0723, "72.3 ms"),
        (0.3, "300 ms"),
        (0.99996, "1.00 s"),
        (12.84, "12.8 s"),
        (250.0, "250 s"),
        (None, "unknown"),
    ],
)
def test_durations_have_three_digits(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_counts_agree_with_their_noun() -> None:
    assert count(1, "token") == "1 token"
    assert count(0, "token") == "0 tokens"
    assert count(2, "body", "bodies") == "2 bodies"


def test_a_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9bc\td\n\u00e9") == "a\ufffd[31mb\ufffd\ufffdc\td\n\u00e9"
