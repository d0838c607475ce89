"""What can never run, and how long a sequence may become."""

from __future__ import annotations

from shared.errors import RequestError


def sequence_limit(
    prompt_len: int, max_tokens: int | None, *, max_model_len: int, kv_capacity: int | None, block_size: int
) -> int:
    """Tokens that a sequence may have, prompt included.

    Without ``max_tokens`` it may go on to the end of the context, or of the KV cache if that is shorter. There is room
    for one token even where none is wanted.

    Args:
        kv_capacity: tokens that the smallest KV cache of the workers holds; None: no worker is ready yet.

    Raises:
        RequestError: the prompt, or the prompt and ``max_tokens``, are longer than that.
    """
    if prompt_len < 1:
        raise RequestError("the prompt is empty", "prompt")
    wanted = max(1, max_tokens or 0)
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
    return max_model_len if kv_capacity is None else min(max_model_len, kv_capacity)
