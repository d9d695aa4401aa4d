"""The report's file: refused early, replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.errors import ArgumentError, TorporError
from torpor.serve.report_file import check_report_file, write_report_file


def test_a_new_file_is_fine_and_not_made_yet(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    check_report_file(path)
    assert list(tmp_path.iterdir()) == []
    write_report_file(path, "<p>é</p>")
    assert path.read_text(encoding="utf-8") == "<p>é</p>"
    assert list(tmp_path.iterdir()) == [path]


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    check_report_file(path)
    assert path.read_text() == "old"
    write_report_file(path, "new")
    assert path.read_text() == "new"


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "r.html", tmp_path / "link.html"
    link.symlink_to(target)
    write_report_file(link, "new")
    assert target.read_text() == "new"
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("name", "words"), [("", "is a folder"), ("none/r.html", "there is no folder")]
)
def test_an_impossible_path_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_report_file(tmp_path / name)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    # /proc refuses new files whoever asks, root included.
    with pytest.raises(ArgumentError, match="choose another path"):
        check_report_file(Path("/proc/r.html"))


def test_a_device_is_written_to_and_not_replaced() -> None:
    check_report_file(Path("/dev/null"))
    write_report_file(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TorporError, match="No space left"):
        write_report_file(Path("/dev/full"), "x")
    with pytest.raises(TorporError, match="could not be written"):
        write_report_file(tmp_path / ("n" * 300), "x")
    assert list(tmp_path.iterdir()) == []
