"""Loads a model in a thread of its own, so that the worker's links stay alive meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.loading.open_weights import open_weights
from gpu_worker.loading.progress import Progress
from gpu_worker.start_parts import part_of_start
from shared.errors import StartupError
from shared.logging import get_logger
from shared.messages import WorkerConfig
from shared.model_config import ModelConfig, load_model_config
from shared.model_source import local_source

if TYPE_CHECKING:
    from gpu_worker.step_output import Runner

log = get_logger()


class ModelLoading:
    """One attempt to make a runner for ``config``.

    The weights begin to be read before torch is imported, which takes as long as dequantizing a small model does.

    Args:
        previous: a runner whose model is kept if it is the same one.
    """

    def __init__(self, config: WorkerConfig, device: str, previous: Runner | None, loaded: WorkerConfig | None):
        self.config = config
        self.runner: Runner | None = None
        self.error: Exception | None = None
        """Why there is no runner; a ``StartupError``, unless another attempt may end better."""
        self._doing = "starting to load the model"
        self._progress: Progress | None = None
        self._device, self._previous, self._loaded = device, previous, loaded
        self._thread = threading.Thread(target=self._run, name="load-model", daemon=True)
        self._thread.start()

    @property
    def status(self) -> str:
        """What is being done, in words, and how much of it."""
        percent = None if self._progress is None else self._progress.percent
        return self._doing if percent is None else f"{self._doing}: {percent} %"

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.runner = self._load()
        except StartupError as error:
            self.error = error
        except Exception as error:
            log.exception("loading the model failed")
            self.error = RuntimeError(f"loading the model failed: {type(error).__name__}: {error}")
        else:
            log.info("the model is ready", seconds=round(time.perf_counter() - started, 1))

    def _load(self) -> Runner:
        config = self.config
        if self._previous is not None and self._loaded is not None and same_model(self._loaded, config):
            from gpu_worker.build import with_other_cache

            self._say("keeping the loaded model; making a new KV cache")
            return with_other_cache(self._previous, config)
        source = local_source(Path(config.model), config.model)
        self._say("reading the model's configuration", model=config.model)
        model = load_model_config(source)
        weights = open_weights(source, model, config.load_format, config.seed, read_ahead=self._device != "cpu")
        self._say("loading torch, and reading weights meanwhile")
        with part_of_start("imports"):
            import torch

            from gpu_worker.build import build_runner

        # The other core dequantizes.
        torch.set_num_threads(1)
        self._progress = weights.progress
        self._say("loading the weights", architecture=model.architecture, **_numbers(model))
        return build_runner(config, model, weights, self._device)

    def _say(self, status: str, **details: object) -> None:
        self._doing = status
        log.info(status, **details)


def same_model(one: WorkerConfig, other: WorkerConfig) -> bool:
    """Whether a model loaded for ``one`` serves ``other``."""
    # The attention backend is made for one dtype of the cache, and scales are read for it.
    cache = ("kv_cache_dtype", "block_size", "batch_invariant")
    fields = ("model", "dtype", "load_format", "seed", "rank", "world_size", *cache)
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _numbers(model: ModelConfig) -> dict[str, int]:
    return {"layers": model.num_layers, "hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
