"""``headrace bench serve``: send a load to a running server and report what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import aiohttp
import uvloop
from multidict import CIMultiDict
from tqdm import tqdm

from headrace.bench.datasets import EOS_IGNORED, SampleRequest, as_texts, load_dataset
from headrace.bench.load import arrival_times, run_load
from headrace.bench.metrics import Metrics, RequestRecord, compute_metrics, errors_by_kind
from headrace.bench.report import formulas, serving_block, serving_result
from headrace.bench.requests import Client, Target
from headrace.bench.results import details, save_result
from headrace.bench.serve_flags import SAMPLING, parse_flags
from headrace.bench.tokenizer import open_tokenizer
from headrace.bench.workloads import WORKLOADS
from headrace.launcher import API_KEY_VARIABLE
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK

PROG = "headrace bench serve"
RETRY_S = 1.0
MOST_ERRORS = 10
BUSY_SHARE = 0.8
BUSY_FROM_S = 2.0
"""A client that computes for more of the time than this, in a run longer than this, may delay what it measures."""
LIMITS = aiohttp.ClientTimeout(total=6 * 60 * 60)


class Outcome(NamedTuple):
    """What a run gave."""

    records: list[RequestRecord]
    duration_s: float
    without_usage: int
    """Successful responses without usage."""
    busy_share: float
    """CPU time of this process by wall-clock time."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Returns an exit code: 1 when no request succeeded."""
    args = parse_flags(PROG, argv)
    _allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_bench(args))
    except StartupError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except ServerProblem as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class ServerProblem(Exception):
    """The server cannot be measured; says why."""


async def _bench(args: argparse.Namespace) -> int:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=300)
    async with aiohttp.ClientSession(connector=connector, headers=_headers(args), timeout=LIMITS) as session:
        model, served_name = await _model_names(args, session)
        tokenizer_id = args.tokenizer or model
        samples = _samples(args, tokenizer_id)
        client = Client(session, _target(args, served_name))
        await _warm_up(args, client, samples)
        outcome = await _measure(args, client, samples)
    metrics = compute_metrics(outcome.records, outcome.duration_s, args.goodput)
    _print_report(args, metrics, outcome)
    if args.save_result or args.append_result:
        result = serving_result(metrics, sorted({*args.metric_percentiles, 99.0}))
        if args.save_detailed:
            result |= details(outcome.records)
        save_result(args, model, tokenizer_id, len(samples), result)
    if args.plot and metrics.completed:
        from headrace.bench.plot import draw

        draw(args.plot, outcome.records, metrics, f"{served_name}: {_traffic(args, len(samples))}")
    return EXIT_OK if metrics.completed else EXIT_FAILURE


def _headers(args: argparse.Namespace) -> CIMultiDict[str]:
    headers = CIMultiDict({"Content-Type": "application/json"})
    if key := os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip() or os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    headers.update(args.header)
    return headers


