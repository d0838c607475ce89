"""Which package may import what, what no package may use, and how long a file and a function may grow."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SERVICES = {"api_gateway", "tokenizer_service", "core_engine", "gpu_worker"}
OURS = SERVICES | {"shared", "headrace"}
MAY_IMPORT = {service: {service, "shared"} for service in SERVICES} | {"shared": {"shared"}, "headrace": OURS}
WORKER_ONLY = {"torch", "triton", "transformers"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
SOCKET_MODULE = pathlib.Path("shared/transport.py")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

PRODUCT = sorted(path.relative_to(ROOT) for package in OURS for path in (ROOT / package).rglob("*.py"))
CHECKED = PRODUCT + sorted(
    path.relative_to(ROOT) for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
)


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import, also of those inside functions and by ``import_module("…")``."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, path.parts[0] if node.level else (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            yield from (
                (node.lineno, argument.value.partition(".")[0])
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_every_package_is_looked_at() -> None:
    assert {path.parts[0] for path in PRODUCT} == OURS


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_packages_import_what_they_may(path: pathlib.Path) -> None:
    allowed = MAY_IMPORT[path.parts[0]]
    assert [(line, name) for line, name in imports(path) if name in OURS - allowed] == []


@pytest.mark.parametrize("path", [p for p in PRODUCT if p.parts[0] != "gpu_worker"], ids=str)
def test_only_the_worker_imports_torch(path: pathlib.Path) -> None:
    assert [(line, name) for line, name in imports(path) if name in WORKER_ONLY] == []


@pytest.mark.parametrize("path", [p for p in PRODUCT if p != SOCKET_MODULE], ids=str)
def test_only_the_transport_imports_zmq(path: pathlib.Path) -> None:
    assert [line for line, name in imports(path) if name == "zmq"] == []


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_nothing_that_runs_code_from_data(path: pathlib.Path) -> None:
    """Pickle and its kin, ``eval`` and ``exec`` turned bytes from a socket or a file into code in other engines."""
    assert [(line, name) for line, name in imports(path) if name in UNSAFE_MODULES] == []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            bare = isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS
            method = isinstance(node.func, ast.Attribute) and node.func.attr in UNSAFE_METHODS
            assert not bare, f"{path}:{node.lineno} calls {_name(node.func)}"
            assert not method, f"{path}:{node.lineno} calls {_name(node.func)}"


@pytest.mark.parametrize("path", CHECKED, ids=str)
def test_files_and_functions_stay_short(path: pathlib.Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_no_init_files_under_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
