"""What can never run, and how long a sequence may become."""

from __future__ import annotations

from core_engine.beam_search import beam_blocks, beam_limit
from shared.errors import RequestError


def sequence_limit(
    prompt_len: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    kv_capacity: int | None,
    block_size: int,
    max_output_tokens: int | None = None,
) -> int:
    """Tokens that a sequence may have, prompt included.

    Without ``max_tokens`` it may go on to the end of the context, or of the KV cache if that is shorter. There is room
    for one token even where none is wanted.

    Args:
        kv_capacity: tokens that the smallest KV cache of the workers holds; None: no worker is ready yet.
        max_output_tokens: what takes the place of a larger ``max_tokens``; None: nothing.

    Raises:
        RequestError: the prompt, or the prompt and ``max_tokens``, are longer than that.
    """
    if prompt_len < 1:
        raise RequestError("the prompt is empty", "prompt")
    wanted = max(1, max_tokens or 0)
    if max_output_tokens is not None:
        wanted = min(wanted, max_output_tokens)
    field = "prompt" if prompt_len + 1 > max_model_len else "max_tokens"
    if prompt_len + wanted > max_model_len:
        raise RequestError(f"max_tokens {wanted} + prompt {prompt_len} > max_model_len {max_model_len}", field)
    if kv_capacity is not None and prompt_len + wanted > kv_capacity:
        raise RequestError(
            f"max_tokens {wanted} + prompt {prompt_len} > {kv_capacity} tokens, the size of the KV cache "
            f"({kv_capacity // block_size} blocks of {block_size})",
            "prompt" if prompt_len + 1 > kv_capacity else "max_tokens",
        )
    if max_tokens is not None:
        return prompt_len + wanted
    most = max_model_len if max_output_tokens is None else prompt_len + max_output_tokens
    return min(most, max_model_len, max_model_len if kv_capacity is None else kv_capacity)


def search_limit(prompt_len: int, limit: int, width: int, *, is_fixed: bool, num_blocks: int, block_size: int) -> int:
    """Tokens that each beam of a search may have, prompt included.

    Args:
        limit: for a sequence that runs alone.
        is_fixed: ``max_tokens`` was asked for.
        num_blocks: of the smallest KV cache of the workers.

    Raises:
        RequestError: the beams do not fit.
    """
    found = beam_limit(prompt_len, limit, width, block_size, num_blocks)
    if found > prompt_len and (found == limit or not is_fixed):
        return found
    wanted = beam_blocks(prompt_len, limit if is_fixed else prompt_len + 1, width, block_size)
    raise RequestError(
        f"{width} beams after a prompt of {prompt_len} tokens may need {wanted} blocks of {block_size} tokens, and the "
        f"KV cache has {num_blocks}",
        "beam_width",
    )
