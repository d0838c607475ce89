"""Keywords of ``LLM`` → ``Settings``: our own fields, and vLLM's that have none."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from headrace.launcher import LINK_SETTINGS
from headrace.offline.errors import InvalidRequest
from shared.config import GATEWAY, Settings

LOG_LEVEL = "warning"
"""Unless ``log_level`` is given: a script's output is its own."""

_ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes"}
"""vLLM's names of settings that are called otherwise here."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "cpu_offload_gb": (0,),
    "distributed_executor_backend": (None,),
    "download_dir": (None,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "hf_overrides": (None, {}),
    "hf_token": (None,),
    "kv_offloading_backend": (None, "native"),
    "kv_transfer_config": (None,),
    "limit_mm_per_prompt": (None, {}),
    "max_logprobs": (20,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "quantization": (None,),
    "runner": ("auto", "generate"),
    "speculative_config": (None,),
    "structured_outputs_config": (None, {}),
    "task": (None, "auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}
"""Keywords that are not supported, and their values that ask for nothing."""

_WITHOUT_EFFECT = (
    "async_scheduling",
    "compilation_config",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "enable_log_requests",
    "max_seq_len_to_capture",
)


def settings_of(keywords: Mapping[str, Any]) -> Settings:
    """The settings that keywords ask for; None stands for a default.

    Raises:
        TypeError: an unknown keyword, with the nearest known one.
        InvalidRequest: a value of the wrong type, out of range, or not supported.
    """
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    hints = get_type_hints(Settings)
    values: dict[str, Any] = {"log_level": LOG_LEVEL}
    for given, value in keywords.items():
        name = _ALIASES.get(given, given)
        if name in fields:
            if value is not None:
                values[name] = _checked(given, value, hints[name], fields[name].metadata["choices"])
        elif name in _NEUTRAL:
            _check_neutral(name, value)
        elif name not in _WITHOUT_EFFECT:
            near = difflib.get_close_matches(name, [*fields, *_ALIASES, *_NEUTRAL, *_WITHOUT_EFFECT], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"LLM() got an unexpected keyword argument {given!r}{hint}")
    try:
        settings = Settings(**values)
    except ValueError as error:
        raise InvalidRequest(_as_keyword(str(error))) from None
    _check_ours(settings, fields)
    return settings


def _check_ours(settings: Settings, fields: Mapping[str, dataclasses.Field[Any]]) -> None:
    """Refuse what is about the HTTP API, or what the launcher chooses itself."""
    plain = Settings()
    for name, field in fields.items():
        if getattr(settings, name) == getattr(plain, name):
            continue
        if name in LINK_SETTINGS or name in ("config", "tokenizers"):
            raise InvalidRequest(f"{name} is for services that are started one by one", name)
        if field.metadata["services"] == (GATEWAY,) and name != "served_model_name":
            raise InvalidRequest(f"{name} is a setting of the HTTP API, which LLM does not start", name)


def _check_neutral(name: str, value: Any) -> None:
    neutral = _NEUTRAL[name]
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
        raise InvalidRequest(f"{name}={value!r} is not supported; leave it out or give {neutral[0]!r}", name)


def _checked(name: str, value: Any, hint: Any, choices: Any) -> Any:
    """A value as its setting's type."""
    if get_origin(hint) is list:
        items = [value] if isinstance(value, str) else list(value)
        return [_checked(name, item, get_args(hint)[0], None) for item in items]
    kind = next(a for a in get_args(hint) if a is not type(None)) if get_origin(hint) in (Union, UnionType) else hint
    if kind is str:
        value = json.dumps(value) if isinstance(value, Mapping) else str(value).removeprefix("torch.")
        if choices and value not in choices:
            raise InvalidRequest(f"{name} {value!r} is not one of {', '.join(choices)}", name)
        return value
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(f"{name} must be {kind.__name__}, got {value!r}", name)
    return kind(value)


def _as_keyword(words: str) -> str:
    """``--max-num-seqs must be …`` → ``max_num_seqs must be …``."""
    flag, space, rest = words.partition(" ")
    return flag.removeprefix("--").replace("-", "_") + space + rest
