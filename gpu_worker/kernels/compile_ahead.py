"""Compiles the kernels that a piece of code launches before it runs, many at a time.

A launch compiles its kernel and waits; some sixty of them, and the small C module that Triton 3.6 builds to launch each
kind, take a minute one after another. Compilers run in other processes or without Python's lock, so that threads do.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime import build
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def compiled_ahead(threads: int) -> Iterator[None]:
    """Kernels that are launched inside are compiled and loaded by threads, but not run; all are ready at the end.

    What they would have written is zero, so that indices in it are valid; other operations run as ever. The results of
    what is done inside mean nothing. A kernel that cannot be compiled raises its error when it is launched.

    No other thread may launch kernels meanwhile. Kernels that are interpreted just run.
    """
    with (
        ThreadPoolExecutor(threads, "compile") as pool,
        loaded_one_by_one(),
        triton.AsyncCompileMode(_Loading(pool), ignore_errors=True),
        _nothing_is_launched(),
        _Zeroed(),
    ):
        yield


class _Loading(Executor):
    """Threads that load what they have compiled."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            # Reading this attribute builds the launcher and loads the binary.
            _ = kernel.run
            return kernel

        return self._pool.submit(compile_and_load)


@contextlib.contextmanager
def loaded_one_by_one() -> Iterator[None]:
    """Each module that Triton loads is the caller's own.

    The modules that launch kernels all have one name. Python keeps one object for the name and, when a file is loaded
    again (kernels of like arguments share one), fills this object anew and returns it: what it holds changes with the
    next one that any thread loads, and a kernel would be launched with the arguments of another.
    """
    load, lock = build._load_module_from_path, threading.Lock()

    def load_own(name: str, path: str) -> types.ModuleType:
        with lock:
            own = types.ModuleType(name)
            own.__dict__.update(load(name, path).__dict__)
            return own

    build._load_module_from_path = load_own
    try:
        yield
    finally:
        build._load_module_from_path = load


@contextlib.contextmanager
def _nothing_is_launched() -> Iterator[None]:
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch


class _Zeroed(TorchFunctionMode):
    """New memory is zero."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNINITIALIZED else result


_UNINITIALIZED = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