async def _model_names(args: argparse.Namespace, session: aiohttp.ClientSession) -> tuple[str, str]:
    """The model, and its name in requests: as the flags say, or the first one that the server lists."""
    if args.model is not None:
        return args.model, args.served_model_name or args.model
    url = f"{args.base_url}/v1/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            first = (await response.json())["data"][0]
            name = str(first["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ServerProblem(f"{url} does not tell a model (give --model): {error or type(error).__name__}") from error
    return str(first.get("root") or name), args.served_model_name or name


def _samples(args: argparse.Namespace, tokenizer_id: str) -> list[SampleRequest]:
    try:
        tokenizer = open_tokenizer(tokenizer_id)
    except StartupError as error:
        raise StartupError(f"{error} (--tokenizer says whose vocabulary to use)") from error
    samples = load_dataset(args, tokenizer, args.seed)
    return as_texts(samples, tokenizer, args.seed) if args.backend == "openai-chat" else samples


def _target(args: argparse.Namespace, served_name: str) -> Target:
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.dataset_name in WORKLOADS:
        sampling = {"temperature": WORKLOADS[args.dataset_name].temperature} | sampling
    return Target(
        url=args.base_url + args.endpoint,
        api="chat" if args.backend == "openai-chat" else "completions",
        model=served_name,
        ignore_eos=args.ignore_eos or args.dataset_name in EOS_IGNORED,
        logprobs=args.logprobs,
        fields=sampling | args.extra_body,
    )


async def _warm_up(args: argparse.Namespace, client: Client, samples: Sequence[SampleRequest]) -> None:
    """The ready check and the requests that are not measured.

    Their ids are those of measured prompts in reverse, so that no prefix cache has seen a measured prompt.
    """
    prompts = [_reversed(sample) for sample in samples[: max(args.num_warmups, 1)]]
    end = time.monotonic() + args.ready_check_timeout_sec
    while args.ready_check_timeout_sec > 0:
        record = await client.send(prompts[0])
        if not record.error:
            break
        if time.monotonic() + RETRY_S > end:
            raise ServerProblem(f"not ready after {args.ready_check_timeout_sec:g} s: {record.error}")
        await asyncio.sleep(RETRY_S)
    if args.num_warmups > 0:
        _note(f"Warming up with {args.num_warmups} requests ...")
        chosen = [prompts[index % len(prompts)] for index in range(args.num_warmups)]
        records, _ = await run_load(client.send, chosen, [0.0] * len(chosen), args.max_concurrency, lambda: None)
        if failed := errors_by_kind(records):
            _note(f"{failed[0][1]} warm-up requests failed: {failed[0][0]}")


def _reversed(sample: SampleRequest) -> SampleRequest:
    return sample if isinstance(sample.prompt, str) else replace(sample, prompt=sample.prompt[::-1])


async def _measure(args: argparse.Namespace, client: Client, samples: Sequence[SampleRequest]) -> Outcome:
    _note(f"Sending {_traffic(args, len(samples))} to {args.base_url}{args.endpoint} ...")
    arrivals = arrival_times(len(samples), args.request_rate, args.burstiness, args.seed)
    client.without_usage = 0
    # Prompts are many objects that live to the end: collections during the run need not look at them.
    gc.collect()
    gc.freeze()
    cpu_began = time.process_time()
    with tqdm(total=len(samples), unit="req", disable=True if args.disable_tqdm else None) as bar:
        records, duration_s = await run_load(client.send, samples, arrivals, args.max_concurrency, bar.update)
    busy_share = (time.process_time() - cpu_began) / duration_s
    gc.unfreeze()
    return Outcome(records, duration_s, client.without_usage, busy_share)


def _traffic(args: argparse.Namespace, n: int) -> str:
    rate = "all at once" if args.request_rate == float("inf") else f"at {args.request_rate:g}/s"
    limit = "" if args.max_concurrency is None else f", {args.max_concurrency} at a time"
    return f"{n} requests of {args.dataset_name}, {rate}{limit}"


def _print_report(args: argparse.Namespace, metrics: Metrics, outcome: Outcome) -> None:
    print(
        serving_block(
            metrics,
            percentile_metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
        )
    )
    goodput = ["goodput"] if args.goodput else []
    print(formulas([*args.percentile_metrics, "throughput", "peak", *goodput]), flush=True)
    errors = errors_by_kind(outcome.records)
    for text, count in errors[:MOST_ERRORS]:
        _note(f"{count} failed: {text}")
    if len(errors) > MOST_ERRORS:
        _note(f"and {len(errors) - MOST_ERRORS} more kinds of errors")
    if outcome.without_usage:
        _note(f"{outcome.without_usage} responses told no usage: one token an event is assumed for them")
    if outcome.busy_share > BUSY_SHARE and outcome.duration_s > BUSY_FROM_S:
        _note(
            f"This client was busy for {outcome.busy_share:.0%} of the time: what it measured includes its own delays"
        )


def _allow_many_connections() -> None:
    """Each running request has a connection, and the usual soft limit of 1,024 open files is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
