"""Every setting of every process, once: name, default, meaning, and which services take it.

A setting is a flag (``--max-model-len 4096``), an environment variable (``HEADRACE_MAX_MODEL_LEN=4096``) and a field of
``Settings``; for ``headrace serve`` it is also a key of the YAML file that ``--config`` names. A flag wins over the
environment, which wins over the file, which wins over the default. Names and defaults are vLLM's where it has the
setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_type_hints

from shared.setting_checks import check_settings
from shared.setting_values import CONVERTERS, file_value, kind_of

ENV_PREFIX = "HEADRACE_"
GATEWAY, TOKENIZER, ENGINE, WORKER = "api_gateway", "tokenizer_service", "core_engine", "gpu_worker"
SERVICES = (GATEWAY, TOKENIZER, ENGINE, WORKER)


def setting(default: Any, text: str, *services: str, choices: Sequence[str] | None = None, short: str = "") -> Any:
    """A field of ``Settings``; ``services`` are those that take it (none: the launcher alone)."""
    metadata = {"help": text, "services": services, "choices": choices, "short": short}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one process. Fields that its service does not take keep their defaults."""

    # model
    model: str = setting(
        "demo", "demo, a folder, a .gguf or config.json file, or a model id of the Hugging Face hub", *SERVICES
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model", *SERVICES)
    served_model_name: list[str] = setting([], "names that the API serves the model under (default: MODEL)", GATEWAY)
    dtype: str = setting(
        "auto",
        "type of weights and activations; auto: bfloat16 for half-precision checkpoints, else float32",
        ENGINE,
        choices=("auto", "bfloat16", "float32", "half", "float16", "float"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache: auto (the model's), bfloat16, float16, float32, or fp8 (= fp8_e4m3: half the memory of "
        "bfloat16, with the checkpoint's scales)",
        ENGINE,
    )
    max_model_len: int | None = setting(
        None, "longest prompt + output in tokens; accepts 16k (default: the model's own)", GATEWAY, TOKENIZER, ENGINE
    )
    tokenizer: str | None = setting(
        None, "where the vocabulary is, in the forms of --model (default: with the model)", TOKENIZER
    )
    chat_template: str | None = setting(None, "file with a chat template that replaces the model's", TOKENIZER)
    generation_config: str = setting(
        "auto",
        "defaults for sampling parameters that a request leaves out; auto: the model's own generation_config.json; "
        "vllm: none; or a folder or file with another one",
        TOKENIZER,
    )
    override_generation_config: str | None = setting(
        None, "JSON object of such defaults that win over the file's; null takes one away", TOKENIZER
    )
    seed: int = setting(0, "seed of the worker's random weights (--load-format dummy)", ENGINE)
    load_format: str = setting(
        "auto", "auto, or dummy: random weights of the model's shape", ENGINE, choices=("auto", "dummy")
    )

    # scheduling
    max_num_seqs: int | None = setting(
        None, "requests in one step at most (default: 256 on a CPU, 1024 on a GPU)", ENGINE
    )
    max_num_batched_tokens: int | None = setting(
        None, "tokens in one step at most (default: 2048 on a CPU, 8192 on a GPU)", ENGINE
    )
    max_prefill_tokens: int | None = setting(
        None, "prefill tokens in one step at most (default: the whole budget)", ENGINE
    )
    target_itl_ms: float | None = setting(
        None,
        "time between two tokens of a request that prefill chunks are cut to keep; 0: off (default: off on a CPU, 40 "
        "on a GPU)",
        ENGINE,
    )
    max_num_partial_prefills: int = setting(1, "prompts that may be partly computed at the same time", ENGINE)
    enable_chunked_prefill: bool = setting(True, "cut long prompts into chunks that fit the token budget", ENGINE)
    enable_prefix_caching: bool = setting(True, "share KV blocks of equal prefixes", ENGINE)
    prefix_cache_policy: str = setting(
        "lru",
        "cached block that is given up first: of the least recent use (lru), of the fewest uses, with ageing (lfu), or "
        "the one cached first (fifo)",
        ENGINE,
        choices=("lru", "lfu", "fifo"),
    )
    block_size: int = setting(16, "tokens in one KV block", ENGINE)
    swap_space: float = setting(
        0.0, "GiB of host memory of each worker for the KV blocks of preempted requests", ENGINE
    )
    kv_offloading_size: float = setting(
        0.0, "GiB of host memory of each worker for cached KV blocks that the device gives up", ENGINE
    )
    preemption_mode: str = setting(
        "auto",
        "what becomes of a preempted request's KV blocks: kept in the --swap-space (swap), computed again (recompute), "
        "or whichever is predicted to be faster (auto)",
        ENGINE,
        choices=("auto", "swap", "recompute"),
    )
    watermark: float = setting(0.01, "share of KV blocks kept free when a request is admitted", ENGINE)
    scheduling_policy: str = setting(
        "fcfs",
        "who is admitted first: who came first (fcfs), the lowest priority, with ageing and preemption (priority), "
        "each API key or user in turn (fair), or who finds most of its prompt cached (lpm)",
        ENGINE,
        choices=("fcfs", "priority", "fair", "lpm"),
    )
    priority_ageing_s: float = setting(
        30.0, "seconds of waiting that make up for one level of priority (--scheduling-policy priority)", ENGINE
    )
    max_output_tokens: int | None = setting(
        None, "most tokens that a choice may have, whatever its max_tokens (default: any number)", GATEWAY, ENGINE
    )
    max_num_queued_reqs: int = setting(4096, "requests that may wait; more are refused with 429", ENGINE)
    max_num_queued_tokens: int | None = setting(None, "prompt tokens that may wait (default: any number)", ENGINE)
    steps_in_flight: int = setting(
        2, "steps sent to a worker before the first of them is settled; one more of less than 2 ms each", ENGINE
    )
    step_timeout_s: float = setting(
        300.0, "a worker or an engine that has work and settles no step for this long is stuck", GATEWAY, ENGINE, WORKER
    )
    step_log: str | None = setting(None, "file that gets a JSON line per planned and one per settled step", ENGINE)

    # worker
    device: str = setting("auto", "auto, cpu, cuda, or cuda:1 for the second visible GPU", ENGINE, WORKER)
    device_lease_dir: str | None = setting(
        None, "folder of the locks that keep workers from sharing a GPU (default: /tmp/headrace-leases-UID)", WORKER
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", ENGINE)
    kv_cache_bytes: int | None = setting(
        None, "size of the KV cache in bytes (default: 1 GiB on a CPU, measured on a GPU)", ENGINE
    )
    num_gpu_blocks_override: int | None = setting(None, "number of KV blocks, whatever the memory", ENGINE)
    enforce_eager: bool = setting(False, "do not use CUDA graphs", ENGINE)
    batch_invariant: bool = setting(False, "a request's logits are the same bits whatever else is in its batch", ENGINE)
    threads: int | None = setting(None, "CPU threads of a worker (default: by the number of cores)", WORKER)

    # HTTP
    host: str = setting("127.0.0.1", "address that the API listens on", GATEWAY)
    port: int = setting(8000, "port of the API", GATEWAY)
    api_key: list[str] = setting([], "key that clients must send; may be given several times", GATEWAY)
    prefix_cache_isolation: bool = setting(
        True, "with --api-key: use what one key's requests have cached for that key alone", GATEWAY
    )
    max_body_bytes: int = setting(4 * 1024 * 1024, "largest request body; larger ones are refused with 413", GATEWAY)
    shutdown_timeout: float = setting(30.0, "seconds that running requests may take after SIGTERM", GATEWAY, WORKER)
    max_connections: int = setting(4096, "requests served at the same time; more are refused with 429", GATEWAY)

    # processes and links
    config: str | None = setting(None, "YAML file of settings: flag names without --, and their values")
    tokenizers: int = setting(1, "tokenizer processes")
    data_parallel_size: int = setting(1, "worker processes under the engine, each with a copy of the model")
    max_restarts: int = setting(10, "restarts of one process within --restart-window; its next end ends the server")
    restart_window: float = setting(300.0, "seconds over which restarts are counted")
    stuck_timeout: float = setting(
        30.0, "seconds without a turn of its loop after which a process is ended and started again; 0: never", *SERVICES
    )
    run_dir: str | None = setting(None, "private folder for sockets (default: a new one under XDG_RUNTIME_DIR or /tmp)")
    tokenizer_endpoint: list[str] = setting(
        [], "where tokenizers listen; a DNS name stands for all its addresses", GATEWAY
    )
    engine_endpoint: list[str] = setting([], "where engines listen for tokenizers", TOKENIZER)
    worker_endpoint: str | None = setting(None, "where the engine listens for workers", WORKER)
    listen: str | None = setting(None, "endpoint to bind for front ends", TOKENIZER, ENGINE)
    listen_workers: str | None = setting(None, "endpoint to bind for workers", ENGINE)
    curve_dir: str | None = setting(None, "folder with the CURVE keys of tcp links", *SERVICES)
    name: str | None = setting(
        None, "name of this process among its kind (default: host name and process id)", *SERVICES
    )
    resume_window: float = setting(
        30.0,
        "seconds for which a client may come back for a request that it sent with Last-Event-ID; at least --lease-s",
        TOKENIZER,
    )
    lease_s: float = setting(20.0, "how long an output is kept that nobody renews", GATEWAY, TOKENIZER, ENGINE)
    beat_s: float = setting(1.0, "time between two signs of life on a link", *SERVICES)

    # logging
    log_level: str = setting(
        "info", "least severity that is logged", *SERVICES, choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("console", "console or json", *SERVICES, choices=("console", "json"))

    def __post_init__(self) -> None:
        check_settings(self)

    def to_argv(self, service: str | None) -> list[str]:
        """The flags that start ``service`` (None: the launcher) with these settings, those that are not a default."""
        argv: list[str] = []
        for field in _fields_of(service):
            value = getattr(self, field.name)
            if value == _default(field):
                continue
            argv += _flag_of(field.name, value)
        return argv


def parse_settings(
    service: str | None,
    argv: Sequence[str],
    *,
    description: str = "",
    prog: str = "",
    environ: Mapping[str, str] | None = None,
    positional_model: bool = False,
) -> Settings:
    """Read the settings of ``service`` from flags and the environment.

    ``None`` stands for the launcher: all settings, and those that neither gives come from the file of ``--config``.
    Exits with status 2 and a line that names the nearest flag when one is unknown, like argparse.
    """
    settings, _ = parse_with_flags(
        service,
        argv,
        lambda parser: None,
        description=description,
        prog=prog,
        environ=environ,
        positional_model=positional_model,
    )
    return settings


def parse_with_flags(
    service: str | None,
    argv: Sequence[str],
    add_flags: Callable[[argparse.ArgumentParser], None],
    *,
    defaults: Mapping[str, Any] | None = None,
    description: str = "",
    prog: str = "",
    environ: Mapping[str, str] | None = None,
    positional_model: bool = False,
) -> tuple[Settings, argparse.Namespace]:
    """``parse_settings`` for a command that has flags of its own beside the settings; gives both.

    Args:
        add_flags: adds the command's own flags to the parser, under names that no setting has.
        defaults: defaults of settings by name, where the command's differ.
    """
    environ = os.environ if environ is None else environ
    defaults = defaults or {}
    prog = prog or (f"python -m {service}" if service else "headrace serve")
    parser = FlagParser(prog=prog, description=description)
    fields = _fields_of(service)
    if positional_model:
        parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    add_flags(parser)
    hints = get_type_hints(Settings)
    group = parser.add_argument_group("settings")
    for field in fields:
        _add_flag(group, field, hints[field.name], defaults)
    own = parser.parse_args(list(argv))
    values = {field.name: vars(own).pop(field.name) for field in fields}
    positional = vars(own).pop("model_positional", None)
    if positional is not None:
        values["model"] = positional
    for field in fields:
        if values[field.name] is None:
            values[field.name] = _from_environment(parser, field, hints[field.name], environ)
    path = values.get("config")
    try:
        in_file = _from_file(path, fields, hints) if path else {}
        for field in fields:
            if values[field.name] is None:
                values[field.name] = in_file.get(field.name, defaults.get(field.name, _default(field)))
        return Settings(**values), own
    except ValueError as error:
        parser.error(str(error))


def _fields_of(service: str | None) -> list[dataclasses.Field[Any]]:
    fields = dataclasses.fields(Settings)
    return [f for f in fields if service is None or service in f.metadata["services"]]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flag_of(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, list):
        return [f"{flag}={item}" for item in value]
    return [f"{flag}={value}"]


def _add_flag(
    parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, Any]
) -> None:
    kind, is_list = kind_of(hint)
    default, text = defaults.get(field.name, _default(field)), field.metadata["help"]
    shown = "" if default in (None, "") or is_list or kind is bool else f" (default: {default})"
    options: dict[str, Any] = {"dest": field.name, "help": text.replace("%", "%%") + shown, "default": None}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": CONVERTERS[kind], "choices": field.metadata["choices"]}
    if is_list:
        options |= {"nargs": "+", "action": "extend"}
    parser.add_argument("--" + field.name.replace("_", "-"), **options)


def _from_environment(
    parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any, environ: Mapping[str, str]
) -> Any:
    """The environment's value of a setting that no flag gives, or None."""
    variable = ENV_PREFIX + field.name.upper()
    given = environ.get(variable)
    if given is None:
        return None
    kind, is_list = kind_of(hint)
    if is_list:
        return [item.strip() for item in given.split(",") if item.strip()]
    try:
        value = CONVERTERS[kind](given)
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"{variable}: {given!r} is not a valid value")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        parser.error(f"{variable}: {given!r} is not one of {', '.join(choices)}")
    return value


def _from_file(path: str, fields: Sequence[dataclasses.Field[Any]], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a YAML file, by name. A key without a value is left out. Raises ``ValueError`` in words."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict | None):
        raise ValueError(f"{path}: it must hold lines of the form flag-name: value")
    known = {field.name.replace("_", "-"): field for field in fields if field.name != "config"}
    found: dict[str, Any] = {}
    for key, given in (content or {}).items():
        flag = str(key).replace("_", "-")
        if flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            raise ValueError(f"{path}: unknown setting {key}" + (f"; did you mean {near[0]}?" if near else ""))
        name = known[flag].name
        if name in found:
            raise ValueError(f"{path}: {flag} is given twice")
        if given is not None:
            try:
                found[name] = file_value(given, hints[name], known[flag].metadata["choices"])
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{path}: {key}: {error}") from error
    return found


class FlagParser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag is answered with the nearest one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[1], flags, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)
