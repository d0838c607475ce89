"""The model's tokenizer, asked in its own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.offline.errors import InvalidRequest
from headrace.offline.prompts import Prompt, chat_prompts
from shared.messages import TextSpec
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from headrace.offline.session import Session


class LLMTokenizer:
    """Text to ids and back, exactly as the served requests have it. Errors are ``ValueError``s.

    Raises:
        InvalidRequest: the session has no tokenizer.
    """

    def __init__(self, session: Session) -> None:
        if not session.with_tokenizer:
            raise InvalidRequest("there is no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init")
        self._session = session

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a text, got {text!r}", "text")
        return self._ids(TextSpec(SamplingParams(), text=text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        ids = np.asarray(token_ids, np.int32)
        return self._session.ask_and_wait(lambda link: link.calls.detokenize(ids)).text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int] | str:
        """The prompt of a conversation, as ids or as text."""
        prompts = chat_prompts(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        ids = self._ids(_spec_of(prompts))
        return ids if tokenize else self.decode(ids)

    def _ids(self, spec: TextSpec) -> list[int]:
        ids: list[int] = self._session.ask_and_wait(lambda link: link.calls.tokenize(spec, False)).tokens.tolist()
        return ids


def _spec_of(prompts: Sequence[Prompt]) -> TextSpec:
    if len(prompts) != 1:
        raise InvalidRequest(f"one conversation is wanted, not {len(prompts)}", "conversation")
    return TextSpec(SamplingParams(), chat=prompts[0].chat)
