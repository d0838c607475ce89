"""Sixteen requests of every kind, made from a seed; what their answers say, and whether it is what it has to be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from tests.integration.streams import CHAT, COMPLETIONS, Joined

STREAMS = 16
WORDS = (
    "the water wheel",
    "turns when",
    "headrace is",
    "open and",
    "mill grinds",
    "corn for bread",
    "a river",
    "boats",
)
CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
TOLD = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
"""What an answer says of a choice, and what must not change."""


class Wrong(Exception):
    """A client saw what no client may see."""


class Request(NamedTuple):
    """What a client asks for."""

    path: str
    body: dict[str, Any]
    resumes: bool = False
    """Whether it goes on where it was when its connection closes; else it begins again."""

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


@dataclass(frozen=True)
class Answer:
    """What a whole answer says."""

    choices: dict[int, dict[str, Any]]
    usage: dict[str, int]


@dataclass
class Report:
    """What happened to the requests of a run."""

    answers: dict[int, Answer] = field(default_factory=dict)
    resent: int = 0
    """Requests whose gateway was killed, and which were begun again."""
    resumed: int = 0
    """Streams whose gateway was killed, and which went on after the last event that had come."""
    found_again: int = 0
    """Requests whose gateway was killed before the first event of a stream, or the whole answer, and which were not
    begun again but found by their id."""
    broken: int = 0
    """Connections of all these that closed after the answer had begun."""
    refused: int = 0
    """503 before a request was taken; asked again."""
    wrong: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return len(self.answers) + len(self.wrong)

    @property
    def cut(self) -> int:
        """Connections that closed before the end."""
        return self.resent + self.resumed + self.found_again


def make_requests(seed: int, model: str, tokens: tuple[int, int] = (30, 150)) -> list[Request]:
    """Half streamed; some with n = 2, stop strings, logprobs, penalties; half of each half resume. All reproducible.

    Request 1 and 2 have two choices, 3 and 4 stop strings, 5 and 6 logprobs, whatever the seed is.
    """
    rng = random.Random(seed)
    resuming = {index for odd in (0, 1) for index in rng.sample(range(odd, STREAMS, 2), STREAMS // 4)}
    return [_request(rng, index, model, tokens, index in resuming) for index in range(STREAMS)]


def _request(rng: random.Random, index: int, model: str, tokens: tuple[int, int], resumes: bool) -> Request:
    words = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": rng.randint(*tokens),
        "stream": index % 2 == 0,
        "ignore_eos": rng.random() < 0.7,
        "return_token_ids": True,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5 and index not in (1, 2):
        body |= {"temperature": 0}
    else:
        body |= {
            "temperature": rng.choice([0.7, 1.0, 1.3]),
            "top_p": rng.choice([0.9, 1.0]),
            "seed": rng.getrandbits(31),
        }
    if index % 4 == 1 or index in (2, 8, 14):
        body["n"] = 2 if body["temperature"] else 1
    if rng.random() < 0.3 or index in (3, 4):
        body["stop"] = rng.choice([["qu"], ["th", "zz"], [" w"], ["er", "!?"]])
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
    is_chat = rng.random() < 0.4
    if rng.random() < 0.4 or index in (5, 6):
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if is_chat:
        return Request(CHAT, body | {"messages": [{"role": "user", "content": words}]}, resumes)
    return Request(COMPLETIONS, body | {"prompt": words}, resumes)


def whole(answer: dict[str, Any]) -> Answer:
    """What a plain answer says, choice by choice."""
    found: dict[int, dict[str, Any]] = {}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        told = {name: choice.get(name) for name in TOLD} | {"text": text}
        if told["finish_reason"] is None or choice["index"] in found:
            raise Wrong(f"a choice without an end, or twice: {choice}")
        found[choice["index"]] = told
    return Answer(found, _counts(answer["usage"]))


def joined(chunks: list[dict[str, Any]]) -> Answer:
    """The same of a stream, over all connections that brought it; each choice must have ended exactly once."""
    if len({(chunk["id"], chunk["created"]) for chunk in chunks}) != 1:
        raise Wrong(f"chunks of several answers: {chunks}")
    begun = Counter(c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c.get("delta", ()))
    if any(count > 1 for count in begun.values()):
        raise Wrong(f"choices began {begun} times")
    if [number for number, chunk in enumerate(chunks) if not chunk["choices"]] != [len(chunks) - 1]:
        raise Wrong("there is not one usage chunk at the end")
    parts = Joined(chunks)
    if parts.finish.keys() != parts.text.keys():
        raise Wrong(f"choices {sorted(parts.text)} began, {sorted(parts.finish)} ended")
    found = {}
    for index, text in parts.text.items():
        found[index] = {
            "text": text,
            "token_ids": parts.token_ids[index],
            "logprobs": _columns(parts.logprobs.get(index, [])),
            "finish_reason": parts.finish[index],
            "stop_reason": parts.stop_reason[index],
        }
    return Answer(found, _counts(parts.usage or {}))


def _columns(objects: list[dict[str, Any]]) -> dict[str, list[Any]] | None:
    names = {name for each in objects for name, column in each.items() if column is not None}
    return {name: [value for each in objects for value in each[name]] for name in sorted(names)} or None


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    # How much of a prompt was cached depends on what else was asked.
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def check_answer(request: Request, answer: Answer) -> None:
    """An answer must have all that was asked for, or there would be nothing to compare.

    Raises:
        Wrong: it has not.
    """
    if sorted(answer.choices) != list(range(request.choices)):
        raise Wrong(f"choices {sorted(answer.choices)} for n = {request.choices}")
    generated = 0
    for index, told in answer.choices.items():
        count = len(told["token_ids"] or [])
        generated += count
        if not count:
            raise Wrong(f"choice {index} has no token ids")
        if request.body.get("logprobs"):
            logprobs = told["logprobs"] or {}
            if len(logprobs.get("tokens") or logprobs.get("content") or []) != count:
                raise Wrong(f"choice {index} has not {count} logprobs: {logprobs}")
    if answer.usage["completion_tokens"] != generated:
        raise Wrong(f"{generated} ids, and usage {answer.usage}")


def check_prefix(chunks: list[dict[str, Any]], answer: Answer) -> None:
    """What a client was shown before its connection closed must be how the whole answer begins.

    Raises:
        Wrong: it is not.
    """
    if not chunks:
        return
    shown = Joined(chunks)
    for index, text in shown.text.items():
        told = answer.choices[index]
        if not told["text"].startswith(text):
            raise Wrong(f"choice {index} was shown {text!r}, and then it was {told['text']!r}")
        ids = shown.token_ids[index]
        if told["token_ids"][: len(ids)] != ids:
            raise Wrong(f"choice {index} was given ids {ids}, and then they were {told['token_ids']}")


def differences(expected: dict[int, Answer], got: dict[int, Answer]) -> list[str]:
    """Where answers differ from the undisturbed ones, in words."""
    return [f"request {index}: {words}" for index, answer in got.items() for words in changes(expected[index], answer)]


def changes(before: Answer, now: Answer) -> list[str]:
    """The first difference of each choice, and that of usage."""
    words = []
    if now.choices.keys() != before.choices.keys():
        words.append(f"choices {sorted(now.choices)} for {sorted(before.choices)}")
    for choice, told in before.choices.items():
        said = now.choices.get(choice, {})
        for name in TOLD:
            if said.get(name) != told[name]:
                words.append(f"choice {choice}: {name} was {told[name]!r}, now {said.get(name)!r}")
                break
    if now.usage != before.usage:
        words.append(f"usage was {before.usage}, now {now.usage}")
    return words
