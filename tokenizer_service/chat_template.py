"""Chat templates: Jinja in the sandbox that transformers renders them in, and what OpenAI's messages need before that.

Nothing here is imported but Jinja and the standard library: it runs in ``template_child``, a process of its own that
can be killed when a template does not come to an end.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that clients use for an assistant's reasoning; templates read the first or the second."""

_OWN_NAMES = ("messages", "tools", "add_generation_prompt")


class ChatError(Exception):
    """The chat cannot be rendered; the text is for the client."""


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja text.
        special_tokens: variables such as ``bos_token``.

    Raises:
        jinja2.TemplateSyntaxError: with the line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.takes_parts = _iterates_content(tree)
        """It goes through a message's content part by part; else content must be one text."""
        self._tests_for_text = any(test.name == "string" for test in tree.find_all(nodes.Test))

    def render(self, chat: Mapping[str, Any]) -> str:
        """The prompt of ``chat`` (``TextSpec.chat``), equal to transformers' ``apply_chat_template``.

        With ``continue_final_message`` the prompt ends exactly with the text of the last message, blanks included.

        Raises:
            ChatError: the chat has a wrong form, or the template refuses it; the template's own words are kept.
        """
        messages = self._messages(chat.get("messages"))
        continues = bool(chat.get("continue_final_message", False))
        prompts = bool(chat.get("add_generation_prompt", not continues))
        if continues and prompts:
            raise ChatError("add_generation_prompt and continue_final_message exclude each other; set one to false")
        extra = chat.get("chat_template_kwargs") or {}
        for name in _OWN_NAMES:
            if name in extra:
                raise ChatError(f"chat_template_kwargs must not set {name}")
        mark = _mark_end(messages) if continues else ""
        variables = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "messages": messages,
            "tools": chat.get("tools") or None,
            "add_generation_prompt": prompts,
        }
        text = self._run(variables)
        if not continues:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise ChatError("the chat template does not show the final message, so that it cannot be continued")
        return text[:end]

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatError(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise ChatError("the messages are nested too deeply for the chat template") from error
        except Exception as error:
            raise ChatError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _messages(self, given: object) -> list[dict[str, Any]]:
        if not isinstance(given, list) or not given:
            raise ChatError("messages must be a list with at least one message")
        return [self._message(index, message) for index, message in enumerate(given)]

    def _message(self, index: int, given: object) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ChatError(f"messages[{index}] must be an object")
        message = {name: value for name, value in given.items() if value is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            parts = [_checked_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
            content = parts if self.takes_parts else "\n".join(part["text"] for part in parts)
        elif not isinstance(content, str):
            raise ChatError(f"messages[{index}].content must be a string or a list of parts")
        elif self.takes_parts and not self._tests_for_text:
            content = [{"type": "text", "text": content}]
        message["content"] = content
        if "tool_calls" in message:
            message["tool_calls"] = _parsed_calls(message["tool_calls"], f"messages[{index}].tool_calls")
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _checked_part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ChatError(f"{where} must be an object")
    if part.get("type", "text") != "text":
        raise ChatError(f"{where} is of the type {part['type']!r}; this model takes only text")
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{where}.text must be a string")
    return {**part, "type": "text"}


def _parsed_calls(calls: object, where: str) -> list[Any]:
    """Tool calls with their arguments as objects: templates write them out as JSON themselves."""
    if not isinstance(calls, list):
        raise ChatError(f"{where} must be a list")
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ChatError(f"{where}[{index}].function must be an object")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ChatError(f"{where}[{index}].function.arguments is not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ChatError(f"{where}[{index}].function.arguments must be a JSON object")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put a mark behind the last text, where the prompt is cut: it survives templates that trim blanks."""
    mark = f"<end-{secrets.token_hex(16)}>"
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] += mark
    elif last["content"]:
        last["content"][-1] = {**last["content"][-1], "text": last["content"][-1]["text"] + mark}
    else:
        raise ChatError("the final message has no content to continue")
    return mark


# -- the sandbox -----------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether a loop goes over ``message.content``, directly or by a variable or macro argument of that value."""
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node, aliases)
    return isinstance(node, nodes.Filter) and _is_content(node.node, aliases)
