"""The sampling parameters of slots in the form that the kernels read (``sampling_layout``)."""

from __future__ import annotations

import zlib
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.host_copies import Staging
from gpu_worker.kernels import sampling_layout as layout
from gpu_worker.kernels.sampling_params import scatter_params
from gpu_worker.sampling.bad_words import left_padded
from gpu_worker.sampling.noise import request_keys
from gpu_worker.sampling.repetition_penalty import SMALLEST
from shared.messages import SlotInit
from shared.sampling import SamplingParams

Int32 = npt.NDArray[np.int32]
ARENA_WORDS = 1 << 20
SMALLEST_BLOCK = 64
NOTHING = np.empty(0, np.int32)


class SlotParams:
    """Records and lists of all slots.

    Attributes:
        records: [slots, RECORD] int32 on the device.
        arena_address: [1] int64 on the device, the address of the arena.
        flags: [slots] int32 on the host, the flags of the records.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.records = torch.zeros((num_slots, layout.RECORD), dtype=torch.int32, device=device)
        self.flags: Int32 = np.zeros(num_slots, np.int32)
        self._arena = torch.zeros(ARENA_WORDS, dtype=torch.int32, device=device)
        self.arena_address = torch.tensor([self._arena.data_ptr()], dtype=torch.int64, device=device)
        self.blocks = Blocks()
        self._staging = Staging(device)

    def add(self, inits: list[SlotInit]) -> None:
        """Requests take their slots."""
        seeds = [_seed_of(request) for request in inits]
        keys = request_keys(torch.tensor(seeds), torch.tensor([request.choice for request in inits])).numpy()
        places = np.empty((len(inits), 4), np.int32)
        words: list[Int32] = []
        offset = 0
        for place, key, request in zip(places, keys, inits, strict=True):
            record, lists = record_of(request, self._vocab_size)
            record[layout.KEY_LOW.value : layout.KEY_HIGH.value + 1] = key[None].view(np.int32)
            saved = _saved(record)
            block = self.blocks.take(request.slot, len(lists) + saved)
            record[layout.LISTS.value] = block
            self.flags[request.slot] = record[layout.FLAGS.value]
            place[:] = request.slot, offset, len(lists), block
            words += record, lists
            offset += len(record) + len(lists)
        self._grow()
        device_places, staged = self._staging.copy(places, np.concatenate(words))
        scatter_params(device_places, staged, int(places[:, 2].max()), self.records, self._arena)
        self._staging.release()

    def _grow(self) -> None:
        """Move to a larger arena if this one is too small. What runs before on the stream reads the old one."""
        if self.blocks.end <= len(self._arena):
            return
        arena = torch.zeros(max(2 * len(self._arena), self.blocks.end), dtype=torch.int32, device=self._arena.device)
        arena[: len(self._arena)] = self._arena
        self._arena = arena
        self.arena_address.fill_(arena.data_ptr())


class Blocks:
    """Blocks of the arena, by slot. Sizes are powers of two, so that a block that was given back fits again.

    Attributes:
        end: words that blocks have been made of.
    """

    def __init__(self) -> None:
        self.end = 0
        self._of: dict[int, tuple[int, int]] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, slot: int, words: int) -> int:
        """Where the slot's block begins, in place of the one that it had; 0 for no words."""
        if slot in self._of:
            start, size = self._of.pop(slot)
            self._free[size].append(start)
        if not words:
            return 0
        size = max(SMALLEST_BLOCK, 1 << (words - 1).bit_length())
        if self._free[size]:
            start = self._free[size].pop()
        else:
            start, self.end = self.end, self.end + size
        self._of[slot] = start, size
        return start


def record_of(request: SlotInit, vocab_size: int) -> tuple[Int32, Int32]:
    """A slot's record, without what depends on its place and its seed, and its lists without ``saved``."""
    params = request.params
    drawn = not is_greedy(params, vocab_size)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    output = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    repetition = np.float32(max(params.repetition_penalty, SMALLEST))
    ends = sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_ids)))
    ends = ends if params.min_tokens else []
    words = params.bad_words_token_ids
    flags = (
        (layout.DRAWN, drawn),
        (layout.ALLOWED, bool(params.allowed_token_ids)),
        (layout.BAD_WORDS, bool(words)),
        (layout.MIN_TOKENS, bool(ends)),
        (layout.LOGIT_BIAS, bool(params.logit_bias)),
        (layout.REPETITION, repetition != 1.0),
        (layout.OUTPUT_PENALTY, output),
        (layout.TOP_K, drawn and top_k > 0),
        (layout.TOP_P, drawn and bool(np.float32(params.top_p) < 1.0)),
        (layout.MIN_P, drawn and params.min_p > 0.0),
        (layout.LOGPROBS, params.logprobs is not None),
    )
    temperature = np.float32(params.temperature if drawn else 1.0)
    allowed = bitset(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else NOTHING
    prefixes = left_padded([word[:-1] for word in words]) if words else np.empty((0, 0), np.int32)
    record = np.zeros(layout.RECORD, np.int32)
    floats = record.view(np.float32)
    record[layout.FLAGS.value] = sum(flag.value for flag, on in flags if on)
    floats[layout.SCALE.value] = np.float32(1.0) / temperature
    record[layout.TOP_K_COUNT.value] = top_k
    floats[layout.TOP_P_SUM.value] = params.top_p
    floats[layout.MIN_P_OFFSET.value] = temperature * np.float32(np.log(params.min_p)) if params.min_p > 0 else 0.0
    floats[layout.REPETITION_FACTOR.value] = repetition
    floats[layout.FREQUENCY_COST.value] = params.frequency_penalty
    floats[layout.PRESENCE_COST.value] = params.presence_penalty
    record[layout.MIN_TOKENS_COUNT.value] = params.min_tokens
    record[layout.LOGPROBS_COUNT.value] = params.logprobs or 0
    record[layout.ALLOWED_COUNT.value] = len(allowed)
    record[layout.WORDS_COUNT.value] = len(words)
    record[layout.WORDS_LONGEST.value] = prefixes.shape[1]
    record[layout.ENDS_COUNT.value] = len(ends)
    record[layout.BIASES_COUNT.value] = len(params.logit_bias)
    lists = (
        allowed,
        prefixes.reshape(-1),
        np.array([word[-1] for word in words], np.int32),
        np.array(ends, np.int32),
        np.array([token for token, _ in params.logit_bias], np.int32),
        np.array([bias for _, bias in params.logit_bias], np.float32).view(np.int32),
    )
    return record, np.concatenate(lists)


def is_greedy(params: SamplingParams, vocab_size: int) -> bool:
    """Also where only the most probable token can stay: its probability is at least 1 / vocab_size."""
    return params.greedy or params.top_k == 1 or params.min_p >= 1.0 or params.top_p <= 1.0 / vocab_size


def bitset(ids: list[int], vocab_size: int) -> Int32:
    """[ceil(vocab_size / 32)], bit i % 32 of word i // 32 is set for each id i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _seed_of(request: SlotInit) -> int:
    return zlib.crc32(request.rid.encode()) if request.params.seed is None else request.params.seed


def _saved(record: Int32) -> int:
    return int(max(record[layout.WORDS_COUNT.value], record[layout.ENDS_COUNT.value]))
