from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import jinja2
import msgpack
import pytest
from transformers import PreTrainedTokenizerFast

from shared.errors import ErrorCode, RequestError
from shared.model_source import resolve_model
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level
from tokenizer_service.chat_template import ChatError, ChatTemplate
from tokenizer_service.template_runner import TemplateRunner
from tokenizer_service.vocabulary import load_vocabulary

DEMO = load_vocabulary(resolve_model("demo")).chat_templates["default"]

LLAMA3 = """
{{- bos_token }}
{%- if tools is not none %}
    {{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN = """{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

PARTS = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)

SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
TURNS = [{"role": "user", "content": " Hi <b>&ünï</b> "}, {"role": "assistant", "content": "Yes.\n"}]
ASK = [*TURNS, {"role": "user", "content": "What?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": {"command": "dâte"}}}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
HISTORY = [
    {"role": "user", "content": "date?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Sunday"},
]


def transformers_render(template: str, chat: dict[str, Any]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(LLAMA3_SPECIAL), **SPECIAL)
    options = {k: v for k, v in chat.items() if k not in ("messages", "chat_template_kwargs")}
    return str(
        tokenizer.apply_chat_template(
            chat["messages"],
            chat_template=template,
            tokenize=False,
            **{"add_generation_prompt": True} | options,
            **chat.get("chat_template_kwargs", {}),
        )
    )


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (DEMO, {"messages": ASK}),
        (DEMO, {"messages": [{"role": "system", "content": "Be brief."}, *ASK], "add_generation_prompt": False}),
        (LLAMA3, {"messages": ASK}),
        (LLAMA3, {"messages": HISTORY, "tools": TOOLS}),
        (QWEN, {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN, {"messages": HISTORY}),
        (QWEN, {"messages": [*TURNS[:1], {"role": "assistant", "content": "<think>a</think>\nb"}]}),
        (GEMMA, {"messages": ASK}),
        (PARTS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}]}),
        (DEMO, {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": False}),
    ],
)
def test_prompts_equal_those_of_transformers(template: str, chat: dict[str, Any]) -> None:
    assert ChatTemplate(template, SPECIAL).render(chat) == transformers_render(template, chat)


@pytest.mark.parametrize("template", [LLAMA3, QWEN])
def test_tool_arguments_may_be_json_text(template: str) -> None:
    text = json.loads(json.dumps(HISTORY))
    text[1]["tool_calls"][0]["function"]["arguments"] = '{"command": "dâte"}'
    compiled = ChatTemplate(template, SPECIAL)
    assert compiled.render({"messages": text}) == compiled.render({"messages": HISTORY})
    text[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(ChatError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"):
        compiled.render({"messages": text})


def test_parts_are_joined_for_templates_of_text_and_kept_for_templates_of_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    joined = [{"role": "user", "content": "A\nB"}]
    for template in (DEMO, LLAMA3, QWEN, GEMMA):
        compiled = ChatTemplate(template, SPECIAL)
        assert not compiled.takes_parts
        assert compiled.render({"messages": parts}) == compiled.render({"messages": joined})
    compiled = ChatTemplate(PARTS, {})
    assert compiled.takes_parts
    assert compiled.render({"messages": parts}) == "user:[A][B];"
    assert compiled.render({"messages": joined}) == "user:A\nB;"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}",
        "{% set body = m.content %}{% for c in body %}{{ c.text }}{% endfor %}",
        "{% for c in m.content[:] | list %}{{ c.text }}{% endfor %}",
    ],
)
def test_text_becomes_a_part_where_a_template_knows_only_parts(loop: str) -> None:
    compiled = ChatTemplate("{% for m in messages %}" + loop + "{% endfor %}", {})
    assert compiled.takes_parts
    assert compiled.render({"messages": [{"role": "user", "content": "A"}]}) == "A"


@pytest.mark.parametrize("text", ["OK!\n", "OK! ", "OK!", "OK!\n\n  "])
@pytest.mark.parametrize("template", [DEMO, LLAMA3, QWEN, GEMMA, PARTS])
def test_a_continued_message_keeps_its_blanks(template: str, text: str) -> None:
    compiled = ChatTemplate(template, SPECIAL)
    chat = {"continue_final_message": True, "add_generation_prompt": False}
    for content in (text, [{"type": "text", "text": text}]):
        messages = [*TURNS[:1], {"role": "assistant", "content": content}]
        assert compiled.render({"messages": messages, **chat}).endswith("OK!" + text[3:])


