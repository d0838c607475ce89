"""``headrace simulate``: what a server would do with a load, before there is one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from core_engine.core import CoreConfig
from core_engine.engine_config import core_config_for, scheduler_for
from headrace.simulate.advice import advice
from headrace.simulate.device import GIB, PRESETS, Device, load_device, save_device
from headrace.simulate.figures import Figures
from headrace.simulate.fit import fit_device, read_step_log
from headrace.simulate.flags import DEFAULT_DEVICE, PROG, parse_flags, sweep_flag
from headrace.simulate.generate import generate
from headrace.simulate.memory import Memory, find_host_memory, find_memory, with_model
from headrace.simulate.report import sweep_head, sweep_row, text_report
from headrace.simulate.run import Simulator
from headrace.simulate.trace import VOCAB_SIZE, TraceRequest, read_trace, write_trace
from shared.config import Settings
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK
from shared.model_config import ModelConfig, load_model_config, resolve_max_model_len
from shared.model_source import resolve_model


class Plan(NamedTuple):
    """Everything that a simulation needs."""

    settings: Settings
    args: argparse.Namespace
    device: Device
    memory: Memory
    core: CoreConfig
    trace: list[TraceRequest]


def main(argv: Sequence[str]) -> int:
    """Run the simulation. Returns an exit code: 1 when no request succeeded."""
    _, args = parse_flags(argv)
    try:
        return _sweep(argv, args) if args.sweep else _once(argv)
    except StartupError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def prepare(argv: Sequence[str]) -> Plan:
    """Read flags, trace and device.

    Raises:
        StartupError: a file cannot be used, settings contradict each other, or the KV cache's size is not known.
    """
    settings, args = parse_flags(argv)
    trace = _load(args)
    model = load_model_config(resolve_model(settings.model, settings.revision)) if settings.model else None
    device = _device(settings, args, model)
    memory = find_memory(settings, device)
    if model is not None:
        max_model_len = resolve_max_model_len(model, settings.max_model_len)
    else:
        longest = max(request.prompt + max(request.max_tokens or 0, request.output) for request in trace)
        max_model_len = settings.max_model_len or min(longest, (memory.num_blocks - 1) * settings.block_size)
    core = core_config_for(settings, scheduler_for(settings, max_model_len, device.kind), VOCAB_SIZE)
    return Plan(settings, args, device, memory, core, trace)


def simulate(plan: Plan) -> Figures:
    """Run it."""
    simulator = Simulator(
        plan.core,
        plan.device,
        plan.trace,
        num_blocks=plan.memory.num_blocks,
        host=find_host_memory(plan.settings, plan.device),
        num_replicas=plan.settings.data_parallel_size,
        max_connections=plan.settings.max_connections,
        max_concurrency=plan.args.max_concurrency,
        isolated=bool(plan.settings.api_key) and plan.settings.prefix_cache_isolation,
    )
    with tqdm(total=len(plan.trace), unit="req", disable=True if plan.args.disable_tqdm else None, leave=False) as bar:
        outcome = simulator.run(bar.update)
    return Figures(outcome, plan.settings.data_parallel_size, plan.device.request_s)


def _once(argv: Sequence[str]) -> int:
    plan = prepare(argv)
    _describe(plan)
    began = time.perf_counter()
    figures = simulate(plan)
    took = time.perf_counter() - began
    words = advice(figures, plan.core)
    print(text_report(figures, words), flush=True)
    _note(f"{figures.duration_s:,.0f} s were simulated in {took:,.1f} s.")
    if plan.args.output:
        _save(plan, figures, words)
    if plan.args.plot and figures.completed:
        from headrace.simulate.plot import draw

        seats = plan.core.scheduler.max_num_seqs * plan.settings.data_parallel_size
        draw(plan.args.plot, figures, _title(plan), words, seats)
    return EXIT_OK if figures.completed else EXIT_FAILURE


def _sweep(argv: Sequence[str], args: argparse.Namespace) -> int:
    """One simulation for each value; those that cannot run are said and left out."""
    name, values = args.sweep
    for value in values:
        parse_flags([*argv, sweep_flag(name, value)])  # no simulation before a value that ends the command
    done: list[tuple[str, Figures]] = []
    plan = None
    print(sweep_head(name))
    for value in values:
        try:
            plan = prepare([*argv, sweep_flag(name, value)])
        except StartupError as error:
            print(f"{value:>24}  {error}", flush=True)
            continue
        figures = simulate(plan)
        print(sweep_row(value, figures), flush=True)
        if figures.completed:
            done.append((value, figures))
    if args.output:
        _write(args.output, {"sweep": name, "values": {value: figures.to_json() for value, figures in done}})
    if args.plot and done and plan is not None:
        from headrace.simulate.plot import draw_sweep

        draw_sweep(args.plot, name, [value for value, _ in done], [figures for _, figures in done], _title(plan))
    return EXIT_OK if done else EXIT_CONFIG if plan is None else EXIT_FAILURE


# -- what is simulated -----------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> list[TraceRequest]:
    trace = generate(args) if args.trace is None else read_trace(args.trace, args.num_prompts)
    for request in trace:
        request.arrival_s /= args.speedup
        if args.max_tokens is not None and request.max_tokens is None:
            request.max_tokens = max(args.max_tokens, request.output)
    if args.write_trace:
        try:
            write_trace(args.write_trace, trace)
        except OSError as error:
            raise StartupError(f"--write-trace {args.write_trace} cannot be written: {error}") from error
    return trace


def _device(settings: Settings, args: argparse.Namespace, model: ModelConfig | None) -> Device:
    """``--device``, with the times of ``--fit`` and the sizes of the flags or the model."""
    if settings.device in ("cpu", "cuda"):
        if not args.fit:
            raise StartupError(f"how fast --device {settings.device} is has to come from --fit; or name a preset")
        device = PRESETS[DEFAULT_DEVICE if settings.device == "cuda" else "cpu-demo"]
        device = dataclasses.replace(
            device, name=settings.device, memory_bytes=None, weights_bytes=None, kv_bytes_per_token=None
        )
    else:
        device = load_device(settings.device)
    if args.fit:
        device = fit_device(read_step_log(args.fit), device, args.fit)
    if model is not None:
        device = with_model(device, model, settings)
    given = {
        "memory_bytes": None if args.gpu_memory is None else int(args.gpu_memory * GIB),
        "weights_bytes": args.weights_bytes,
        "kv_bytes_per_token": args.kv_bytes_per_token,
    }
    device = dataclasses.replace(device, **{name: value for name, value in given.items() if value is not None})
    if args.save_device:
        save_device(args.save_device, device)
    return device


# -- what is said ----------------------------------------------------------------------------------------------------


def _describe(plan: Plan) -> None:
    device, costs, replicas = plan.device, plan.device.costs, plan.settings.data_parallel_size
    _note(f"Device: {device.name}, {device.source}" + (f"; {replicas} replicas" if replicas > 1 else ""))
    _note(
        f"  a step takes {_shown(1e3 * (costs.step + device.gap_s))} ms, {_shown(1e6 * costs.token)} us a token, "
        f"{_shown(1e6 * costs.context)} ms per 1,000 tokens of context; {_shown(1e3 * device.latency_s)} ms from idle"
    )
    _note(f"KV cache: {plan.memory.words}")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _title(plan: Plan) -> str:
    args = plan.args
    name = args.trace or args.dataset_name
    if args.trace is None:
        name += " all at once" if args.request_rate == float("inf") else f" at {args.request_rate * args.speedup:g}/s"
    elif args.speedup != 1.0:
        name += f" at {args.speedup:g} x the rate"
    replicas = plan.settings.data_parallel_size
    times = f"{replicas} x " if replicas > 1 else ""
    return f"Simulated: {len(plan.trace):,} requests of {name} on {times}{plan.device.name}"


def _save(plan: Plan, figures: Figures, words: Sequence[str]) -> None:
    device = dataclasses.asdict(plan.device) | {"costs": plan.device.costs._asdict()}
    result = {"num_prompts": len(plan.trace), "device": device, **figures.to_json(), "advice": list(words)}
    _write(plan.args.output, result)


def _write(path: str, result: object) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise StartupError(f"--output {path} cannot be written: {error}") from error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
