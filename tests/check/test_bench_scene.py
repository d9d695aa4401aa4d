"""What a benchmark says of the machine and of the commit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from torpor.check.bench_scene import QUIET_LOAD, scene_since, source_commit


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one tracked file."""
    (tmp_path / "tracked.py").write_text("x = 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "tracked.py")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def test_a_tracked_file_has_the_commit_of_its_checkout(checkout: Path) -> None:
    git(checkout, "tag", "v1")
    commit = source_commit(checkout / "tracked.py")
    assert commit is not None
    assert git(checkout, "rev-parse", "HEAD").startswith(commit)


def test_changed_files_make_the_commit_dirty(checkout: Path) -> None:
    (checkout / "tracked.py").write_text("x = 2\n")
    assert str(source_commit(checkout / "tracked.py")).endswith("-dirty")


def test_a_package_inside_a_foreign_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "rig.py").write_text("")
    assert source_commit(installed / "rig.py") is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout / "nothing"))
    assert source_commit(checkout / "tracked.py") is None


def test_a_scene_tells_rig_threads_and_load() -> None:
    facts = scene_since(0.25).to_dict()
    assert facts["device"] == "cpu"
    assert facts["num_threads"] == facts["rig"]["torch_threads"]
    assert {"torpor", "torch", "python", "processor"} <= set(facts["rig"])
    assert facts["load_average_1min"]["before"] == 0.25
    assert facts["load_average_1min"]["after"] >= 0


def test_only_a_machine_without_load_is_quiet() -> None:
    scene = scene_since(QUIET_LOAD)
    assert scene.was_quiet
    assert not dataclasses.replace(scene, load_before=QUIET_LOAD + 0.01).was_quiet
