"""The process that renders chat templates: ``python -P -m tokenizer_service.template_child SECONDS``.

It reads requests from standard input and answers each on standard output, as msgpack behind a length of four bytes. The
first holds the templates; every other one is a chat. Each has a number, which its answer repeats. It ends with its
standard input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import jinja2
import msgpack

from tokenizer_service.chat_template import ChatError, ChatTemplate

MEMORY_LIMIT = 2 * 1024**3
"""Address space of the process in bytes: a template that builds an endless text gets an error, not the machine."""


def compile_templates(sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> dict[str, ChatTemplate | str]:
    """Each template, or the words of its error."""
    compiled: dict[str, ChatTemplate | str] = {}
    for name, source in sources.items():
        try:
            compiled[name] = ChatTemplate(source, special_tokens)
        except jinja2.TemplateSyntaxError as error:
            compiled[name] = f"line {error.lineno}: {error.message}"
        except jinja2.TemplateError as error:
            compiled[name] = str(error)
    return compiled


def render(templates: Mapping[str, ChatTemplate | str], chat_json: bytes) -> str:
    """The prompt of a chat: by the template ``tool_use`` if there is one and tools are given, else by ``default``."""
    try:
        chat = json.loads(chat_json)
        chat_json.decode()
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the chat is not JSON: {error}") from error
    if not isinstance(chat, dict):
        raise ChatError("the chat must be a JSON object")
    name = "tool_use" if chat.get("tools") and "tool_use" in templates else "default"
    template = templates[name if name in templates else next(iter(templates))]
    if isinstance(template, str):
        raise ChatError(f"the model's chat template is broken ({template}); start with --chat-template FILE")
    text = template.render(chat)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatError("the messages hold half of a surrogate pair, which is not a character") from error
    return text


def serve(source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    """Answer requests until ``source`` ends. A chat that takes twice ``seconds`` ends the process."""
    templates: dict[str, ChatTemplate | str] = {}
    while (request := _read(source)) is not None:
        answer: dict[str, Any]
        if "templates" in request:
            templates = compile_templates(request["templates"], request["special_tokens"])
            answer = {"errors": {name: words for name, words in templates.items() if isinstance(words, str)}}
        else:
            # The parent kills at the limit; the alarm is for a parent that is no longer there.
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
            try:
                answer = {"text": render(templates, request["chat"])}
            except ChatError as error:
                answer = {"error": str(error)}
            signal.setitimer(signal.ITIMER_REAL, 0)
        answer["number"] = request["number"]
        body = msgpack.packb(answer, unicode_errors="surrogatepass")
        sink.write(len(body).to_bytes(4, "little") + body)
        sink.flush()


def _read(source: BinaryIO) -> dict[str, Any] | None:
    size = source.read(4)
    if len(size) < 4:
        return None
    return dict(msgpack.unpackb(source.read(int.from_bytes(size, "little"))))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))


if __name__ == "__main__":
    main()