def test_what_cannot_be_rendered_is_said_in_the_templates_words() -> None:
    gemma = ChatTemplate(GEMMA, SPECIAL)
    system = {"role": "system", "content": "x"}
    for chat, words in [
        ({"messages": [system, *TURNS]}, "^System role not supported$"),
        ({"messages": [*TURNS[:1], *TURNS[:1]]}, "^Conversation roles must alternate"),
        ({"messages": TURNS, "continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"messages": []}, "at least one"),
        ({"messages": ["x"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url'; this model takes only text",
        ),
        ({"messages": TURNS, "chat_template_kwargs": {"messages": []}}, "must not set messages"),
    ]:
        with pytest.raises(ChatError, match=words):
            gemma.render(chat)
    with pytest.raises(ChatError, match="no content to continue"):
        ChatTemplate(PARTS, {}).render({"messages": [{"role": "user", "content": []}], "continue_final_message": True})
    with pytest.raises(ChatError, match="TypeError"):
        ChatTemplate("{{ 1 + messages[0].content }}", {}).render({"messages": TURNS})


def test_the_sandbox_and_the_extensions() -> None:
    with pytest.raises(ChatError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render({"messages": TURNS})
    with pytest.raises(ChatError, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}", {}).render({"messages": TURNS})
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    text = loop + "{% generation %}g{% endgeneration %}"
    assert ChatTemplate(text, {}).render({"messages": TURNS}) == "01g"
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render({"messages": TURNS}) == time.strftime("%Y")
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}", {})


# -- in its own process ----------------------------------------------------------------------------------------------


async def runner(source: str, limit_s: float = 5.0, **more: str) -> TemplateRunner:
    made = TemplateRunner({"default": source, **more}, SPECIAL, limit_s)
    assert await made.start() == {}
    return made


async def test_the_child_renders_and_refuses() -> None:
    made = await runner(GEMMA, tool_use="tools: {{ tools | length }}")
    assert await made.render(json.dumps({"messages": ASK}).encode()) == ChatTemplate(GEMMA, SPECIAL).render(
        {"messages": ASK}
    )
    assert await made.render(json.dumps({"messages": ASK, "tools": TOOLS}).encode()) == "tools: 1"
    for chat, words in [
        (json.dumps({"messages": [{"role": "system", "content": "x"}]}).encode(), "System role not supported"),
        (b"\xff{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b"[" * 100_000, "not JSON"),
    ]:
        with pytest.raises(RequestError, match=words) as caught:
            await made.render(chat)
        assert (caught.value.param, caught.value.code) == ("messages", ErrorCode.INVALID_REQUEST)
    await made.close()


async def test_an_endless_template_is_killed_and_others_go_on() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    made = await runner("{% if messages[0].content == 'loop' %}" + loop + "{% endif %}ok", limit_s=0.5)
    endless, good = ({"messages": [{"role": "user", "content": text}]} for text in ("loop", "fine"))

    async def ask(chat: dict[str, Any]) -> str:
        try:
            return await made.render(json.dumps(chat).encode())
        finally:
            made._limit_s = 60.0  # for the others, whatever the pace of this machine

    answers = await asyncio.gather(*map(ask, (endless, good, good)), return_exceptions=True)
    assert isinstance(answers[0], RequestError)
    assert "longer than 0.5 s" in answers[0].message
    assert answers[1:] == ["ok", "ok"]
    await made.close()


async def test_memory_is_bounded_and_a_killed_child_is_replaced() -> None:
    made = await runner("{% if messages[0].content == 'big' %}{{ 'x' * 10000000000 }}{% endif %}ok")
    with pytest.raises(RequestError, match="MemoryError"):
        await made.render(b'{"messages": [{"role": "user", "content": "big"}]}')
    assert made._child is not None
    made._child.kill()
    fine = b'{"messages": [{"role": "user", "content": "x"}]}'
    with pytest.raises(RequestError) as caught:
        await made.render(fine)
    assert caught.value.code is ErrorCode.INTERNAL
    assert await made.render(fine) == "ok"
    await made.close()


async def test_no_template_and_a_broken_template() -> None:
    none = TemplateRunner({}, {})
    assert await none.start() == {}
    with pytest.raises(RequestError, match="--chat-template"):
        await none.render(b"{}")
    broken = TemplateRunner({"default": "{% for %}"}, {})
    assert list(await broken.start()) == ["default"]
    with pytest.raises(RequestError, match="chat template is broken"):
        await broken.render(b"{}")
    await broken.close()


async def test_a_chat_before_the_start_leaves_one_child() -> None:
    before = children()
    early = TemplateRunner({"default": GEMMA}, SPECIAL)
    chat = json.dumps({"messages": ASK}).encode()
    first = await early.render(chat)
    assert await early.start() == {}
    assert len(children() - before) == 1
    assert await early.render(chat) == first
    await early.close()
    assert children() <= before


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.02, 0.1, 0.3])
async def test_nobody_gets_the_prompt_of_a_chat_that_was_aborted(pause_s: float) -> None:
    """While the child starts, and while it renders."""
    runner = TemplateRunner({"default": GEMMA}, SPECIAL)

    def chat(number: int) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": f"chat {number}"}]}).encode()

    for number in range(4):
        asking = [asyncio.ensure_future(runner.render(chat(10 * number + each))) for each in range(3)]
        await asyncio.sleep(pause_s)
        for task in asking[:2]:
            task.cancel()
        assert f"chat {10 * number + 2}" in await asking[2]
        assert f"chat {10 * number + 5}" in await runner.render(chat(10 * number + 5))
    await runner.close()


async def test_an_answer_to_somebody_else_is_not_taken() -> None:
    runner = TemplateRunner({"default": GEMMA}, SPECIAL)
    chat = json.dumps({"messages": ASK}).encode()
    expected = await runner.render(chat)
    runner._number += 1  # as if an answer had been left unread
    assert runner._child is not None
    assert runner._child.stdin is not None
    body = msgpack.packb({"chat": chat, "number": 0})
    runner._child.stdin.write(len(body).to_bytes(4, "little") + body)
    with pytest.raises(RequestError, match="died"):
        await runner.render(chat)
    assert await runner.render(chat) == expected
    await runner.close()


def children() -> set[int]:
    """Processes that this one has started and that run."""
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def test_the_demo_prompt(tmp_path: Path) -> None:
    text = ChatTemplate(DEMO, {}).render({"messages": [{"role": "user", "content": "Hi"}]})
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
