"""What a client is shown of one choice, piece by piece or in one piece."""

from __future__ import annotations

from array import array
from typing import Any

from api_gateway.logprobs import LogprobsOfChoice, logprobs_of_choice
from api_gateway.request_log import ChoiceLog, PromptLog, TextOffset
from api_gateway.schemas import GenerationRequest


class ChoiceOutput:
    """The rows of a choice as text, ids and log-probabilities; an echoed prompt comes before them.

    Args:
        request: what was asked for.
        prompt: of the choice.
        choice: whose rows they are.
    """

    __slots__ = ("_echo", "_logprobs", "_prompt", "_request", "_started", "choice")

    def __init__(self, request: GenerationRequest, prompt: PromptLog, choice: ChoiceLog) -> None:
        self.choice = choice
        self._request = request
        self._prompt = prompt
        self._echo = request.shown.echo
        self._started = False
        self._logprobs: LogprobsOfChoice | None = None

    @property
    def ready(self) -> bool:
        """False while rows wait for the prompt that is shown before them, or for those that the client has."""
        if self._started:
            return True
        return not self.choice.behind and (not self._echo or self._prompt.info is not None)

    @property
    def offset(self) -> TextOffset | None:
        """Of the token after those that were taken, where tokens are shown with their offsets."""
        return None if self._logprobs is None else self._logprobs.offset

    def take(self) -> tuple[str, array[int], dict[str, Any] | None]:
        """The text, the ids and the ``logprobs`` that are new. Only when ``ready``."""
        choice = self.choice
        start = choice.sent_rows
        text, ids = choice.take()
        if not self._started:
            text = self._start() + text
        if self._logprobs is None:
            return text, ids, None
        self._logprobs.add(choice.rows.records[start : start + len(ids)])
        return text, ids, self._logprobs.take()

    def _start(self) -> str:
        """Begin; returns the text that goes before that of the rows."""
        self._started = True
        echoed = self._prompt.info if self._echo else None
        request = self._request
        self._logprobs = logprobs_of_choice(chat=request.kind == "chat", shown=request.shown, echoed=echoed)
        resumed = self.choice.resumed
        if resumed is not None and resumed.begun:
            if self._logprobs is not None:
                self._logprobs.resume(resumed.offset)
            return ""
        return "" if echoed is None else echoed.text
