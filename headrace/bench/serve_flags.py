"""The flags of ``headrace bench serve``, which are vLLM's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from headrace.argument_types import above_zero, positive
from headrace.bench.datasets import add_dataset_flags
from headrace.bench.metrics import LATENCIES
from headrace.bench.plot import plotting_problem
from shared.config import FlagParser

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backends and their default endpoints."""
OBJECTIVES = ("ttft", "tpot", "e2el")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def parse_flags(prog: str, argv: Sequence[str]) -> argparse.Namespace:
    """The flags' values, checked; ends the process with status 2 and a line of words like argparse.

    ``goodput`` is a dict of ms by name, ``header`` and ``metadata`` are dicts, ``percentile_metrics`` and
    ``metric_percentiles`` lists, ``endpoint`` and ``base_url`` are filled in.
    """
    parser = FlagParser(prog=prog, description="Load a running server and measure what its clients would see.")
    _add_server_flags(parser)
    add_dataset_flags(parser)
    _add_traffic_flags(parser)
    _add_sampling_flags(parser)
    _add_result_flags(parser)
    args = parser.parse_args(list(argv))
    if args.base_url is None:
        host = f"[{args.host}]" if ":" in args.host else args.host
        args.base_url = f"http://{host}:{args.port}"
    args.base_url = args.base_url.rstrip("/")
    args.endpoint = args.endpoint or ENDPOINTS[args.backend]
    args.header = dict(args.header or ())
    args.metadata = dict(args.metadata or ())
    args.goodput = dict(args.goodput or ())
    if args.plot and (problem := plotting_problem(args.plot)):
        parser.error(f"--plot: {problem}")
    return args


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="API to use (default: openai)")
    server.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    server.add_argument(
        "--header",
        type=_pair,
        nargs="*",
        action="extend",
        metavar="KEY=VALUE",
        help="more HTTP headers (Authorization: by default from HEADRACE_API_KEY or OPENAI_API_KEY)",
    )
    server.add_argument("--model", help="name of the model (default: the server's first)")
    server.add_argument("--served-model-name", metavar="NAME", help="its name in requests (default: --model)")
    server.add_argument("--tokenizer", metavar="MODEL", help="whose vocabulary makes the prompts (default: --model)")
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="repeat a first request until it succeeds, this long at most (default: 0, no check)",
    )


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of prompts and arrivals; take another for each run, or a prefix cache knows the prompts (default: 0)",
    )
    traffic.add_argument(
        "--request-rate", type=above_zero, default=math.inf, metavar="R", help="requests/s (default: inf, all at once)"
    )
    traffic.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="shape of the gamma distributed gaps; 1: Poisson, below: bursts, above: more even (default: 1)",
    )
    traffic.add_argument("--max-concurrency", type=positive, metavar="N", help="requests at once (default: any)")
    traffic.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones (default: 0)"
    )
    traffic.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("request fields (default: the server's)")
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on to the full length; always so for random and named workloads"
    )
    sampling.add_argument("--logprobs", type=int, metavar="N", help="ask for the N likeliest tokens of each position")
    for name in SAMPLING:
        flag = "--" + name.replace("_", "-")
        sampling.add_argument(flag, type=int if name == "top_k" else float, metavar="X")
    sampling.add_argument("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request")


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    result = parser.add_argument_group("result")
    result.add_argument(
        "--percentile-metrics",
        type=_names,
        default=["ttft", "tpot", "itl"],
        metavar="NAMES",
        help="latencies to print, of ttft,tpot,itl,e2el (default: ttft,tpot,itl)",
    )
    result.add_argument(
        "--metric-percentiles", type=_percentiles, default=[99.0], metavar="PS", help="such as 50,90,99 (default: 99)"
    )
    result.add_argument(
        "--goodput",
        type=_objective,
        nargs="+",
        action="extend",
        metavar="NAME:MS",
        help="count requests with ttft, tpot and e2el of at most so many ms: --goodput ttft:200 tpot:50",
    )
    result.add_argument("--save-result", action="store_true", help="write a JSON file with vLLM's keys")
    result.add_argument("--append-result", action="store_true", help="add the JSON as a line of the file")
    result.add_argument("--save-detailed", action="store_true", help="with the figures and the text of each request")
    result.add_argument("--result-dir", metavar="DIR", help="(default: the current folder)")
    result.add_argument("--result-filename", metavar="FILE", help="(default: made of backend, rate, model and date)")
    result.add_argument("--label", help="start of the file's name (default: the backend)")
    result.add_argument(
        "--metadata", type=_pair, nargs="*", action="extend", metavar="KEY=VALUE", help="more keys of the JSON"
    )
    result.add_argument(
        "--plot", metavar="FILE.png", help="draw latency percentiles, and tokens and running requests over time"
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if name not in OBJECTIVES or not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MS with a name of {', '.join(OBJECTIVES)}")
    return name, value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in LATENCIES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(LATENCIES)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers in 0..100")
    return values


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
