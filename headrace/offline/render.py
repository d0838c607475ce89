"""From what the hop holds of a request to vLLM's output objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.offline.jobs import Job
from headrace.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from shared.hop import Log
from shared.logprobs import Logprobs, TokenLogprob, unpack, unpack_text
from shared.messages import End, FinishReason, PromptInfo, TextSpec

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


def request_output(job: Job) -> RequestOutput:
    """The output of a job that is over and did not fail."""
    logs = job.request.logs if job.request is not None else []
    choices = best_choices(job, [completion(job, log) for log in logs])
    prompt = next((log.prompt for log in logs if log.prompt is not None), None)
    return assemble(job, choices, prompt, max((log.end.cached_tokens for log in logs if log.end), default=0))


def completion(job: Job, log: Log) -> CompletionOutput:
    """One choice as a whole."""
    text = "".join(log.pieces) + log.last_piece if job.params.detokenize else ""
    output = CompletionOutput(log.choice, text, log.ids.tolist(), delta=text)
    if job.spec.params.logprobs is not None:
        output.logprobs, output.cumulative_logprob = positions(job, log.records)
    return finished(output, log.end)


def finished(output: CompletionOutput, end: End | None) -> CompletionOutput:
    """Fill in how a choice ended."""
    if end is not None:
        output.finish_reason = FINISH_REASONS.get(end.reason, "error")
        output.stop_reason = end.stop_reason
    return output


def best_choices(job: Job, choices: list[CompletionOutput]) -> list[CompletionOutput]:
    """With ``best_of``, the ``n`` choices with the highest log-probability per token, best first."""
    if len(choices) == job.params.n:
        return choices
    ranked = sorted(choices, key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, len(each.token_ids)))
    chosen = ranked[: job.params.n]
    for index, choice in enumerate(chosen):
        choice.index = index
        if job.params.logprobs is None:
            choice.logprobs = choice.cumulative_logprob = None
    return chosen


def assemble(
    job: Job, choices: list[CompletionOutput], prompt: PromptInfo | None, cached_tokens: int | None
) -> RequestOutput:
    """The output of a request from its choices."""
    given = job.prompt
    ids = given.ids if given.ids is not None else np.frombuffer(prompt.ids if prompt is not None else b"", "<i4")
    text = given.text
    if given.chat is not None:
        text = prompt.text if prompt is not None else ""
    return RequestOutput(
        request_id=job.request_id,
        prompt=text,
        prompt_token_ids=ids.tolist(),
        prompt_logprobs=_prompt_logprobs(job, prompt),
        outputs=choices,
        finished=job.over,
        metrics=RequestMetrics(
            job.arrived, job.first_token_at or None, job.last_token_at or None, job.finished_at or None
        ),
        num_cached_tokens=cached_tokens,
    )


def positions(job: Job, records: Sequence[bytes]) -> tuple[list[PositionLogprobs], float]:
    """The positions of log-probability records, and the sum of their tokens' own."""
    read = unpack_text if isinstance(job.spec, TextSpec) else unpack
    unpacked = [read(record) for record in records]
    return [_position(each) for each in unpacked], sum(each.token.logprob for each in unpacked)


def _prompt_logprobs(job: Job, prompt: PromptInfo | None) -> list[PositionLogprobs | None] | None:
    if job.params.prompt_logprobs is None or prompt is None:
        return None
    return [None, *positions(job, prompt.records)[0]]


def _position(record: Logprobs) -> PositionLogprobs:
    found = {record.token.token_id: _logprob(record.token, record.rank)}
    for rank, token in enumerate(record.top, 1):
        if token.token_id not in found:
            found[token.token_id] = _logprob(token, rank)
    return found


def _logprob(token: TokenLogprob, rank: int) -> Logprob:
    return Logprob(token.logprob, rank, None if token.text is None else token.text.decode(errors="replace"))
