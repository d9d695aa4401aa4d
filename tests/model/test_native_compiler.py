"""The kernels are compiled once, and what is found in the cache is never trusted unseen."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torpor.model.native import compiler
from torpor.model.native.compiler import KernelsUnavailableError, compiled, find_compiler
from torpor.model.native.library import Library

BYTES = b"what a compiler would write, " * 100


@dataclass
class FakeCompiler:
    """A shell script that counts its runs, and copies a file to where the library goes."""

    folder: Path

    @property
    def runs(self) -> int:
        """How often it compiled."""
        log = self.folder / "runs"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def path(self) -> Path:
        """The script."""
        return self.folder / "fake-c++"

    def write(self, then: str = "", version: str = "1.0") -> None:
        """Make the script; `then` is run before it copies."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "product").write_bytes(BYTES)
        self.path.write_text(
            f"""#!/bin/sh
if [ "$1" = --version ]; then echo fake {version}; exit 0; fi
echo run >> {self.folder}/runs
for out; do :; done
{then or ":"}
[ $? -eq 0 ] || exit 1
cp {self.folder}/product "$out"
"""
        )
        self.path.chmod(0o755)


@pytest.fixture
def fake(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """The compiler to use, and an empty cache."""
    made = FakeCompiler(tmp_path / "compiler")
    made.write()
    monkeypatch.setenv("CXX", str(made.path))
    return made


@pytest.fixture
def fresh_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for everything that goes into the name anew each time, as another process would."""
    monkeypatch.setattr(compiler, "_key", compiler._key.__wrapped__)
    monkeypatch.setattr(compiler, "_compiler_key", compiler._compiler_key.__wrapped__)


def entries(cache: Path) -> list[str]:
    """What the cache holds of kernels."""
    return sorted(path.suffix for path in (cache / "kernels").iterdir())


def test_the_second_time_no_compiler_runs(fake: FakeCompiler, cache: Path) -> None:
    first = compiled()
    assert first.parent == cache / "kernels"
    assert first.read_bytes() == BYTES
    assert fake.runs == 1
    assert compiled() == first
    assert fake.runs == 1
    assert entries(cache) == [".digest", ".so"]


DAMAGE: dict[str, Any] = {
    "one bit": lambda library: library.write_bytes(bytes([BYTES[0] ^ 1]) + BYTES[1:]),
    "truncated": lambda library: library.write_bytes(BYTES[:-1]),
    "empty": lambda library: library.write_bytes(b""),
    "longer": lambda library: library.write_bytes(BYTES + b"\0"),
    "no library": lambda library: library.unlink(),
    "no digest": lambda library: library.with_suffix(".digest").unlink(),
    "empty digest": lambda library: library.with_suffix(".digest").write_text(""),
    "digest of nothing": lambda library: library.with_suffix(".digest").write_bytes(b"\xff\xfe"),
    "another digest": lambda library: library.with_suffix(".digest").write_text(
        hashlib.blake2b(b"other", digest_size=16).hexdigest()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_made_again(fake: FakeCompiler, cache: Path, damage: Any) -> None:
    library = compiled()
    damage(library)
    assert compiled() == library
    assert library.read_bytes() == BYTES
    assert fake.runs == 2
    assert compiled() == library
    assert fake.runs == 2
    assert entries(cache) == [".digest", ".so"]


def test_a_damaged_library_is_not_returned_when_it_cannot_be_made_again(fake: FakeCompiler) -> None:
    compiled().write_bytes(b"damaged")
    fake.write("false")
    with pytest.raises(KernelsUnavailableError, match="failed with status 1"):
        compiled()


def test_a_compile_that_is_cut_off_leaves_nothing_that_is_used(
    fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, moved = Path.replace, []

    def power_fails(self: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", power_fails)
        with pytest.raises(KeyboardInterrupt):
            compiled()
    assert entries(cache) == [".digest"]
    assert compiled().read_bytes() == BYTES
    assert fake.runs == 2


def test_without_a_compiler_the_message_says_what_to_install(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailableError) as caught:
        compiled()
    assert str(caught.value) == (
        "no C++ compiler found (g++, clang++, c++); install g++, or set CXX"
    )
    monkeypatch.setenv("CXX", "my-c++")
    with pytest.raises(KernelsUnavailableError, match=r"\(my-c\+\+\); install g\+\+, or set CXX"):
        compiled()
    assert not cache.exists()


@pytest.mark.parametrize("names", [["g++", "clang++", "c++"], ["clang++", "c++"], ["c++"]])
def test_the_first_compiler_on_the_path_is_used(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in names:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler() == (str(tmp_path / names[0]),)


def test_without_a_compiler_what_another_machine_compiled_is_used(
    fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compiled()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled() == library
    library.write_bytes(b"damaged")
    with pytest.raises(KernelsUnavailableError, match="no C\\+\\+ compiler found"):
        compiled()


def test_code_is_not_taken_from_a_folder_that_others_can_write_to(
    fake: FakeCompiler, cache: Path
) -> None:
    folder = compiled().parent
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o775)
    with pytest.raises(KernelsUnavailableError, match="can be written by others; chmod go-w"):
        compiled()
    folder.chmod(0o755)
    assert compiled().parent == folder


def test_a_compiler_may_come_with_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' g++ -O1")
    assert find_compiler() == (str(launcher), "g++", "-O1")
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(KernelsUnavailableError, match=r"CXX is \"'g\+\+\" .*; give a command"):
        find_compiler()


def test_a_compiler_that_fails_is_quoted(fake: FakeCompiler, cache: Path) -> None:
    fake.write("printf 'kernels.cpp:3: wrong\\nline 2\\nline 3\\nline 4\\n' >&2; exit 7")
    with pytest.raises(KernelsUnavailableError) as caught:
        compiled()
    told = str(caught.value)
    assert told.startswith(f"{fake.path} failed with status 7: kernels.cpp:3: wrong / line 2 / ")
    assert "line 3" in told
    assert "line 4" not in told
    assert "g++ from version" in told
    assert entries(cache) == []
    # As after an update of the compiler.
    fake.write()
    assert compiled().read_bytes() == BYTES


def test_what_a_compiler_says_may_be_in_any_encoding(fake: FakeCompiler) -> None:
    fake.write("printf '\\351chec\\n' >&2; exit 1")
    with pytest.raises(KernelsUnavailableError, match=r"status 1: .chec"):
        compiled()


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_cannot_be_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c++"
    path.write_bytes(b"\x7fELF of another machine")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(KernelsUnavailableError, match=r"c\+\+ cannot be run .*; install g\+\+"):
        compiled()


@pytest.mark.parametrize("asked", ["--version", compiler.FLAGS[0]])
def test_a_compiler_that_does_not_end_is_given_up(
    asked: str, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def never_ends(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[1] == asked:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return run(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", never_ends)
    told = f"{fake.path} took more than 300 s"
    with pytest.raises(KernelsUnavailableError, match=re.escape(told)):
        compiled()


@pytest.mark.usefixtures("fake")
def test_a_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/torpor")):
        monkeypatch.setenv("TORPOR_CACHE", str(folder))
        with pytest.raises(KernelsUnavailableError) as caught:
            compiled()
        told = str(caught.value)
        assert told.startswith("the cache folder cannot be used (")
        assert str(folder) in told
        assert told.endswith("; set TORPOR_CACHE to a folder")


@pytest.mark.usefixtures("fake")
def test_without_a_home_folder_the_message_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORPOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(KernelsUnavailableError, match="set TORPOR_CACHE to a folder"):
        compiled()


def test_two_processes_at_once_both_get_the_library(fake: FakeCompiler, cache: Path) -> None:
    # Each waits in its compiler until the other one's runs too.
    both = f"[ $(wc -l < {fake.folder}/runs) -ge 2 ]"
    fake.write(f"i=0; until {both} || [ $i -ge 1000 ]; do sleep 0.01; i=$((i + 1)); done; {both}")
    code = "from torpor.model.native.compiler import compiled; print(compiled())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert fake.runs == 2
    assert {Path(out.strip()) for out, _ in told} == {compiled()}
    assert compiled().read_bytes() == BYTES
    assert fake.runs == 2
    assert entries(cache) == [".digest", ".so"]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which is used instead of them."""
    folder = tmp_path / "csrc"
    shutil.copytree(str(compiler._sources()), folder)
    monkeypatch.setattr(compiler, "_sources", lambda: folder)
    return folder


@pytest.mark.usefixtures("fresh_keys")
def test_what_was_compiled_from_something_else_is_not_used(
    fake: FakeCompiler, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [compiled()]

    def changed() -> None:
        names.append(compiled())
        assert len(set(names)) == len(names)
        assert fake.runs == len(names)

    header = sources / "vectors.h"
    header.write_text(header.read_text() + "\n")
    changed()
    header.rename(sources / "vectors2.h")
    changed()
    (sources / "more.h").write_text("")
    changed()
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    changed()
    fake.write(version="2.0")
    changed()
    monkeypatch.setattr(compiler, "_processor", lambda: "flags: none")
    changed()
    monkeypatch.setattr(compiler.platform, "machine", lambda: "pdp11")
    changed()
    twin = fake.path.with_name("twin-c++")
    shutil.copy(fake.path, twin)
    monkeypatch.setenv("CXX", str(twin))
    changed()
    assert compiled() == names[-1]
    assert fake.runs == len(names)


def test_the_processor_is_part_of_the_name() -> None:
    assert "flags" in compiler._processor() or "Features" in compiler._processor()


def test_every_source_is_packaged_beside_the_code() -> None:
    found = {path.name for path in compiler._sources().iterdir()}
    included = {
        line.split('"')[1]
        for path in compiler._sources().iterdir()
        for line in path.read_text().splitlines()
        if line.startswith('#include "')
    }
    assert "kernels.cpp" in found
    assert included <= found


@pytest.mark.slow
def test_the_sources_compile_and_the_library_loads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        find_compiler()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    library = Library(compiled())
    assert library.team(2) == library.team(2) != library.team(3)

    def not_again(command: list[str]) -> None:
        raise AssertionError(command)

    monkeypatch.setattr(compiler, "_run", not_again)
    assert compiled().parent == cache / "kernels"
