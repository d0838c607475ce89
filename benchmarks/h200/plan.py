"""Which cases are measured, in which engine, and in which order: an engine is started once for all its cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.h200.starts import checkpoint
from headrace import LLM
from headrace.bench.offline import SHAPES
from shared.model_config import load_model_config
from shared.model_source import resolve_model

MODELS = {"qwen06b": "qwen3-0.6b", "llama8b": "llama-3.1-8b"}
"""Names in the file of figures, and the shapes that come with Headrace."""
ONLY = {"mixed": "llama8b", "nano_fp8": "qwen06b", "documents": "llama8b"}
"""Cases that are measured with one of them alone."""
COMMON: Mapping[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "enable_prefix_caching": False,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A shape, and what its figures go by."""

    name: str
    shape: Path

    @classmethod
    def named(cls, name: str) -> Model:
        """``qwen06b``, ``llama8b``, another shape that comes with Headrace, or a config.json file.

        Raises:
            ValueError: there is no such shape.
        """
        shipped = SHAPES / f"{MODELS.get(name, name)}.json"
        shape = shipped if shipped.is_file() else Path(name)
        if shape.suffix != ".json" or not shape.is_file():
            raise ValueError(f"{name!r} is neither {' nor '.join(MODELS)}, nor a config.json file")
        return cls(name if name in MODELS else shape.stem, shape)


def engine(model: Model, settings: Mapping[str, Any]) -> LLM:
    """Engine and worker processes with random weights; the context is cut to what the model has."""
    keywords = {**COMMON, **settings}
    most = load_model_config(resolve_model(str(model.shape))).max_position_embeddings
    return LLM(str(model.shape), **{**keywords, "max_model_len": min(keywords["max_model_len"], most)})


def files(model: Model, settings: Mapping[str, Any]) -> AbstractContextManager[Path]:
    """A checkpoint; every start makes an engine of its own."""
    return checkpoint(model.shape)


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that are measured one after the other with the same engine.

    Attributes:
        settings: of the engine, over ``COMMON``.
        opens: gives what the measures take, in a context that ends it.
    """

    name: str
    cases: tuple[str, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    opens: Callable[[Model, Mapping[str, Any]], AbstractContextManager[Any]] = engine

    def open(self, model: Model) -> AbstractContextManager[Any]:
        """Start the engine, or make what else is measured."""
        return self.opens(model, self.settings)

    def chosen(self, model: Model, wanted: Collection[str]) -> list[str]:
        """Its cases that are to be measured; an empty ``wanted`` stands for all."""
        own = [case for case in self.cases if ONLY.get(case, model.name) == model.name or model.name not in MODELS]
        return [case for case in own if not wanted or case in wanted]


GROUPS = (
    Group("the defaults", ("decode_b1", "decode_b8", "decode_b32", "nano", "uniform", "mix", "idle_b32", "idle_b256")),
    # The steady requests of "mixed" decode for all of its time, in one context.
    Group("the server's --target-itl-ms", ("mixed", "nano_itl"), {"target_itl_ms": None, "max_model_len": 16384}),
    Group("prefix caching", ("prefix",), {"enable_prefix_caching": True}),
    Group(
        "prefix caching and the model's own context",
        ("documents",),
        {"enable_prefix_caching": True, "max_model_len": 131072},
    ),
    Group("starts", ("startup_cold", "startup_warm", "recovery_b64"), opens=files),
    Group("without graphs", ("decode_b1_eager",), {"enforce_eager": True}),
    Group("fp8 KV cache", ("nano_fp8",), {"kv_cache_dtype": "fp8"}),
    Group(
        "batch-invariant", ("decode_b1_invariant", "decode_b32_invariant", "nano_invariant"), {"batch_invariant": True}
    ),
)
"""In the order of their importance."""
CASES = tuple(case for group in GROUPS for case in group.cases)
