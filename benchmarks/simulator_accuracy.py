"""How close `headrace simulate` comes to a real server: fitted to the step log of one load, compared under two others.

    python -m benchmarks.simulator_accuracy [--model demo] [--scale 1] [--threads 2] [--out accuracy.json]

Starts `headrace serve MODEL --device cpu` with a step log and sends three loads to it, one after another, with
`headrace bench serve`. The device is fitted to the steps of the first. All three are then simulated with the arrivals
and lengths that the client noted, and throughput, mean TTFT and mean TPOT are set beside what it measured. The last
column is a simulation with a device that is fitted to the steps of that load itself: where it agrees and the other does
not, the machine was faster or slower under one load than under the other. The canary, ten million additions in Python
before and after each load, tells that too. About two minutes at --scale 1, which multiplies the number of requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.simulate.device import Device
from headrace.simulate.figures import Figures
from headrace.simulate.main import prepare, simulate
from headrace.simulate.trace import TraceRequest, write_trace

START_S = 120.0


class Load(NamedTuple):
    """Random prompts."""

    name: str
    num_prompts: int
    rate: str
    input_len: int
    output_len: int
    spread: float
    """Lengths are uniform within this share of the means around them."""
    burstiness: float


LOADS = (
    Load("fitted", 60, "1.5", 200, 48, 0.9, 0.4),
    Load("long prompts", 36, "0.6", 384, 24, 0.5, 1.0),
    Load("all at once", 64, "inf", 64, 80, 0.5, 1.0),
)
"""What is fitted to has short and long prompts and few and many rows at once, so that each cost of a step shows."""


def canary() -> float:
    """Seconds of a fixed piece of work."""
    began = time.perf_counter()
    total = 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - began


@contextlib.contextmanager
def server(args: argparse.Namespace, folder: Path) -> Iterator[int]:
    """A server that is ready; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    flags = ["--device", "cpu", "--port", str(port), "--step-log", str(folder / "steps.jsonl")]
    flags += ["--threads", str(args.threads)] if args.threads else []
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "headrace", "serve", args.model, *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "server.log").read_text()[-2000:])
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def measure(load: Load, port: int, args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """What the client of a load saw."""
    name = f"load{seed}.json"
    command = [
        sys.executable, "-m", "headrace", "bench", "serve", "--port", str(port), "--dataset-name", "random",
        "--num-prompts", str(max(round(load.num_prompts * args.scale), 4)), "--request-rate", load.rate,
        "--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len),
        "--random-range-ratio", str(load.spread), "--burstiness", str(load.burstiness),
        "--seed", str(seed), "--num-warmups", "2", "--save-result", "--save-detailed",
        "--result-dir", str(folder), "--result-filename", name, "--disable-tqdm",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((folder / name).read_text())
    return result


def trace_of(result: dict[str, Any], path: Path) -> None:
    """Write the requests of a load as a trace."""
    columns = zip(result["start_times"], result["input_lens"], result["output_lens"], strict=True)
    write_trace(
        str(path), [TraceRequest(arrival_s=start, prompt=prompt, output=output) for start, prompt, output in columns]
    )


def simulated(trace: Path, steps: Path) -> tuple[Figures, Device]:
    """The trace on a device that is fitted to a step log."""
    flags = ["--device", "cpu", "--fit", str(steps), "--num-gpu-blocks", "2900", "--disable-tqdm"]
    plan = prepare([str(trace), *flags])
    return simulate(plan), plan.device


def figures_of(figures: Figures) -> dict[str, float]:
    found = figures.latencies
    return {
        "output tok/s": figures.per_s(figures.output_tokens),
        "mean TTFT ms": found["ttft"].mean,
        "P99 TTFT ms": found["ttft"].percentile(99),
        "mean TPOT ms": found["tpot"].mean,
    }


def run_loads(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """What was measured; leaves a trace and a step log of each load in the folder."""
    found = []
    with server(args, folder) as port:
        for number, load in enumerate(LOADS):
            size, before = (folder / "steps.jsonl").stat().st_size, canary()
            result = measure(load, port, args, folder, number)
            trace_of(result, folder / f"trace{number}.jsonl")
            steps = (folder / "steps.jsonl").read_bytes()[size:]
            (folder / f"steps{number}.jsonl").write_bytes(steps)
            measured = {
                "output tok/s": result["output_throughput"],
                "mean TTFT ms": result["mean_ttft_ms"],
                "P99 TTFT ms": result["p99_ttft_ms"],
                "mean TPOT ms": result["mean_tpot_ms"],
            }
            found.append({"load": load._asdict(), "canary_s": [before, canary()], "measured": measured})
    return found


def report(rows: list[dict[str, Any]], folder: Path) -> None:
    """Simulate each load, print and add what came out."""
    for number, row in enumerate(rows):
        trace = folder / f"trace{number}.jsonl"
        figures, device = simulated(trace, folder / "steps0.jsonl")
        own, _ = simulated(trace, folder / f"steps{number}.jsonl")
        if number == 0:
            print(f"{device.source}; gap {1e3 * device.gap_s:.2f} ms, latency {1e3 * device.latency_s:.2f} ms")
            print("  " + ", ".join(f"{name} {value:.3g}" for name, value in device.costs._asdict().items()))
        row["simulated"], row["own_steps"] = figures_of(figures), figures_of(own)
        load, (before, after) = Load(**row["load"]), row["canary_s"]
        print(
            f"{load.name}: {load.num_prompts} x ({load.input_len} in, {load.output_len} out) at {load.rate}/s; "
            f"canary {before:.2f} s before, {after:.2f} s after"
        )
        for name, real in row["measured"].items():
            made, by_own = row["simulated"][name], row["own_steps"][name]
            print(
                f"  {name:<14} measured {real:9.1f}  simulated {made:9.1f} {made / real - 1:+5.0%}  "
                f"by its own steps {by_own:9.1f} {by_own / real - 1:+5.0%}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, help="of the worker")
    parser.add_argument("--out", help="write the table as JSON")
    parser.add_argument("--keep", metavar="DIR", help="folder for logs and traces (default: a temporary one)")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        (folder / "steps.jsonl").unlink(missing_ok=True)
        rows = run_loads(args, folder)
        print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        report(rows, folder)
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
