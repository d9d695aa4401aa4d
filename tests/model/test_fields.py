"""JSON and loosely typed fields are read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.errors import CheckpointError, ConfigError
from torpor.model.config.fields import Fields, parse_json_object, read_json_object


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} trailing', "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "Infinity is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"b": {"a": 1, "a": 2}}', "'a' appears twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"[1]", "JSON list, not an object"),
        (b"null", "JSON NoneType, not an object"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_damaged_json_is_refused_with_the_reason(raw: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"the file .*{problem}"):
        parse_json_object(raw, "the file", CheckpointError)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read \(No such file"):
        read_json_object(tmp_path / "none.json")


def test_an_absurdly_large_file_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.model.config.fields.MAX_JSON_BYTES", 10)
    (tmp_path / "big.json").write_text('{"a": 12345}')
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        read_json_object(tmp_path / "big.json")


@pytest.mark.parametrize("value", [0, -1, 11, 1.0, "1", True, [1]])
def test_a_whole_number_out_of_range_or_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"f: n is .* a whole number from 1 to 10"):
        Fields({"n": value}, "f").integer("n", low=1, high=10)


@pytest.mark.parametrize("value", [0, -1e-5, 1e40, 10**400, "1", True])
def test_a_number_that_is_not_positive_and_finite_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"f: n is .* a number above zero"):
        Fields({"n": value}, "f").number("n")


def test_null_counts_as_missing() -> None:
    fields = Fields({"n": None}, "f")
    assert fields.integer("n", 3, low=1, high=10) == 3
    assert fields.flag("n", True) is True
    assert fields.ids("n") == ()
    with pytest.raises(ConfigError, match="f: n is missing"):
        fields.number("n")


@pytest.mark.parametrize("value", ["1", [1, "2"], -1, [2**31], True, 1.5])
def test_ids_that_are_not_token_ids_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="a token id or a list of token ids"):
        Fields({"eos": value}, "f").ids("eos")


@pytest.mark.parametrize("value", [0, [-1], [4], ["1"], [True], [None], {}])
def test_indices_out_of_range_or_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"f: l is .* a list of whole numbers from 0 to 3"):
        Fields({"l": value}, "f").indices("l", 4)


def test_null_is_stated_and_yet_missing() -> None:
    fields = Fields({"n": None, "l": [3, 0]}, "f")
    assert fields.states("n")
    assert not fields.states("m")
    assert fields.indices("n", 4) == ()
    assert fields.indices("l", 4) == (3, 0)


def test_what_nobody_read_is_refused_unless_switched_off() -> None:
    off = {"a": 1, "b": None, "c": False, "d": 0, "_note": "x", "known": 5}
    fields = Fields(off, "f")
    fields.raw("a")
    fields.refuse_unread({"known"})
    with pytest.raises(ConfigError, match=r"f: e = 'x{76}\.\.\."):
        Fields({"e": "x" * 500}, "f").refuse_unread(())
