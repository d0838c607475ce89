"""Runs steps on a GPU without waiting for it: the host sends a few kilobytes and launches, the device does the rest.

A step of decode rows alone is one CUDA graph: inputs from the slot state, attention's plan, model, sampler, the token
back to the slot state; so is one with a few prefill tokens (``cuda_mixed``). Other steps launch the same kernels one by
one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker import cuda_mixed
from gpu_worker.attention.triton_paged import Metadata, PrefillItems, TritonPagedAttention
from gpu_worker.cuda_graphs import GraphCache, padded_size, padded_sizes
from gpu_worker.cuda_mixed import MixedShape
from gpu_worker.cuda_state import CudaState, Int32, forward_rows
from gpu_worker.cuda_transfers import CudaTransfers
from gpu_worker.device_clock import DeviceClock, HostTimes, StepTimes
from gpu_worker.forward_context import ForwardContext
from gpu_worker.host_copies import Returned, Returns
from gpu_worker.host_pool import HostPool
from gpu_worker.kernels.block_copy import block_copy
from gpu_worker.kernels.prefix_pass import PrefixTables, unpack
from gpu_worker.kernels.state_kernels import DecodeInputs, gather_decode_inputs, gather_span_inputs, write_back
from gpu_worker.kv_cache import KVCache
from gpu_worker.layers.rotary import make_rotary
from gpu_worker.models.base import CausalLM
from gpu_worker.sampling.cuda_sampler import CudaSampler, Samples, Variant, pack
from gpu_worker.sampling.prompt_logprobs import PromptLogprobs, ScoredPrompts
from gpu_worker.shared_prefix import SharedPrefixes, SharingLimits, limits_for
from gpu_worker.step_checks import check_step
from gpu_worker.step_output import StepOutput
from shared.logging import get_logger
from shared.messages import Step
from shared.model_config import ModelConfig

log = get_logger()

Int64 = npt.NDArray[np.int64]
PREPARED_ROWS, PREPARED_ROWS_OF_FULL = 256, 64
"""Decode rows up to which graphs are captured in idle moments; larger ones keep memory that most never need, and do so
only where they gain time."""
Shape = tuple[int | MixedShape, bool, Variant]
"""What the launches of a step depend on: sizes, whether common beginnings of rows have a pass, what is sampled."""


@dataclasses.dataclass(frozen=True, slots=True)
class CudaLaunched:
    """A step that runs, or has run, on the device."""

    number: int
    returned: Returned
    """The sampled ids and, if they are wanted, the log-probabilities."""
    num_samples: int
    logprob_counts: Int64
    """[samples] as of ``CudaSampler.wanted_logprobs``."""
    prompt_logprobs: ScoredPrompts | None
    times: StepTimes | HostTimes
    transferred: Callable[[], int]
    """As of ``CudaTransfers.start``."""
    note: Callable[[float], None] | None = None
    """Wants to know the seconds that the device took."""

    def wait(self) -> StepOutput:
        """Wait for the device. Called by the result thread."""
        tokens, *logprobs = (tensor.numpy() for tensor in self.returned.wait())
        records = pack(logprobs[0][: self.num_samples], self.logprob_counts) if logprobs else []
        prompts = self.prompt_logprobs.pack() if self.prompt_logprobs else []
        compute_s = self.times.compute_s
        if self.note is not None:
            self.note(compute_s)
        transferred = self.transferred()
        return StepOutput(tokens[: self.num_samples], records, prompts, compute_s, self.times.idle_s, transferred)


class CudaRunner:
    """One model on one GPU. ``launch`` is called by one thread only.

    The launch of a step needs no result of the step before on the host: tokens and positions stay in the slot state.

    Args:
        num_tokens: ids from here on have no token and are never sampled; None: all ids have one.
        max_rows: decode rows of a step at most.
        max_tokens: rows of a step at most, prefill tokens and decode rows, in graphs that are captured ahead.
        graphs: replay decode steps from CUDA graphs.
        sharing: when tokens that decode rows have in common are read by a pass of their own; None: when it pays.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: CausalLM,
        backend: TritonPagedAttention,
        cache: KVCache,
        *,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        num_tokens: int | None = None,
        max_rows: int | None = None,
        max_tokens: int = cuda_mixed.MAX_TOKENS,
        graphs: bool = True,
        sharing: SharingLimits | None = None,
    ) -> None:
        self.device = cache.tensor.device
        self.config, self.model, self.backend, self.cache = config, model, backend, cache
        self.block_size, self.num_slots, self.max_model_len = block_size, num_slots, max_model_len
        self.rotary = make_rotary(config, max_model_len, self.device)
        shared, self._prefixes = None, None
        if (layout := backend.prefix_layout) is not None:
            shared = SharedPrefixes(layout, block_size, sharing or limits_for(backend.token_bytes))
        self.state = CudaState(num_slots, max_model_len, block_size, self.device, shared)
        if layout is not None:
            self._prefixes = unpack(layout, self.state.prefixes)
        self.sampler = CudaSampler(num_slots, config.vocab_size, num_tokens, self.device)
        self.prompt_logprobs = PromptLogprobs(num_slots)
        self.sizes = padded_sizes(max_rows or num_slots)
        self._slots = torch.full((self.sizes[-1],), num_slots, dtype=torch.int32, device=self.device)
        """Slots of the decode rows: the input of graphs."""
        self._samples: dict[Shape, Samples] = {}
        """The outputs of graphs."""
        self.transfers = CudaTransfers(cache, None)
        self._graphs = GraphCache(self.device, graphs)
        self._clock, self._returns = DeviceClock(self.device), Returns(self.device)
        self._note: Callable[[float], None] | None = None
        """Of the step that is being launched."""
        self._captures: list[Callable[[], object]] = []
        """What is captured when it has been launched."""
        # Attention in graphs is cut as for one prompt.
        self._mixed_config = backend.prefill_config(cuda_mixed.MAX_TOKENS, cuda_mixed.MAX_TOKENS)
        self._mixed_cut = backend.tile_cut(self._mixed_config)
        largest = cuda_mixed.largest_shape(self._mixed_cut)
        self._mixed_inputs = torch.zeros(largest.size, dtype=torch.int32, device=self.device)
        """``cuda_mixed.pack`` of the step: the input of graphs."""
        self._ahead = self._graphs_ahead()
        self._too_long = max_tokens + 1
        """Tokens from which on steps with prefills gain nothing from graphs, or are none."""

    @property
    def host_pool(self) -> HostPool | None:
        return self.transfers.pool

    def reset(self) -> None:
        """Forget all requests. Blocks keep their content, which nobody refers to any more."""
        self.state.reset()
        self.transfers.reset()

    def rehearse(self, steps: Iterable[Step]) -> None:
        """Launch steps without capturing graphs, and forget them: for their kernels to be compiled and loaded."""
        try:
            with self._graphs.paused():
                for step in steps:
                    self.launch(step)
        finally:
            self._samples.clear()
            self.reset()

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one more of the graphs that decode steps may need, with padding rows only; for idle moments.

        Returns:
            Whether there is another.
        """
        while self._ahead:
            key = self._ahead.popleft()
            if key not in self._graphs and not self._is_too_long(key[0]):
                try:
                    self._prepare(key)
                except torch.OutOfMemoryError as error:
                    log.warning("there is no memory for more graphs ahead", error=str(error).partition("\n")[0])
                    self._ahead.clear()
                break
        return bool(self._ahead)

    def use_cache(self, cache: KVCache, host_pool: HostPool | None = None) -> None:
        """Go on with another KV cache and another pool in host memory, and no requests; graphs know the address of the
        old cache."""
        self.cache, self.transfers = cache, CudaTransfers(cache, host_pool)
        self._graphs.clear()
        self._samples.clear()
        self._ahead = self._graphs_ahead()
        self.reset()

    @torch.inference_mode()
    def launch(self, step: Step) -> CudaLaunched:
        """Run a step.

        Raises:
            StepError: an index in the step is out of range; nothing was changed.
        """
        state, pool = self.state, self.host_pool
        limits = state.max_blocks, self.cache.num_blocks, self.config.vocab_size, pool.num_blocks if pool else 0
        check_step(step, state, state.block_counts, *limits)
        self.sampler.add(step.new)
        for request in step.new:
            self.prompt_logprobs.add(request)
        slots = step.sample[:, 1].astype(np.int64)
        counts, variant = self.sampler.wanted_logprobs(slots), self.sampler.variant_of(slots)
        prompts = self._note = None
        self._captures.clear()
        if not len(step.prefill) and len(step.sample) == len(step.decode) and len(step.decode):
            samples = self._run_decode(step, variant)
        elif (shape := self._mixed_shape(step)) is not None:
            samples = self._run_mixed_graph(step, shape, variant)
        else:
            samples, prompts = self._run_mixed(step, variant)
        times = self._clock.end()
        state.staging.release()
        state.appended(slots)
        wanted = [samples.tokens]
        if samples.logprobs is not None and (counts >= 0).any():
            wanted.append(samples.logprobs)
        returned, transferred = self._returns.send(wanted), self.transfers.start(step)
        for capture in self._captures:
            capture()
        return CudaLaunched(step.number, returned, len(slots), counts, prompts, times, transferred, self._note)

    def _prepare(self, key: Shape) -> None:
        shape, _, variant = key
        padding_slot = self.state.padding_slot
        if isinstance(shape, MixedShape):
            packed = cuda_mixed.pack(shape, padding_slot, cuda_mixed.empty_step())
            self._mixed_inputs[: shape.size].copy_(torch.from_numpy(packed))
            if not self._graphs.try_out(key, lambda: self._keep(key, self._mixed(shape, None, variant))):
                self._too_long = min(self._too_long, shape.rows + shape.tokens)
        else:
            fixed = self._slots[:shape]
            fixed.fill_(padding_slot)
            self._graphs.prepare(key, lambda: self._keep(key, self._decode(fixed, None, variant)))

    def _keep(self, key: Shape, samples: Samples) -> None:
        self._samples[key] = samples

    def _is_too_long(self, shape: int | MixedShape) -> bool:
        """Whether steps of so many tokens gain nothing from a graph, as one of fewer has shown, or never come."""
        return isinstance(shape, MixedShape) and shape.rows + shape.tokens >= self._too_long

    # -- decode rows alone -------------------------------------------------------------------------------------------

    def _run_decode(self, step: Step, variant: Variant) -> Samples:
        """All rows of a step that decodes only."""
        size = padded_size(len(step.decode), self.sizes) or len(step.decode)
        (slots,) = self._update(step, self.state.padded(step.decode, size))
        prefixes = self._common()
        if size > self.sizes[-1]:
            self._clock.begin()
            return self._decode(slots, prefixes, variant)
        fixed = self._slots[:size]
        key = (size, prefixes is not None, variant)
        return self._run_shape(key, fixed, slots, lambda: self._decode(fixed, prefixes, variant))

    def _decode(self, slots: torch.Tensor, prefixes: PrefixTables | None, variant: Variant) -> Samples:
        """Launch a decode step of ``slots`` [rows] int32; reads and writes nothing but what is on the device."""
        state = self.state
        inputs = gather_decode_inputs(slots, state.token_ids, state.num_tokens, state.block_tables, self.block_size)
        metadata = self.backend.prepare_decode(slots, inputs.context_lens, state.block_tables, prefixes)
        hidden = self._forward(inputs.input_ids, inputs.positions, inputs.context_lens, inputs.slot_mapping, metadata)
        return self._sample(hidden, slots, variant)

    # -- prefills, and decode rows beside them -----------------------------------------------------------------------

    def _run_mixed(self, step: Step, variant: Variant) -> tuple[Samples, ScoredPrompts | None]:
        state, num_decodes = self.state, len(step.decode)
        starts, counts = step.prefill[:, 1], step.prefill[:, 2]
        ends = np.cumsum(counts, dtype=np.int64)
        contexts = np.stack([step.prefill[:, 0], ends - counts, counts, starts + counts], 1).astype(np.int32)
        prefill = self.backend.cut_prefill(contexts)
        assert prefill.table is not None
        arrays = (prefill.table, step.decode, *forward_rows(step), step.sample[:, 1])
        table, decode, spans, sample, sample_slots = self._update(step, *arrays)
        self._clock.begin()
        num_prefill = int(counts.sum())
        total = num_prefill + num_decodes
        if not total:
            return self._no_samples(), None
        inputs = gather_span_inputs(
            spans,
            total,
            max(1, int(counts.max(initial=0))),
            state.token_ids,
            state.num_tokens,
            state.prompt_len,
            state.block_tables,
            self.block_size,
        )
        metadata = self.backend.prepare_mixed(
            prefill, table, num_prefill, decode, inputs.positions[num_prefill:] + 1, state.block_tables, self._common()
        )
        hidden = self._forward(inputs.input_ids, inputs.positions, inputs.lengths, inputs.slot_mapping, metadata)
        prompts = self.prompt_logprobs.score(
            step.prefill, state.host_prompt, state.token_ids, hidden, self.model.logits
        )
        if not len(step.sample):
            return self._no_samples(), prompts
        return self._sample(hidden.index_select(0, sample), sample_slots, variant), prompts

    # -- the same in a graph -----------------------------------------------------------------------------------------

    def _mixed_shape(self, step: Step) -> MixedShape | None:
        """The shape of the graph that holds a step; None: it is to be launched kernel by kernel."""
        scored = self.prompt_logprobs.counts[step.prefill[:, 0]] >= 0
        if not self._graphs.enabled or scored.any() or self.backend.shape.batch_invariant or not len(step.prefill):
            return None
        return cuda_mixed.shape_of(step, self._mixed_cut, self.sizes[-1])

    def _run_mixed_graph(self, step: Step, shape: MixedShape, variant: Variant) -> Samples:
        padding_slot = self.state.padding_slot
        (packed,) = self._update(step, cuda_mixed.pack(shape, padding_slot, step))
        prefixes = self._common()
        key = (shape, prefixes is not None, variant)
        fixed = self._mixed_inputs[: shape.size]
        return self._run_shape(key, fixed, packed, lambda: self._mixed(shape, prefixes, variant))

    def _mixed(self, shape: MixedShape, prefixes: PrefixTables | None, variant: Variant) -> Samples:
        """Launch the step that ``_mixed_inputs`` describes."""
        state, rows = self.state, shape.rows
        step = shape.unpack(self._mixed_inputs)
        decode = gather_decode_inputs(
            step.slots, state.token_ids, state.num_tokens, state.block_tables, self.block_size
        )
        prefill = gather_span_inputs(
            step.spans,
            shape.tokens,
            shape.tokens,
            state.token_ids,
            state.num_tokens,
            state.prompt_len,
            state.block_tables,
            self.block_size,
        )
        inputs = DecodeInputs(*(torch.cat(parts) for parts in zip(decode, prefill, strict=True)))
        spans = PrefillItems(None, self._mixed_config, shape.tokens)
        metadata = self.backend.prepare_mixed(
            spans, step.items, 0, step.slots, decode.context_lens, state.block_tables, prefixes
        )
        # What no row writes is zero: garbage of one step would grow in the next.
        metadata.num_tokens = rows
        hidden = self._forward(inputs.input_ids, inputs.positions, inputs.context_lens, inputs.slot_mapping, metadata)
        return self._sample(hidden.index_select(0, step.sample), step.sample_slots, variant)

    def _graphs_ahead(self) -> deque[Shape]:
        """What is worth capturing before it is needed, the likeliest first."""
        ahead: deque[Shape] = deque()
        variants: tuple[tuple[Variant, int], ...] = (("plain", PREPARED_ROWS), ("full", PREPARED_ROWS_OF_FULL))
        if self._graphs.enabled:
            ahead += [(size, False, variant) for variant, most in variants for size in self.sizes if size <= most]
        if self._graphs.captures and not self.backend.shape.batch_invariant:
            ahead += [(shape, False, "plain") for shape in cuda_mixed.shapes_ahead(self._mixed_cut, self.sizes[-1])]
        return ahead

    # -- both --------------------------------------------------------------------------------------------------------

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: Metadata,
    ) -> torch.Tensor:
        metadata.slot_mapping = slot_mapping
        cos, sin = self.rotary(positions, lengths)
        return self.model.forward(input_ids, ForwardContext(self.cache.tensor, metadata, cos, sin))

    def _common(self) -> PrefixTables | None:
        """What the decode rows of the step that was entered last have in common."""
        return self._prefixes if self.state.has_groups else None

    def _update(self, step: Step, *arrays: Int32) -> list[torch.Tensor]:
        """Enter what a step changes; ``arrays`` come along to the device. What the clock counts begins thereafter."""
        copies, *staged = self.state.update(step, step.copies, *arrays)
        if len(copies):
            block_copy(self.cache.tensor, copies)
        return staged

    def _run_shape(
        self, key: Shape, fixed: torch.Tensor, inputs: torch.Tensor, launch: Callable[[], Samples]
    ) -> Samples:
        """Run a step of a fixed shape: the first time kernel by kernel, which compiles and loads what a capture must
        not, and later from a graph if that is faster.

        Capturing takes the host as long as launching, and more. A step of decode rows alone, which the device has done
        in less, waits for its graph. One with prefills is launched once more before, so that the device computes it
        meanwhile and nobody's next token is late.

        Args:
            fixed: the memory that ``launch`` reads its rows from.
            inputs: the step's rows.
        """

        def run() -> None:
            self._keep(key, launch())

        fixed.copy_(inputs)
        self._clock.begin()
        is_worth, is_mixed = self._graphs.is_worth(key), isinstance(key[0], MixedShape)
        if is_worth and (key in self._graphs or not is_mixed):
            self._graphs.run(key, run)
            return self._samples[key]
        began = time.perf_counter()
        samples = launch()
        launch_s = time.perf_counter() - began
        if isinstance(key[0], int) and key[0] <= PREPARED_ROWS:
            self._graphs.note_short(key, launch_s)
        else:
            self._note = functools.partial(self._graphs.note, key, launch_s)
        if is_worth:
            self._captures.append(functools.partial(self._graphs.add, key, run))
        return samples

    def _sample(self, hidden: torch.Tensor, slots: torch.Tensor, variant: Variant) -> Samples:
        """A token for each of ``slots`` [rows] from ``hidden`` [rows, hidden], written to the slots' state."""
        state = self.state
        samples = self.sampler.sample(self.model.logits(hidden), slots, state, variant)
        write_back(slots, samples.tokens, state.token_ids, state.num_tokens, state.limit)
        return samples

    def _no_samples(self) -> Samples:
        return Samples(torch.empty(0, dtype=torch.int32, device=self.device), None)
