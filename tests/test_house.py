"""The rules of the house: who imports whom, how big things are, what the public face is."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import torpor

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "torpor"

ROOM_IMPORTS: dict[str, set[str]] = {
    "sleep": set(),
    "cache": set(),
    "model": {"sleep"},
    "engine": {"sleep", "cache", "model"},
    "check": {"sleep", "cache", "model", "engine"},
    "serve": {"sleep", "cache", "model", "engine", "check"},
}
"""From the ground up: the rooms that each may import, beside itself."""

ROOMS = tuple(ROOM_IMPORTS)

BESIDE = {"errors", "params", "outputs"}
"""Modules beside the rooms, open to all; among themselves they may import only errors."""

ROOM_PACKAGES = {
    "sleep": {"torch", "numpy", "xxhash"},
    "cache": set(),
    "model": {"torch", "numpy", "safetensors", "tokenizers", "filelock", "xxhash"},
    "engine": {"torch", "numpy", "tokenizers", "jinja2"},
    "check": {"torch", "numpy", "psutil"},
    "serve": {"torch", "typer", "click", "rich", "psutil"},
}
"""Packages that a room may import while it is itself imported."""

ROOM_PACKAGES_LATER = {"model": {"gguf"}, "engine": {"llguidance", "sentencepiece", "tqdm"}}
"""Packages that a room may import only inside a function."""

PUBLIC = [
    "ArgumentError",
    "AsleepError",
    "AsyncLLM",
    "CacheInUseError",
    "CheckpointError",
    "CompletionOutput",
    "DoubleInitError",
    "FaultedError",
    "ForeignWriteError",
    "GenerationError",
    "HostCopyError",
    "LLM",
    "OutOfMemoryError",
    "OwnershipClass",
    "OwnershipError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Sleeper",
    "StateError",
    "StepError",
    "StructuredOutputsParams",
    "TorporError",
    "VerificationError",
    "WeightsError",
    "WeightsIncompleteError",
    "__version__",
    "building",
]

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
"""The docstring does not count."""
MAX_IMPORT_S = 0.1

MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "ContextVar", "count"),
}
MUTATORS = {
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear"),
    *("remove", "discard", "appendleft", "popleft", "sort", "reverse"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def room_of(path: Path) -> str:
    """The room of a source file, or the module's own name when it lies beside the rooms."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, path: Path, *, typing: bool = True) -> Iterator[tuple[str, bool, int]]:
    """Yield (module, whether it is imported inside a function, line) for every import.

    ``typing=False`` leaves out what only a type checker sees.
    """
    skipped = set() if typing else nodes_inside(tree, is_typing_block)
    inner = nodes_inside(tree, lambda node: isinstance(node, Function))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = dotted_name(path).split(".")
                keep = len(package) - node.level + (path.name == "__init__.py")
                base = ".".join([*package[:keep], *filter(None, [base])])
            for alias in node.names:
                yield f"{base}.{alias.name}", id(node) in inner, node.lineno


def nodes_inside(tree: ast.AST, is_outer: Callable[[ast.AST], bool]) -> set[int]:
    """Identities of the nodes that lie inside a node for which ``is_outer`` holds."""
    outers = (node for node in ast.walk(tree) if is_outer(node))
    return {id(node) for outer in outers for node in ast.walk(outer)}


