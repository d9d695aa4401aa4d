"""The room needs nothing but the standard library and the error tree."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import torpor.cache


def test_the_books_need_no_tensors() -> None:
    modules = [
        f"torpor.cache.{module.name}" for module in pkgutil.iter_modules(torpor.cache.__path__)
    ]
    assert "torpor.cache.manager" in modules
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_only_source()
    )
    loaded = set(done.stdout.split())
    ours = {name for name in loaded if name.split(".")[0] == "torpor"}
    assert ours == {"torpor", "torpor.errors", "torpor.cache", *modules}
    assert not loaded & {"torch", "numpy"}


def _only_source() -> dict[str, str]:
    return {"PYTHONPATH": torpor.__path__[0].rpartition("/")[0]}
