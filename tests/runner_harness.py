"""Drives a ``ModelRunner`` in this process as an engine would, and computes references with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_worker.build import build_runner
from gpu_worker.loading.open_weights import open_weights
from gpu_worker.runner import ModelRunner, StepOutput
from shared.messages import Epoch, SlotInit, Step, WorkerConfig
from shared.model_config import load_model_config
from shared.model_source import local_source
from shared.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
NO_IDS = np.zeros(0, np.int32)


def worker_config(model: Path, **changes: Any) -> WorkerConfig:
    """A small configuration; ``changes`` are of its fields."""
    fields: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 16,
        "num_slots": 12,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9,
        "kv_cache_bytes": None,
        "num_blocks_override": 200,
        "seed": 0,
        "batch_invariant": False,
        "enforce_eager": False,
    }
    return WorkerConfig(**{**fields, **changes})


def make_runner(model: Path, **changes: Any) -> ModelRunner:
    """A runner on the CPU for a folder, a .gguf or a .json file."""
    source = local_source(model, str(model))
    config, shape = worker_config(model, **changes), load_model_config(source)
    return build_runner(config, shape, open_weights(source, shape, config.load_format, config.seed), "cpu")


def array(rows: Sequence[Any], columns: int = 0) -> np.ndarray:
    """Rows as one of a Step's arrays."""
    values = np.array(rows, np.int32)
    return values.reshape(-1, columns) if columns else values


EPOCH = Epoch(1, 1)


def make_step(number: int, epoch: Epoch = EPOCH, **parts: Any) -> Step:
    """A Step from lists; parts that are left out are empty."""
    return Step(
        epoch=epoch,
        number=number,
        new=parts.get("new", []),
        new_tokens=array(parts.get("new_tokens", [])),
        prefill=array(parts.get("prefill", []), 3),
        decode=array(parts.get("decode", [])),
        sample=array(parts.get("sample", []), 2),
        blocks=array(parts.get("blocks", []), 2),
        released=array(parts.get("released", [])),
        copies=array(parts.get("copies", []), 2),
        transfers=array(parts.get("transfers", []), 3),
    )


def slot_init(slot: int, ids: Sequence[int], params: SamplingParams = GREEDY, **changes: Any) -> SlotInit:
    fields: dict[str, Any] = {
        "slot": slot,
        "rid": f"request-{slot}",
        "choice": 0,
        "num_tokens": len(ids),
        "prompt_len": len(ids),
        "start": 0,
        "limit": 512,
        "params": params,
        "eos_ids": [2],
    }
    return SlotInit(**{**fields, **changes})


