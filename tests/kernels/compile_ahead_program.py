"""Run by test_compile_ahead.py without the interpreter: kernels compiled for a GPU that is not there.

Prints a JSON object a line for each thing that it did.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gpu_worker.kernels.compile_ahead import compiled_ahead


def say(**what: Any) -> None:
    """In one write, since threads speak beside each other."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        say(launched=self.name)


class Utils:
    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        say(loaded=name, thread=threading.current_thread().name.rpartition("_")[0])
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Driver:
    launcher_cls = Launcher
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def double(x_ptr, y_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets))


@triton.jit
def broken(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), no_such_name)  # type: ignore[name-defined]  # noqa: F821


def main() -> None:
    driver.set_active(Driver())
    x = torch.ones(16, dtype=torch.int32)
    with compiled_ahead(2):
        y = torch.empty(16, dtype=torch.int32)
        double[(1,)](x, y, 16)
        double[(1,)](x, y, 8)
        broken[(1,)](x, 16)
        rows = torch.eye(4).index_select(0, torch.empty_like(y))
        say(zeros=[y.tolist(), x.new_empty(2).tolist()], first_row=rows[:, 0].sum().item())
    say(ready=True)
    double[(1,)](x, x, 16)
    try:
        broken[(1,)](x, 16)
    except Exception as error:
        say(error=type(error).__name__)


if __name__ == "__main__":
    main()