def is_typing_block(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def may_import(room: str, target: str) -> bool:
    """Whether code in ``room`` may import ``target``, a room or a module beside the rooms."""
    if room in ROOMS:
        return target in BESIDE or target == room or target in ROOM_IMPORTS[room]
    if room in BESIDE:
        return target in {room, "errors"}
    return room in {"__init__", "__main__"}


def upward_imports(path: Path, tree: ast.Module) -> list[str]:
    found = []
    for module, _, line in imports(tree, path):
        parts = module.split(".")
        if parts[0] == "torpor" and not may_import(room_of(path), parts[1]):
            found.append(f"{path}:{line}: {room_of(path)} may not import {module}")
    return found


def stray_packages(path: Path, tree: ast.Module) -> list[str]:
    room = room_of(path)
    at_import = ROOM_PACKAGES.get(room, set())
    later = at_import | ROOM_PACKAGES_LATER.get(room, set())
    found = []
    for module, inside, line in imports(tree, path, typing=False):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top == "torpor":
            continue
        if top not in (later if inside else at_import):
            found.append(f"{path}:{line}: {room} may not import {module} here")
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def code_lines(function: Function) -> int:
    """Lines from ``def`` to the end, less the docstring: a full contract is no complexity."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def module_level_names(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield (name, value, line) for every assignment at module level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                assert node.value is not None
                yield target.id, node.value, node.lineno


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in MUTABLE_CALLS
    kinds = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, kinds)


def mutated_names(tree: ast.AST) -> set[str]:
    """Names whose items are assigned or deleted, or on which a mutating method is called."""
    found = set()
    for node in ast.walk(tree):
        owner: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value if node.func.attr in MUTATORS else None
        if isinstance(owner, ast.Name):
            found.add(owner.id)
    return found


def mutable_state(path: Path, tree: ast.Module) -> list[str]:
    found = [
        f"{path}:{node.lineno}: global statement"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    mutated = mutated_names(tree)
    for name, value, line in module_level_names(tree):
        is_constant = name.lstrip("_").isupper() or name.startswith("__")
        if is_mutable(value) and (name in mutated or not is_constant):
            found.append(f"{path}:{line}: {name} is mutable state at module level")
    return found


def in_fresh_python(code: str) -> str:
    """What ``code`` prints in a new interpreter that sees only the sources."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(statement: str, names: set[str]) -> set[str]:
    """Which of ``names`` are loaded after ``statement`` ran in a new interpreter."""
    return set(in_fresh_python(f"{statement}\nimport sys\nprint(*sys.modules)").split()) & names


def test_rooms_import_only_downward() -> None:
    assert [fault for path in MODULES for fault in upward_imports(path, parse(path))] == []


def test_an_upward_import_is_noticed() -> None:
    path = PACKAGE / "sleep" / "arena.py"
    for line in (
        "from torpor.model import llama",
        "from torpor import engine",
        "import torpor.serve.cli",
        "from ..check import doctor",
        "def late():\n    from torpor.engine.llm import LLM",
    ):
        assert len(upward_imports(path, ast.parse(line))) == 1, line
    fine = "from torpor.errors import ArenaError\nfrom .device import Device\nimport os"
    assert upward_imports(path, ast.parse(fine)) == []


def test_rooms_import_only_packages_they_use() -> None:
    assert [fault for path in MODULES for fault in stray_packages(path, parse(path))] == []


def test_a_stray_package_is_noticed() -> None:
    early = ast.parse("import gguf")
    late = ast.parse("def read():\n    import gguf")
    assert len(stray_packages(PACKAGE / "model" / "reader.py", early)) == 1
    assert stray_packages(PACKAGE / "model" / "reader.py", late) == []
    assert len(stray_packages(PACKAGE / "sleep" / "arena.py", late)) == 1


def test_modules_and_functions_are_small() -> None:
    faults = []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > MAX_MODULE_LINES:
            faults.append(f"{path}: {lines} lines, at most {MAX_MODULE_LINES}")
        for function in functions(ast.parse(text)):
            if (lines := code_lines(function)) > MAX_FUNCTION_LINES:
                faults.append(f"{path}:{function.lineno}: {function.name} has {lines} lines")
    assert faults == []


def test_no_module_keeps_mutable_state() -> None:
    assert [fault for path in MODULES for fault in mutable_state(path, parse(path))] == []


def test_mutable_state_is_noticed() -> None:
    path = PACKAGE / "sleep" / "arena.py"
    for code in (
        "live = []",
        "arenas: dict[int, str] = {}",
        "import weakref\n_seen = weakref.WeakSet()",
        "CACHE = {}\ndef put(k, v):\n    CACHE[k] = v",
        "TABLE = []\ndef put(v):\n    TABLE.append(v)",
        "n = 0\ndef more():\n    global n",
    ):
        assert len(mutable_state(path, ast.parse(code))) == 1, code
    assert mutable_state(path, ast.parse("TAGS = {'weights': 1}\n__all__ = ['a']")) == []


def test_public_names_are_the_expected_ones() -> None:
    assert sorted(torpor.__all__) == PUBLIC
    assert len(PUBLIC) <= 30
    assert set(PUBLIC) <= set(dir(torpor))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_loads(name: str) -> None:
    assert getattr(torpor, name) is getattr(torpor, name)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Slepper'"):
        _ = torpor.Slepper


def test_version_has_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", torpor.__version__)


@pytest.mark.parametrize("name", [dotted_name(path) for path in MODULES])
def test_module_imports(name: str) -> None:
    if name != "torpor.__main__":
        import_module(name)


def test_every_module_is_in_a_known_room() -> None:
    known = {*ROOMS, *BESIDE, "__init__", "__main__"}
    assert {room_of(path) for path in MODULES} <= known
    found = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert found <= known


def test_import_torpor_is_quick_and_light() -> None:
    heavy = {"torch", "numpy", "typer", "rich", "tokenizers", "safetensors", "jinja2", "gguf"}
    assert imported_by("import torpor", heavy) == set()
    timed = "import time; t = time.perf_counter(); import torpor; print(time.perf_counter() - t)"
    assert min(float(in_fresh_python(timed)) for _ in range(5)) < MAX_IMPORT_S


def test_errors_load_without_torch() -> None:
    assert imported_by("import torpor; torpor.AsleepError", {"torch", "numpy"}) == set()


def test_sleep_stands_alone() -> None:
    modules = [dotted_name(path) for path in MODULES if room_of(path) == "sleep"]
    foreign = {"typer", "rich", "gguf", "tokenizers", "safetensors", "jinja2", "transformers"}
    rooms = {f"torpor.{room}" for room in (*ROOMS[1:], "params", "outputs")}
    assert imported_by(f"import {', '.join(modules)}", foreign | rooms) == set()


def test_no_open_ends_or_machine_paths() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|(?<![\w.~-])/(home|root|work|Users)/\w")
    sources = [*MODULES, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Makefile"]
    faults = [
        f"{path}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert faults == []


def test_constraints_are_exact_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", pin)] == []
    assert "torch==2.13.0" in pins
    assert pins == sorted(pins, key=lambda pin: pin.partition("==")[0])