class Harness:
    """A runner with a simple allocator: blocks are handed out upwards, from 1."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.number = 0
        self.next_block = 1
        self.tables: dict[int, list[int]] = {}
        self.logits: torch.Tensor | None = None
        """Of the last step's sample rows."""
        self.output: StepOutput | None = None
        """Of the last step."""
        project = runner.model.logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            logits = project(hidden)
            self.logits = logits.clone()
            return logits

        runner.model.logits = record  # type: ignore[method-assign]

    def step(self, **parts: Any) -> list[int]:
        """Launch a step; the sampled ids."""
        self.number += 1
        self.output = self.runner.launch(make_step(self.number, **parts)).wait()
        return [int(token) for token in self.output.tokens]

    def blocks_for(self, slot: int, length: int) -> list[tuple[int, int]]:
        """New blocks until ``slot`` has room for ``length`` tokens."""
        table = self.tables.setdefault(slot, [])
        added = []
        while len(table) * self.runner.block_size < length:
            table.append(self.next_block)
            added.append((slot, self.next_block))
            self.next_block += 1
        return added

    def start(self, prompts: dict[int, Sequence[int]], params: SamplingParams = GREEDY, room: int = 0) -> list[int]:
        """Whole prompts of new slots in one step; the first sampled ids."""
        blocks = [pair for slot, ids in prompts.items() for pair in self.blocks_for(slot, len(ids) + room)]
        return self.step(
            new=[slot_init(slot, ids, params) for slot, ids in prompts.items()],
            new_tokens=[token for ids in prompts.values() for token in ids],
            prefill=[(slot, 0, len(ids)) for slot, ids in prompts.items()],
            sample=list(enumerate(prompts)),
            blocks=blocks,
        )

    def decode(self, slots: Sequence[int], length: int) -> list[int]:
        """One token for each slot; ``length``: tokens that they hold after it at most."""
        blocks = [pair for slot in slots for pair in self.blocks_for(slot, length)]
        return self.step(decode=slots, sample=list(enumerate(slots)), blocks=blocks)

    def continued(self, prompt: Sequence[int], count: int, *, moved: bool) -> tuple[list[int], list[torch.Tensor]]:
        """``count`` greedy ids in slot 1 and their logits, after a prompt whose full blocks slot 0 has computed.

        Args:
            moved: by way of the host's pool to other blocks; the old ones are filled with NaNs.
        """
        pool, size = self.runner.host_pool, self.runner.block_size
        self.start({0: prompt}, room=1)
        full = (len(prompt) - 1) // size
        table, released = self.tables.pop(0)[:full], [0]
        if moved:
            assert pool is not None
            hosts = range(pool.num_blocks)[: -full - 1 : -1]
            self.step(decode=[0], sample=[(0, 0)], transfers=[(0, *pair) for pair in zip(table, hosts, strict=True)])
            # Without rows, it waits for those before.
            self.step(released=[0])
            assert self.output is not None
            assert self.output.transferred == self.number
            for block in table:
                self.runner.cache.tensor[:, block].view(torch.uint8).fill_(0xFF)
            table = [self.next_block + index for index in range(full)][::-1]
            self.next_block, released = self.next_block + full, []
            self.step(transfers=[(1, *pair) for pair in zip(table, hosts, strict=True)])
            assert self.output.transferred == self.number
        self.tables[1] = table
        blocks = [(1, block) for block in table] + self.blocks_for(1, len(prompt) + count)
        start = full * size
        ids = self.step(
            new=[slot_init(1, prompt, start=start)],
            new_tokens=prompt,
            prefill=[(1, start, len(prompt) - start)],
            sample=[(0, 1)],
            blocks=blocks,
            released=released,
        )
        assert self.logits is not None
        logits = [self.logits]
        while len(ids) < count:
            ids += self.decode([1], 0)
            logits.append(self.logits)
        return ids, logits

    def generate(self, prompt: Sequence[int], count: int, slot: int = 0, params: SamplingParams = GREEDY) -> list[int]:
        """``count`` tokens after a prompt, alone."""
        output = self.start({slot: prompt}, params)
        while len(output) < count:
            output += self.decode([slot], len(prompt) + len(output))
        return output


def reference_logits(model: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocabulary] of transformers in float32."""
    with torch.inference_mode():
        result: torch.Tensor = reference_model(model)(torch.tensor([list(ids)])).logits[0]
    return result


def reference_greedy(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy ids of transformers in float32."""
    with torch.inference_mode():
        output = reference_model(model).generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in output[0, len(prompt) :]]


_models: dict[Path, Any] = {}


def reference_model(model: Path) -> Any:
    """transformers' model of a folder or a .gguf file, in float32; kept."""
    from transformers import AutoModelForCausalLM

    if model not in _models:
        where = {"gguf_file": model.name} if model.suffix == ".gguf" else {}
        folder = model.parent if where else model
        _models[model] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    return _models[model]


def beam_search(reference: Any, prompt: list[int], width: int, num_tokens: int, **options: Any) -> Any:
    """What ``generate`` of transformers finds with ``width`` beams, best first."""
    with torch.no_grad():
        return reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            **options,
        )
