"""What must hold between the fields of a message, whoever sent it: the parts agree in their lengths and indices.

The codec checks each field by its type; these checks let every reader index and slice without checking again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shared.errors import ProtocolError
from shared.messages import FINISHED, Ack, AckRows, Int32, Known, Step, StepResult, Submit, TextDelta, TokenDelta
from shared.sampling import MAX_CHOICES


def check_message(message: Any) -> None:
    """Raises:
    ProtocolError: the fields of the message contradict each other.
    """
    check = _CHECKS.get(type(message))
    if check is not None:
        check(message)


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise ProtocolError(words)


def _check_counts(name: str, counts: Int32, total: int) -> None:
    _require(not counts.size or int(counts.min()) >= 0, f"{name}: a negative count")
    _require(int(counts.sum(dtype=np.int64)) == total, f"{name}: the counts do not add up to {total}")


def _check_indices(name: str, entries: Sequence[tuple[Any, ...]], bound: int) -> None:
    _require(all(0 <= entry[0] < bound for entry in entries), f"{name}: an index is out of range")


def _check_known(known: Sequence[Known]) -> None:
    _require(all(0 <= entry.count <= FINISHED for entry in known), "Submit.known: a count is out of range")


def _check_submit(message: Submit) -> None:
    n = message.spec.params.n
    _require(1 <= n <= MAX_CHOICES, f"Submit: {n} choices are not 1..{MAX_CHOICES}")
    lengths = {len(message.counts), len(message.ends), len(message.known)}
    _require(lengths == {n}, f"Submit: counts, ends and known are not {n} long")
    _check_counts("Submit.counts", message.counts, len(message.tokens))
    _check_known(message.known)
    _require(0 <= message.handle <= FINISHED, "Submit.handle is not an int32")
    prompt = getattr(message.spec, "prompt", None) or getattr(message.spec, "ids", None) or b""
    _require(len(prompt) % 4 == 0, "Submit.spec: the prompt is not int32")


def _check_ack(message: Ack) -> None:
    for entry in message.entries:
        _require(0 <= entry.handle <= FINISHED, "Ack.handle is not an int32")
        _require(all(0 <= have <= FINISHED for have in entry.have), "Ack.have is out of range")


def _check_ack_rows(message: AckRows) -> None:
    _require(not message.rows.size or int(message.rows.min()) >= 0, "AckRows.rows: a negative number")


def _check_delta(name: str, message: TokenDelta | TextDelta) -> None:
    rows = message.rows
    if len(rows):
        _require(int(rows.min()) >= 0, f"{name}.rows: a negative number")
    _check_counts(name, rows[:, 3], len(message.tokens))
    _check_indices(f"{name}.ends", message.ends, len(rows))
    _check_indices(f"{name}.logprobs", message.logprobs, len(rows))


def _check_token_delta(message: TokenDelta) -> None:
    _check_delta("TokenDelta", message)


def _check_text_delta(message: TextDelta) -> None:
    _check_delta("TextDelta", message)
    _require(len(message.pieces) == len(message.tokens), "TextDelta: pieces and tokens differ in length")


def _check_step(message: Step) -> None:
    _require(all(new.num_tokens >= 0 for new in message.new), "Step.new: a negative count")
    total = sum(new.num_tokens for new in message.new)
    _require(total == len(message.new_tokens), "Step.new: the counts do not add up to new_tokens")
    rows = len(message.prefill) + len(message.decode)
    if len(message.sample):
        forward = message.sample[:, 0]
        _require(int(forward.min()) >= 0 and int(forward.max()) < rows, "Step.sample: a row is out of range")


def _check_step_result(message: StepResult) -> None:
    if len(message.counts):
        _check_counts("StepResult.counts", message.counts, len(message.tokens))


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    Submit: _check_submit,
    Ack: _check_ack,
    AckRows: _check_ack_rows,
    TokenDelta: _check_token_delta,
    TextDelta: _check_text_delta,
    Step: _check_step,
    StepResult: _check_step_result,
}
