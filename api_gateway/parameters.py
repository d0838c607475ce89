"""The sampling parameters of a request, and what its answer shows beside the text."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from api_gateway.fields import COMPLETIONS
from api_gateway.limits import Limits
from shared.errors import RequestError
from shared.sampling import MAX_SEED, SamplingParams

_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name in COMPLETIONS)


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows beside the text."""

    logprobs: int | None = None
    """Log-probabilities of the tokens, with those of so many most probable ones; None: none."""
    prompt_logprobs: int | None = None
    """The same for the prompt, in vLLM's form."""
    echo: bool = False
    """The prompt comes before the text, and before the log-probabilities."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Log-probabilities name tokens ``token_id:N``."""

    @property
    def prompt(self) -> bool:
        """Whether anything of the prompt is shown."""
        return self.echo or self.prompt_logprobs is not None


def shown_of_completion(values: Mapping[str, Any]) -> Shown:
    """Of a checked ``POST /v1/completions``."""
    return _shown(values, values["logprobs"], values["echo"])


def shown_of_chat(values: Mapping[str, Any]) -> Shown:
    """Of a checked ``POST /v1/chat/completions``.

    Raises:
        RequestError: ``top_logprobs`` without ``logprobs``.
    """
    if values["top_logprobs"] and not values["logprobs"]:
        raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    return _shown(values, values["top_logprobs"] if values["logprobs"] else None, echo=False)


def _shown(values: Mapping[str, Any], logprobs: int | None, echo: bool) -> Shown:
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise RequestError("prompt_logprobs is only allowed without stream", "prompt_logprobs")
    return Shown(
        logprobs=logprobs,
        prompt_logprobs=values["prompt_logprobs"],
        echo=echo,
        token_ids=values["return_token_ids"],
        tokens_as_ids=values["return_tokens_as_token_ids"],
    )


def defaults_of(body: Mapping[str, Any], limits: Limits) -> Mapping[str, Any]:
    """What stands for fields that a body leaves out: the model's own, but none that draws where beams are searched."""
    if body.get("use_beam_search") is not True:
        return limits.defaults
    kept = {name: value for name, value in limits.defaults.items() if name == "max_tokens"}
    return {"temperature": 0.0, **kept}


def take_beam_width(values: dict[str, Any]) -> None:
    """Fill in ``beam_width`` of checked values: as vLLM had it, ``best_of``, or ``n``.

    Raises:
        RequestError: it is given without ``use_beam_search``.
    """
    if values["use_beam_search"]:
        values["beam_width"] = values["beam_width"] or values.get("best_of") or values["n"]
    elif values["beam_width"] is not None:
        raise RequestError("beam_width is only allowed with use_beam_search: true", "beam_width")


def sampling_params(
    values: Mapping[str, Any], shown: Shown, limits: Limits, *, choices: int, max_tokens: int | None
) -> SamplingParams:
    """The sampling fields of checked ``values``.

    Args:
        choices: how many are generated.
        max_tokens: what stands for one that both the request and the model leave out.

    Raises:
        RequestError: names the first field that is out of range, or leaves no room for a prompt.
    """
    default = None if limits.model_has_max_tokens else max_tokens
    named = "max_tokens" if values["max_completion_tokens"] is None else "max_completion_tokens"
    fields = {name: values[name] for name in _FIELDS}
    fields |= {
        "n": choices,
        "max_tokens": default if values[named] is None else values[named],
        "logprobs": shown.logprobs,
        "prompt_logprobs": _prompt_logprobs(shown),
    }
    params = SamplingParams(**fields)
    try:
        params.validate(limits.vocab_size)
        if params.max_tokens == 0 and not shown.prompt:
            raise RequestError(
                "max_tokens must be at least 1; 0 is only allowed with echo or prompt_logprobs", "max_tokens"
            )
    except RequestError as error:
        if error.param == "max_tokens" and named != "max_tokens":
            raise RequestError(f"{named}: {error.message}", named) from None
        raise
    params = _capped(params, limits.max_output_tokens)
    _check_room(params, named, limits)
    if choices > values["n"] and params.logprobs is None:
        return dataclasses.replace(params, logprobs=0)
    return params


def seeded(params: SamplingParams) -> SamplingParams:
    """Draw a seed if the request has none, so that a restart of any process does not redraw."""
    return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))


def _prompt_logprobs(shown: Shown) -> int | None:
    wanted = [shown.prompt_logprobs, shown.logprobs if shown.echo else None]
    return max((count for count in wanted if count is not None), default=None)


def _capped(params: SamplingParams, most: int | None) -> SamplingParams:
    """The parameters of choices that may have ``most`` tokens. One that names no ``max_tokens`` still names none."""
    if most is None:
        return params
    wanted = None if params.max_tokens is None else min(params.max_tokens, most)
    return dataclasses.replace(params, max_tokens=wanted, min_tokens=min(params.min_tokens, most))


def _check_room(params: SamplingParams, named: str, limits: Limits) -> None:
    bound = limits.max_model_len
    if bound is None:
        return
    if params.max_tokens is not None and params.max_tokens >= bound:
        raise RequestError(f"{named} {params.max_tokens} leaves no room for a prompt: max_model_len is {bound}", named)
    for name in ("min_tokens", "truncate_prompt_tokens"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > bound:
            raise RequestError(f"{name} {wanted} is more than max_model_len {bound}", name)
