"""The flags of ``headrace simulate``: those of ``headrace serve``, and its own."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from headrace.argument_types import above_zero, count, positive
from headrace.bench.plot import plotting_problem
from headrace.simulate.device import GIB, PRESETS
from headrace.simulate.generate import GENERATORS
from shared.config import Settings, parse_with_flags

PROG = "headrace simulate"
DESCRIPTION = """\
Size a server before there is one: the scheduler and the block manager of the engine, on a simulated clock, in front of
devices that only take as long as a model of them says. Give it a trace, or a data set to draw, and the flags that you
would give headrace serve."""
DEFAULT_DEVICE = "h200-llama-8b"


def parse_flags(argv: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    """The settings of ``headrace serve`` and the command's own flags, checked; ends the process like argparse."""
    settings, args = parse_with_flags(
        None,
        argv,
        _add_flags,
        defaults={"device": DEFAULT_DEVICE, "model": ""},
        description=DESCRIPTION,
        prog=PROG,
    )
    if args.num_gpu_blocks is not None:
        settings = dataclasses.replace(settings, num_gpu_blocks_override=args.num_gpu_blocks)
    args.seed = settings.seed
    parser = argparse.ArgumentParser(prog=PROG, usage=argparse.SUPPRESS)
    if (args.trace is None) == (args.dataset_name is None):
        parser.error("give either a TRACE or --dataset-name")
    if args.plot and (problem := plotting_problem(args.plot)):
        parser.error(f"--plot: {problem}")
    return settings, args


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s (TRACE | --dataset-name NAME) [flags]"
    _add_load_flags(parser)
    _add_device_flags(parser)
    result = parser.add_argument_group("result")
    result.add_argument("--output", metavar="FILE.json", help="write the figures, and their course over time")
    result.add_argument("--plot", metavar="FILE.png", help="draw latency percentiles and the engine over time")
    result.add_argument(
        "--sweep",
        type=_sweep,
        metavar="FLAG=V1,V2,…",
        help="simulate once for each value of any one flag and print a line each, for example max-num-seqs=32,64,128",
    )
    result.add_argument("--write-trace", metavar="FILE.jsonl", help="write the requests that were drawn, as a trace")
    result.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="file with the requests: JSON lines with arrival, prompt and output (docs/tuning.md), a Mooncake trace, "
        "or CSV as of Azure's LLM inference traces; .gz too",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--dataset-name", choices=tuple(GENERATORS), help="draw the requests instead of a TRACE")
    load.add_argument(
        "--num-prompts",
        type=positive,
        metavar="N",
        help="requests to draw (default: 1000); of a TRACE, the first N (default: all)",
    )
    load.add_argument(
        "--request-rate",
        type=above_zero,
        default=math.inf,
        metavar="R",
        help="requests/s of a data set (default: all at once)",
    )
    load.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="of the gaps between them; 1: Poisson, below 1: bursts (default: 1)",
    )
    load.add_argument(
        "--speedup",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="times as many requests a second: X 2 halves every gap (default: 1)",
    )
    load.add_argument(
        "--max-concurrency",
        type=positive,
        metavar="N",
        help="requests that clients send at once; the others wait there (default: any number)",
    )
    load.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="max_tokens of requests that name none, which the scheduler plans by (default: what each really takes)",
    )
    _add_shape_flags(load)


def _add_shape_flags(load: argparse._ArgumentGroup) -> None:
    """Lengths of the requests of ``--dataset-name``."""
    load.add_argument(
        "--random-input-len", type=positive, default=1024, metavar="N", help="own tokens of a prompt (default: 1024)"
    )
    load.add_argument(
        "--random-output-len", type=positive, default=128, metavar="N", help="tokens of an output (default: 128)"
    )
    load.add_argument(
        "--random-prefix-len", type=count, default=0, metavar="N", help="tokens that all prompts share (default: 0)"
    )
    load.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths are L*(1-R) to L*(1+R) (default: 0)"
    )
    load.add_argument("--input-len", type=positive, metavar="N", help="mean prompt of sharegpt-like (default: 220)")
    load.add_argument("--output-len", type=positive, metavar="N", help="mean output of sharegpt-like (default: 190)")
    for name, default, what in (
        ("prefix-len", 256, "tokens of a shared prefix"),
        ("suffix-len", 256, "tokens of a prompt behind it"),
        ("num-prefixes", 10, "prefixes, some of them more popular"),
        ("output-len", 128, "tokens of an output"),
    ):
        text = f"{what} (default: {default})"
        load.add_argument(f"--prefix-repetition-{name}", type=positive, default=default, metavar="N", help=text)


def _add_device_flags(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group(
        "device", f"--device takes {', '.join(PRESETS)}, a file of --save-device, or with --fit also cpu and cuda."
    )
    device.add_argument("--fit", metavar="STEP_LOG", help="take the times from the --step-log of a real server")
    device.add_argument("--save-device", metavar="FILE.json", help="write the fitted device")
    device.add_argument(
        "--gpu-memory", type=above_zero, metavar="GIB", help=f"memory of the device, {GIB:,} bytes each"
    )
    device.add_argument(
        "--num-gpu-blocks", type=positive, metavar="N", help="KV blocks; same as --num-gpu-blocks-override"
    )
    device.add_argument(
        "--weights-bytes",
        type=positive,
        metavar="N",
        help="weights of the model (default: those of --model, or of the device)",
    )
    device.add_argument(
        "--kv-bytes-per-token",
        type=positive,
        metavar="N",
        help="keys and values of a token (default: of --model, or of the device)",
    )


def _sweep(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not name.strip("- ") or not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=V1,V2,…")
    return name.strip("- ").replace("_", "-"), found


def sweep_flag(name: str, value: str) -> str:
    """What is added to the command line for one value of a sweep."""
    if value in ("true", "false"):
        return f"--{name}" if value == "true" else f"--no-{name}"
    return f"--{name}={value}"
