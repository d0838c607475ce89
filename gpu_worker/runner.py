"""Runs steps: gather the inputs of a step, run the model, sample, write the tokens back to the slots."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.attention.base import AttentionBackend, Spans
from gpu_worker.block_tables import BlockTables
from gpu_worker.forward_context import ForwardContext
from gpu_worker.host_pool import HostPool
from gpu_worker.kv_cache import KVCache
from gpu_worker.layers.rotary import make_rotary
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestState
from gpu_worker.sampling.base import SampleRows
from gpu_worker.sampling.logprobs import SampledLogprobs, SampleLogprobs
from gpu_worker.sampling.prompt_logprobs import PromptLogprobs, ScoredPrompts
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step_checks import check_step
from gpu_worker.step_output import StepOutput
from shared.messages import Step
from shared.model_config import ModelConfig

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs, or has run, on the device."""

    number: int
    tokens: torch.Tensor
    """[sample rows] int64 on the device."""
    logprobs: SampledLogprobs | None
    prompt_logprobs: ScoredPrompts | None
    started: float

    def wait(self) -> StepOutput:
        """Wait for the device. Called by the result thread."""
        tokens = self.tokens.to("cpu", torch.int32).numpy()
        logprobs = self.logprobs.pack() if self.logprobs else []
        prompt_logprobs = self.prompt_logprobs.pack() if self.prompt_logprobs else []
        compute_s = time.perf_counter() - self.started
        return StepOutput(tokens, logprobs, prompt_logprobs, compute_s, transferred=self.number)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """The forward rows of a step, as arrays of tokens. Rows are spans of tokens of one slot each."""

    spans: Spans
    slots: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64."""
    last: Int64
    """[rows] the index of each row's last token."""


class ModelRunner:
    """One model on one device. ``launch`` is called by one thread only.

    The launch of a step needs no result of the step before on the host: tokens and positions stay in the slot state.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: CausalLM,
        backend: AttentionBackend,
        cache: KVCache,
        *,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        num_tokens: int | None = None,
        host_pool: HostPool | None = None,
    ) -> None:
        """
        Args:
            num_tokens: ids from here on have no token and are never sampled; None: all ids have one.
            host_pool: where blocks are transferred to; None: nowhere.
        """
        self.device = cache.tensor.device
        self.config, self.model, self.backend, self.cache = config, model, backend, cache
        self.block_size, self.num_slots, self.max_model_len = block_size, num_slots, max_model_len
        self.num_tokens, self.host_pool = num_tokens, host_pool
        self.rotary = make_rotary(config, max_model_len, self.device)
        self.reset()

    def prepare(self) -> bool:
        """Nothing is made ahead on a CPU."""
        return False

    def reset(self) -> None:
        """Forget all requests. Blocks keep their content, which nobody refers to any more."""
        self.state = RequestState(self.num_slots, self.max_model_len, self.device)
        self.tables = BlockTables(self.num_slots, self.max_model_len, self.block_size, self.device)
        self.sampler = Sampler(self.num_slots, self.config.vocab_size, self.num_tokens, self.device)
        self.logprobs = SampleLogprobs(self.num_slots)
        self.prompt_logprobs = PromptLogprobs(self.num_slots)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run a step.

        Raises:
            StepError: an index in the step is out of range; nothing was changed.
        """
        tables, pool = self.tables, self.host_pool
        max_blocks, num_blocks = tables.tensor.shape[1], self.cache.num_blocks
        num_host_blocks = pool.num_blocks if pool else 0
        check_step(step, self.state, tables.counts, max_blocks, num_blocks, self.config.vocab_size, num_host_blocks)
        if pool is not None:
            # Nothing is left to wait for afterwards, and it does not count as time of the step.
            pool.copy(self.cache, step.transfers)
        started = time.perf_counter()
        self._update(step)
        inputs = self._gather(step)
        tokens, logprobs, prompts = torch.empty(0, dtype=torch.int64, device=self.device), None, None
        if len(inputs.last):
            hidden = self._forward(inputs)
            state = self.state
            prompts = self.prompt_logprobs.score(
                step.prefill, state.host_prompt, state.token_ids.view(self.num_slots, -1), hidden, self.model.logits
            )
            if len(step.sample):
                tokens, logprobs = self._sample(step, inputs, hidden)
        return Launched(step.number, tokens, logprobs, prompts, started)

    def _update(self, step: Step) -> None:
        """Slots given up, slots taken, blocks appended, blocks copied: in this order."""
        released = step.released.astype(np.int64)
        self.state.release(released)
        self.tables.clear(released)
        self.state.add(step.new, step.new_tokens)
        for request in step.new:
            for component in (self.sampler, self.logprobs, self.prompt_logprobs):
                component.add(request)
        self.tables.append(step.blocks[:, 0].astype(np.int64), step.blocks[:, 1].astype(np.int64))
        if len(step.copies):
            self.cache.copy(self.state.staged(step.copies.astype(np.int64)))

    def _gather(self, step: Step) -> Inputs:
        state, prefill = self.state, step.prefill.astype(np.int64)
        decode = step.decode.astype(np.int64)
        starts, counts = prefill[:, 1], prefill[:, 2]
        spans = Spans(
            slots=np.concatenate([prefill[:, 0], decode]),
            counts=np.concatenate([counts, np.ones(len(decode), np.int64)]),
            contexts=np.concatenate([starts + counts, state.host_tokens[decode]]),
        )
        ends = np.cumsum(spans.counts)
        slots = state.staged(np.repeat(spans.slots, spans.counts))
        num_prefill = int(counts.sum())
        known = np.arange(num_prefill) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        positions = torch.cat([state.staged(known), state.num_tokens[slots[num_prefill:]] - 1])
        return Inputs(spans, slots, positions, ends - 1)

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        state, slots, positions = self.state, inputs.slots, inputs.positions
        token_ids = state.token_ids[slots * self.max_model_len + positions]
        slot_mapping = self.tables.slot_mapping(slots, positions)
        cos, sin = self.rotary(positions, torch.maximum(state.prompt_len[slots], positions + 1))
        attention = self.backend.prepare(inputs.spans, self.tables.tensor, positions, slot_mapping)
        return self.model.forward(token_ids, ForwardContext(self.cache.tensor, attention, cos, sin))

    def _sample(self, step: Step, inputs: Inputs, hidden: torch.Tensor) -> tuple[torch.Tensor, SampledLogprobs | None]:
        host_slots = step.sample[:, 1].astype(np.int64)
        slots = self.state.staged(host_slots)
        rows = self.state.staged(inputs.last[step.sample[:, 0]])
        logits = self.model.logits(hidden[rows])
        num_tokens = self.state.host_tokens[host_slots]
        sample_rows = SampleRows(
            slots=host_slots,
            num_outputs=num_tokens - self.state.host_prompt[host_slots],
            positions=self.state.num_tokens[slots],
            num_tokens=num_tokens,
            token_ids=self.state.token_ids.view(self.num_slots, self.max_model_len),
        )
        distributions = self.logprobs.before(logits, sample_rows)
        tokens = self.sampler.sample(logits, sample_rows)
        logprobs = self.logprobs.after(distributions, tokens, sample_rows)
        self.state.append(slots, host_slots, tokens)
        return tokens, logprobs
