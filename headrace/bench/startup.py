"""``headrace bench startup``: how long a start takes, from the process to the first token, phase by phase."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_worker.start_parts import EVENT as PART
from headrace.argument_types import at_least
from headrace.bench import offline
from headrace.bench.startup_child import FIRST_TOKEN, PROCESS_UP, READY, STOPPED
from headrace.client import RequestFailed, base_url, readiness, stream_completion
from headrace.launcher import claim_port
from headrace.local_server import LOOPBACK
from headrace.supervisor import describe_exit, python_argv
from shared.config import ENV_PREFIX, Settings
from shared.errors import StartupError
from shared.lifecycle import PARENT_VARIABLE
from shared.model_source import resolve_model

LOADING, LOADED = "worker_up", "model_loaded"
PHASES = {
    PROCESS_UP: "the modules of the first process are imported; with --serve: the API answers",
    LOADING: "the worker runs and begins to read the model",
    LOADED: "the model is loaded and the KV cache allocated",
    READY: "LLM() has returned; with --serve: /ready says yes",
    FIRST_TOKEN: "the first token of the first request is there",
    STOPPED: "all processes have ended",
}
LOG_EVENTS = {"reading the model's configuration": LOADING, "the model is ready": LOADED}
"""The worker's log lines that begin and end its loading."""
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where compiled kernels are kept from one start to the next."""
PROBE_S = 0.02
"""Between two questions whether a server is ready: how exactly its phases are known."""
FORMULAS = """\
time of a phase = from the start of the process until the phase is reached
startup time    = the time of 'ready'
time of a part  = what the worker spends on it; weights are read, and kernels compiled, beside other parts
cold            = the caches of compiled kernels are empty, and the model's files are dropped from the page cache
warm            = both are as the starts before left them"""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds."""

    phases: dict[str, float]
    """When it reached them, of ``PHASES``."""
    parts: dict[str, float]
    """How long parts of the worker's start took, of ``gpu_worker.start_parts``."""


def main(argv: Sequence[str]) -> int:
    """Parse, measure, print and write; returns an exit code. Flags and JSON keys are vLLM's where it has them."""
    return offline.run(
        "startup",
        argv,
        _add_flags,
        measure,
        description="Measure the time from the start of a process to the first token: of an engine without HTTP, or "
        "of headrace serve.",
    )


def measure(settings: Settings, options: argparse.Namespace) -> Mapping[str, Any]:
    """Start and stop the engine cold and warm and print the figures; returns them, times in seconds."""
    shape = offline.shape_of(settings)
    shape.check_length(options.input_len + 1, "--input-len + 1")
    if options.serve and not shape.has_tokenizer:
        raise offline.BenchError("--serve needs a tokenizer, which the model does not have; give one with --tokenizer")
    ids = np.random.default_rng(settings.seed).integers(shape.config.vocab_size, size=options.input_len).tolist()
    asked = dataclasses.replace(settings, log_level="info", log_format="json", config=None)

    # The settings are passed on; those in the environment are among them.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}

    def start(variables: Mapping[str, str]) -> Start:
        environ = {**inherited, PARENT_VARIABLE: str(os.getpid()), "TQDM_DISABLE": "1", **variables}
        if options.serve:
            return start_server(asked, ids, environ)
        return start_engine(asked, ids, environ, tokenizer=offline.makes_text(shape, options))

    cold: list[Start] = []
    warm: list[Start] = []
    for _ in offline.progress(range(options.num_iters_cold), "Cold startup iterations", options):
        with empty_caches() as variables:
            drop_from_page_cache(model_files(settings))
            cold.append(start(variables))
    for _ in offline.progress(range(options.num_iters_warmup), "Warmup iterations", options):
        start({})
    for _ in offline.progress(range(options.num_iters_warm), "Warm startup iterations", options):
        warm.append(start({}))
    figures = {**_summary("cold", cold), **_summary("warm", warm)}
    print(_as_text({"cold": cold, "warm": warm}))
    return figures


class Timeline:
    """When a start reached its phases, in seconds since this object was made."""

    def __init__(self) -> None:
        self.reached: dict[str, float] = {}
        self.parts: dict[str, float] = {}
        self.reason = ""
        """What went wrong, in the words of the process that said so last."""
        self._began = time.monotonic()

    def reach(self, phase: str) -> None:
        """Now, unless it was reached before."""
        self.reached.setdefault(phase, time.monotonic() - self._began)

    def follow(self, lines: Iterable[str]) -> None:
        """Read what the processes say until they close their output; warnings go to standard error."""
        for line in lines:
            said = _parsed(line)
            phase = said.get("phase") or LOG_EVENTS.get(said.get("event", ""))
            if phase is not None:
                self.reach(phase)
            elif said.get("event") == PART:
                self.parts[said["part"]] = said["seconds"]
            elif said.get("level") in ("warning", "error") or not said:
                is_of_service = "service" in said and "event" in said
                print(f"{said['service']}: {said['event']}" if is_of_service else line.rstrip(), file=sys.stderr)
            if said.get("level") == "error":
                self.reason = said["event"]
            self.reason = said.get("reason", self.reason)

    def result(self, code: int) -> Start:
        """What was reached; ``code``: the exit code of the process.

        Raises:
            StartupError: it failed.
        """
        if code != 0 or FIRST_TOKEN not in self.reached:
            raise StartupError(self.reason or f"what was to be measured {describe_exit(code)}")
        return Start(self.reached, self.parts)


