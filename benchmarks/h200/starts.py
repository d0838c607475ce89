"""From the start of a process to an engine that is ready, with the weights in safetensors files."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.h200.work import Skipped, Work
from headrace.bench import startup as bench
from headrace.bench.offline import SHAPES
from headrace.bench.startup_child import READY
from shared.lifecycle import EXIT_OK

ENGINE = ("--dtype=bfloat16", "--max-model-len=8192")
ROOT = Path(__file__).parent.parent.parent


@contextlib.contextmanager
def checkpoint(shape: Path) -> Iterator[Path]:
    """A folder with random weights of a shape that comes with Headrace, which is deleted in the end."""
    if shape.parent != SHAPES:
        raise Skipped("checkpoints are made of the shapes that come with Headrace")
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-", ignore_cleanup_errors=True) as folder:
        # In a process of its own, which leaves nothing on the GPU.
        subprocess.run([sys.executable, "-m", "benchmarks.make_checkpoint", shape.stem, folder], cwd=ROOT, check=True)
        yield Path(folder)


def startup(folder: Path, work: Work, case: str) -> Iterator[dict[str, float]]:
    """``startup_cold`` and ``startup_warm``: seconds until ``LLM()`` has returned, as ``headrace bench startup``.

    Cold, the caches of compiled kernels are empty and the files are not in the page cache; that is measured once.
    """
    if case == "startup_cold":
        yield {case: _start(folder, "cold")}
        return
    for _ in range(work.repeat):
        yield {case: _start(folder, "warm")}


def _start(folder: Path, kind: str) -> float:
    """Seconds to ready of one start; says when it reached its phases."""
    counts = [f"--num-iters-{each}={int(each == kind)}" for each in ("cold", "warmup", "warm")]
    with tempfile.TemporaryDirectory(prefix="headrace-starts-") as results:
        file = Path(results) / "starts.json"
        with contextlib.redirect_stdout(io.StringIO()):
            code = bench.main([str(folder), *ENGINE, *counts, f"--output-json={file}", "--disable-tqdm"])
        if code != EXIT_OK:
            raise RuntimeError(f"headrace bench startup ended with status {code}")
        found = json.loads(file.read_text())
    phases = {phase: times[0] for phase, times in found[f"{kind}_phases"].items()}
    parts = {part: times[0] for part, times in found[f"{kind}_parts"].items()}
    for what, times in (("", phases), (", parts of the worker's start", parts)):
        print(f"   ({kind}{what}: {', '.join(f'{name} {seconds:.2f}' for name, seconds in times.items())})", flush=True)
    return float(phases[READY])
