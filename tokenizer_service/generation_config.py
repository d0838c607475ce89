"""The sampling defaults that come with a model: ``generation_config.json``, or the metadata of a GGUF file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from shared.config import Settings
from shared.errors import RequestError, StartupError
from shared.gguf_header import read_gguf_header
from shared.model_source import ModelSource
from shared.sampling import SamplingParams

FILE = "generation_config.json"
NEUTRAL = ("vllm", "none")
"""Values of ``--generation-config`` that leave the model's defaults out."""

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of generation_config.json: field of a request. ``do_sample`` and all others are not looked at."""

_WHOLE = ("top_k", "max_tokens")

_OVERRIDE = "--override-generation-config"

_IN_GGUF = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class SamplingDefaults(NamedTuple):
    """What a request gets for fields that it leaves out."""

    values: dict[str, float]
    """By field of a request; empty: the API's own defaults."""
    origin: str
    """Where they are from, for people."""


def load_sampling_defaults(settings: Settings, source: ModelSource) -> SamplingDefaults:
    """The defaults that ``--generation-config`` names, under those of ``--override-generation-config``.

    Raises:
        StartupError: names the file and the field that is out of range.
    """
    found, origin = _of_model(settings.generation_config, source)
    values = _checked(found, origin)
    if settings.override_generation_config is not None:
        overrides = _overrides(settings.override_generation_config)
        values = {field: value for field, value in values.items() if field not in _fields(overrides)}
        origin = f"{origin} and {_OVERRIDE}" if values else _OVERRIDE
        values |= _checked(overrides, _OVERRIDE)
    return SamplingDefaults(values, origin)


def _of_model(asked: str, source: ModelSource) -> tuple[Mapping[str, Any], str]:
    if asked in NEUTRAL:
        return {}, ""
    if asked != "auto":
        path = Path(asked).expanduser()
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise StartupError(f"--generation-config {asked}: there is no file {file}")
        return _read(file), str(file)
    if source.kind == "gguf":
        metadata = read_gguf_header(source.path).metadata
        return {key: _short(metadata[name]) for key, name in _IN_GGUF.items() if name in metadata}, str(source.path)
    file = source.path / FILE
    return (_read(file), str(file)) if source.kind == "folder" and file.is_file() else ({}, "")


def _short(value: Any) -> Any:
    """A float32 as the decimal that its author wrote."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{file} is not a JSON object")
    return content


def _overrides(text: str) -> Mapping[str, Any]:
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise StartupError(f"{_OVERRIDE} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{_OVERRIDE} must be a JSON object, got {text}")
    for key in content:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_FIELDS)}"
            raise StartupError(f"{_OVERRIDE}: unknown key {key}; {hint}")
    return content


def _checked(content: Mapping[str, Any], origin: str) -> dict[str, float]:
    """The values by field of a request; a key without a value is left out."""
    values: dict[str, float] = {}
    for key, field in _FIELDS.items():
        value = content.get(key)
        if value is None:
            continue
        if field in _WHOLE and isinstance(value, float) and value.is_integer():
            value = int(value)
        given: dict[str, Any] = {field: value}
        try:
            SamplingParams(**given).validate()
            if value == 0 and field == "max_tokens":
                raise RequestError("max_tokens must be at least 1, got 0")
        except RequestError as error:
            raise StartupError(
                f"{origin}: {key}: {error.message}; correct it, or leave the model's defaults out with "
                f"--generation-config {NEUTRAL[0]}"
            ) from error
        values[field] = value
    return values


def _fields(content: Mapping[str, Any]) -> set[str]:
    return {_FIELDS[key] for key in content}