def start_engine(settings: Settings, prompt: list[int], environ: Mapping[str, str], *, tokenizer: bool) -> Start:
    """Start an ``LLM`` in a process of its own, ask for one token and stop it.

    Raises:
        StartupError: in the words of the process that failed.
    """
    task = {"settings": offline.changed(settings), "skip_tokenizer_init": not tokenizer, "prompt": prompt}
    timeline = Timeline()
    with _piped(python_argv("headrace.bench.startup_child", json.dumps(task)), environ) as child:
        assert child.stdout is not None
        timeline.follow(child.stdout)
    return timeline.result(child.returncode)


def start_server(settings: Settings, prompt: list[int], environ: Mapping[str, str]) -> Start:
    """Start ``headrace serve``, ask for one token over HTTP and stop it.

    Raises:
        StartupError: in the words of the process that failed.
    """
    settings = dataclasses.replace(settings, host=LOOPBACK, port=claim_port(LOOPBACK, 0), api_key=[])
    url = base_url(settings.host, settings.port)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    timeline = Timeline()
    with _piped(python_argv("headrace", "serve", *settings.to_argv(None)), environ) as server:
        reader = threading.Thread(target=timeline.follow, args=(server.stdout,), daemon=True)
        reader.start()
        try:
            while server.poll() is None and READY not in timeline.reached:
                answer = readiness(url)
                if answer.answered:
                    timeline.reach(PROCESS_UP)
                if answer.ready:
                    timeline.reach(READY)
                time.sleep(PROBE_S)
            if server.returncode is None:
                for _ in stream_completion(url, body):
                    timeline.reach(FIRST_TOKEN)
        except RequestFailed as error:
            timeline.reason = str(error)
        finally:
            server.terminate()
            server.wait()
            timeline.reach(STOPPED)
        reader.join()
    return timeline.result(server.returncode)


def _piped(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Variables that point the caches of compiled kernels to empty folders, which are deleted in the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-cold-", ignore_cleanup_errors=True) as folder:
        yield {name: os.path.join(folder, name.lower()) for name in CACHE_VARIABLES}


def model_files(settings: Settings) -> list[Path]:
    """The files that a start reads of the model."""
    path = resolve_model(settings.model, settings.revision).path
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Let the kernel forget the contents of ``files``, so that they are read from the disk again."""
    for file in files:
        with file.open("rb") as opened:
            # What is not on the disk yet stays.
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    some = at_least(0)
    parser.add_argument("--serve", action="store_true", help="start headrace serve and ask it over HTTP")
    parser.add_argument("--num-iters-cold", type=some, default=3, help="cold starts (default: 3)")
    parser.add_argument(
        "--num-iters-warmup", type=some, default=1, help="starts before the warm ones, not counted (default: 1)"
    )
    parser.add_argument("--num-iters-warm", type=some, default=3, help="warm starts (default: 3)")
    parser.add_argument("--input-len", type=at_least(1), default=32, help="tokens of the first prompt (default: 32)")


def _summary(kind: str, starts: Sequence[Start]) -> dict[str, Any]:
    """vLLM's keys for the startup time, and the times of each phase and part."""
    if not starts:
        return {}
    times = [start.phases[READY] for start in starts]
    return {
        f"avg_{kind}_startup_time": float(np.mean(times)),
        f"{kind}_startup_times": times,
        f"{kind}_startup_percentiles": offline.percentiles(times),
        f"avg_{kind}_first_token_time": float(np.mean([start.phases[FIRST_TOKEN] for start in starts])),
        f"{kind}_phases": _columns(PHASES, [start.phases for start in starts]),
        f"{kind}_parts": _columns(starts[0].parts, [start.parts for start in starts]),
    }


def _columns(names: Iterable[str], rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows if name in row] for name in names}


def _as_text(starts: Mapping[str, Sequence[Start]]) -> str:
    lines = []
    for kind, found in starts.items():
        if not found:
            continue
        times = [start.phases[READY] for start in found]
        lines += [f"{kind.upper()} STARTUP", f"Avg startup time: {np.mean(times):.2f} seconds"]
        lines += [f"  {name}% percentile: {value:.2f} seconds" for name, value in offline.percentiles(times).items()]
        for phase, reached in _columns(PHASES, [start.phases for start in found]).items():
            if reached:
                lines.append(f"  {phase:<13} {np.mean(reached):8.2f} s   {PHASES[phase]}")
        lines.append("Parts of the worker's start")
        for part, spent in _columns(found[0].parts, [start.parts for start in found]).items():
            lines.append(f"  {part:<14}{np.mean(spent):8.2f} s")
        lines.append("")
    return "\n".join([*lines, FORMULAS])
