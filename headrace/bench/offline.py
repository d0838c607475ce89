"""What the benches share that drive the engine in processes of their own, without HTTP: flags, model, result file."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tqdm import tqdm

from headrace.bench.tokenizer import BenchTokenizer, IdsOnly, open_tokenizer
from headrace.collect_env import collect
from shared.config import Settings, parse_with_flags
from shared.errors import HeadraceError, RequestError, StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from shared.model_config import ModelConfig, load_model_config, resolve_max_model_len
from shared.model_source import BUILT_IN, resolve_model

if TYPE_CHECKING:
    from headrace.llm import LLM

TARGET_ITL_MS = 0.0
"""Nobody reads the outputs of these benches while they grow: whole steps are the fastest."""
SHAPES = Path(__file__).parent / "shapes"
PERCENTAGES = (10, 25, 50, 75, 90, 99)
Item = TypeVar("Item")


class BenchError(Exception):
    """A bench cannot be run as asked; the text says what to change."""


def run(
    command: str,
    argv: Sequence[str],
    add_flags: Callable[[argparse.ArgumentParser], None],
    bench: Callable[[Settings, argparse.Namespace], Mapping[str, Any]],
    *,
    description: str,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """The whole of a ``headrace bench COMMAND``: parse, run, write ``--output-json``; returns an exit code.

    Args:
        add_flags: adds the command's own flags.
        bench: prints its figures and returns them.
        defaults: of settings, where they differ from those of ``headrace serve``.
    """

    def add_all(parser: argparse.ArgumentParser) -> None:
        add_flags(parser)
        add_common_flags(parser)

    prog = f"headrace bench {command}"
    settings, options = parse_with_flags(
        None,
        argv,
        add_all,
        defaults={"log_level": "warning", "target_itl_ms": TARGET_ITL_MS, **(defaults or {})},
        description=description,
        prog=prog,
        positional_model=True,
    )
    if options.disable_tqdm:
        # Heard by the processes of the engine, which draw bars of their own.
        os.environ["TQDM_DISABLE"] = "1"
    try:
        check_writable(options.output_json)
        settings = with_shape(settings, options.model_config)
        figures = bench(settings, options)
        if options.output_json:
            write_json(options.output_json, record(command, settings, options, figures))
    except BenchError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (StartupError, RequestError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except HeadraceError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return EXIT_OK


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of all offline benches."""
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="random weights of the shape in this config.json, or of one that comes with Headrace: "
        + ", ".join(shipped_shapes()),
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures and what they were measured with")
    parser.add_argument("--disable-tqdm", action="store_true", help="draw no progress bars")
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of the output")


def shipped_shapes() -> list[str]:
    """Names that ``--model-config`` knows."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def with_shape(settings: Settings, model_config: str | None) -> Settings:
    """The settings for random weights of a shape: a file, or the name of one that comes with Headrace.

    Raises:
        BenchError: there is no such file, or ``--model`` is given as well.
    """
    if model_config is None:
        return settings
    if settings.model != BUILT_IN:
        raise BenchError(f"give --model {settings.model} or --model-config {model_config}, not both")
    shipped = SHAPES / f"{model_config}.json"
    file = shipped if shipped.is_file() else Path(model_config).expanduser()
    if file.suffix != ".json" or not file.is_file():
        known = ", ".join(shipped_shapes())
        raise BenchError(f"--model-config {model_config} is neither a .json file nor one of {known}")
    return dataclasses.replace(settings, model=str(file), load_format="dummy")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a bench needs to know of the model to make requests that fit it."""

    config: ModelConfig
    max_model_len: int
    has_tokenizer: bool

    def check_length(self, length: int, what: str) -> None:
        """Raise ``BenchError`` when a request of ``length`` tokens, in words ``what``, does not fit."""
        if length > self.max_model_len:
            raise BenchError(f"{what} = {length} tokens, more than max_model_len {self.max_model_len}; lower them")


def shape_of(settings: Settings) -> Shape:
    """Read the configuration of the settings' model, without its weights."""
    source = resolve_model(settings.model, settings.revision)
    config = load_model_config(source)
    with_model = source.kind == "gguf" or (source.kind == "folder" and (source.path / "tokenizer.json").is_file())
    has_tokenizer = settings.tokenizer is not None or with_model
    return Shape(config, resolve_max_model_len(config, settings.max_model_len), has_tokenizer)


def tokenizer_of(settings: Settings, shape: Shape) -> BenchTokenizer:
    """The model's tokenizer, or what stands for it when it has none."""
    if shape.has_tokenizer:
        return open_tokenizer(settings.tokenizer or settings.model)
    return IdsOnly(shape.config.vocab_size)


def open_llm(settings: Settings, *, tokenizer: bool) -> LLM:
    """Start the engine, with a tokenizer or without one."""
    from headrace.llm import LLM

    return LLM.from_settings(settings, skip_tokenizer_init=not tokenizer)


def makes_text(shape: Shape, options: argparse.Namespace) -> bool:
    """Whether outputs are turned into text: the model has a tokenizer, and ``--disable-detokenize`` is not given."""
    return shape.has_tokenizer and not options.disable_detokenize


def changed(settings: Settings) -> dict[str, Any]:
    """The model, and the settings that are not the defaults, by name; without API keys, since it is shown."""
    default = Settings()
    names = [field.name for field in dataclasses.fields(settings) if field.name != "api_key"]
    return {
        name: getattr(settings, name)
        for name in names
        if name == "model" or getattr(settings, name) != getattr(default, name)
    }


def progress(items: Sequence[Item], what: str, options: argparse.Namespace) -> Iterable[Item]:
    """``items`` with a progress bar on standard error, unless there are none."""
    return tqdm(items, desc=what, disable=options.disable_tqdm or not items, file=sys.stderr)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """``PERCENTAGES`` of the values, linearly interpolated as in NumPy; keys are the percentages, as JSON wants."""
    found = np.percentile(np.asarray(values, np.float64), PERCENTAGES)
    return {str(percentage): float(value) for percentage, value in zip(PERCENTAGES, found, strict=True)}


def record(command: str, settings: Settings, options: argparse.Namespace, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, and below them what they were measured with: command, model, settings, versions, machine."""
    environment = collect()
    return {
        **figures,
        "bench": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": settings.model,
        "settings": changed(settings),
        "options": vars(options),
        "versions": environment["software"],
        "machine": {section: environment[section] for section in ("gpu", "cpu", "memory")},
    }


def check_writable(path: str | None) -> None:
    """Raise ``BenchError`` before the work when ``--output-json`` could not be written after it."""
    if path is not None:
        file = Path(path).expanduser()
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise BenchError(f"--output-json {path}: it cannot be written there")


def write_json(path: str, value: Mapping[str, Any]) -> None:
    """Write ``value``; raises ``BenchError`` when the file cannot be written."""
    try:
        Path(path).expanduser().write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--output-json {path}: {error.strerror}") from error
