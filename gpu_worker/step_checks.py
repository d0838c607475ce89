"""Every index of a Step is checked before it is used: a bad one must end the epoch, not read other requests' memory."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from gpu_worker.host_pool import TO_DEVICE, TO_HOST
from gpu_worker.host_slots import HostSlots, Int64
from shared.messages import Int32, Step
from shared.sampling import SamplingParams


class StepError(Exception):
    """A Step that cannot be run; the text names what is wrong in it."""


def check_step(
    step: Step,
    state: HostSlots,
    block_counts: Int64,
    max_blocks: int,
    num_blocks: int,
    vocab_size: int,
    num_host_blocks: int,
) -> None:
    """Check the slots, blocks, ids and rows of ``step`` against the state before it.

    Args:
        block_counts: [slots] blocks in each table.
        max_blocks: of a table.
        num_blocks: of the KV cache.
        num_host_blocks: of the pool in host memory.

    Raises:
        StepError: names the first bad index.
    """
    active, lengths = state.active, state.host_tokens
    if len(step.released) or step.new or len(step.new_tokens):
        _check_range("released slot", step.released, 0, state.num_slots)
        active, lengths = active.copy(), lengths.copy()
        active[step.released] = False
        _check_new(step, state, vocab_size, active, lengths)
    if len(step.blocks):
        _check_range("slot of a block", step.blocks[:, 0], 0, state.num_slots)
        _check_range("block", step.blocks[:, 1], 0, num_blocks)
        _check_room(step, block_counts, max_blocks)
    if len(step.copies):
        _check_copies(step.copies, num_blocks)
    if len(step.transfers):
        _check_transfers(step, num_blocks, num_host_blocks)
    for name, slots in (("prefill", step.prefill[:, 0]), ("decode", step.decode), ("sample", step.sample[:, 1])):
        _check_range(f"slot of a {name} row", slots, 0, state.num_slots)
        _require(active[slots], slots, f"the slot of a {name} row holds no request")
    if len(step.prefill):
        starts, counts = step.prefill[:, 1].astype(np.int64), step.prefill[:, 2].astype(np.int64)
        known = lengths[step.prefill[:, 0]]
        fits = (starts >= 0) & (counts > 0) & (starts + counts <= known)
        _require(fits, step.prefill[:, 0], "a prefill row is not within the known tokens of its slot")
    _check_range("forward row of a sample", step.sample[:, 0], 0, len(step.prefill) + len(step.decode))
    sampled = np.zeros(state.num_slots, np.bool_)
    sampled[step.sample[:, 1]] = True
    if np.count_nonzero(sampled) != len(step.sample):
        raise StepError("a slot takes two tokens in one step")
    _require(lengths[step.decode] > 0, step.decode, "a decode row's slot holds no token")


def _check_new(
    step: Step, state: HostSlots, vocab_size: int, active: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]
) -> None:
    """Check the new requests and enter them into ``active`` and ``lengths``."""
    total = 0
    for request in step.new:
        where = f"new request {request.rid!r}"
        if not 0 <= request.slot < state.num_slots:
            raise StepError(f"{where}: slot {request.slot} is not in 0..{state.num_slots - 1}")
        if active[request.slot]:
            raise StepError(f"{where}: slot {request.slot} holds another request")
        if not 0 < request.num_tokens <= request.limit <= state.max_model_len:
            raise StepError(
                f"{where}: num_tokens {request.num_tokens} and limit {request.limit} are not in order below "
                f"max_model_len {state.max_model_len}"
            )
        if not 0 <= request.prompt_len <= request.num_tokens:
            raise StepError(f"{where}: prompt_len {request.prompt_len} exceeds num_tokens {request.num_tokens}")
        ends = (*request.params.stop_token_ids, *request.eos_ids)
        if any(not 0 <= token < vocab_size for token in ends):
            raise StepError(f"{where}: a stop or end id is not in 0..{vocab_size - 1}")
        params = request.params
        _check_named_ids(where, params, vocab_size)
        active[request.slot] = True
        lengths[request.slot] = request.num_tokens
        total += request.num_tokens
    if total != len(step.new_tokens):
        raise StepError(f"the new requests have {total} tokens, but {len(step.new_tokens)} ids came")
    _check_range("token id", step.new_tokens, 0, vocab_size)


def _check_named_ids(where: str, params: SamplingParams, vocab_size: int) -> None:
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words_token_ids": list(itertools.chain.from_iterable(params.bad_words_token_ids)),
    }
    for field, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise StepError(f"{where}: an id in {field} is not in 0..{vocab_size - 1}")
    if not all(params.bad_words_token_ids):
        raise StepError(f"{where}: bad_words_token_ids holds an empty list")


def _check_copies(copies: Int32, num_blocks: int) -> None:
    """All copies of a step are done at once."""
    _check_range("copied block", copies, 1, num_blocks)
    sources, destinations = copies[:, 0], copies[:, 1]
    if len(np.unique(destinations)) != len(destinations):
        raise StepError("two blocks are copied into one")
    _require(~np.isin(sources, destinations), sources, "a block is both copied and copied into", "block")


def _check_transfers(step: Step, num_blocks: int, num_host_blocks: int) -> None:
    """What a transfer writes nobody else reads or writes."""
    if not num_host_blocks:
        raise StepError("a step has transfers, but there is no pool in host memory")
    directions, blocks, host_blocks = step.transfers.T
    _check_range("direction of a transfer", directions, TO_HOST, TO_DEVICE + 1)
    _check_range("transferred block", blocks, 1, num_blocks)
    _check_range("transferred block of the host", host_blocks, 0, num_host_blocks)
    outwards = directions == TO_HOST
    for what, written, read in (
        ("block of the host", host_blocks[outwards], host_blocks[~outwards]),
        ("block", blocks[~outwards], blocks[outwards]),
    ):
        if len(np.unique(written)) != len(written):
            raise StepError(f"two transfers write one {what}")
        _require(~np.isin(written, read), written, "a transfer writes what another one reads", what)
    used = np.concatenate([step.blocks[:, 1], step.copies.reshape(-1)])
    _require(~np.isin(used, blocks[~outwards]), used, "a step uses what a transfer of its own writes", "block")


def _check_room(step: Step, block_counts: Int64, max_blocks: int) -> None:
    counts = block_counts.copy()
    counts[step.released] = 0
    np.add.at(counts, step.blocks[:, 0], 1)
    full = np.flatnonzero(counts > max_blocks)
    if len(full):
        raise StepError(f"slot {full[0]} has no room for another block in its table")


def _check_range(what: str, values: Int32, low: int, high: int) -> None:
    # One look: as an unsigned number what is below the range is beyond it.
    if values.size and int((values - low if low else values).view(np.uint32).max()) >= high - low:
        bad = values[(values < low) | (values >= high)].flat[0]
        raise StepError(f"{what} {bad} is not in {low}..{high - 1}")


def _require(good: npt.NDArray[np.bool_], numbers: Int32, text: str, what: str = "slot") -> None:
    if not good.all():
        raise StepError(f"{text}: {what} {numbers[~good][0]}")
