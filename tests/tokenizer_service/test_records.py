"""Log-probability records and what is told of a prompt, on their way through the service."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from shared.hop import Log
from shared.logprobs import Logprobs, unpack_text
from shared.messages import FinishReason
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import EOS, CollectingGateway, Rig, rig, spec, text_of
from tests.tokenizer_service.test_service import OUTPUT, ids_of, restarted, script
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, save
from tokenizer_service.service import TokenizerService
from tokenizer_service.vocabulary import load_vocabulary

DEMO = load_vocabulary(resolve_model("demo")).tokenizer


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, script, model="demo") as made:
        yield made


def records_of(log: Log) -> list[Logprobs]:
    return [unpack_text(each) for each in log.records]


def joined(log: Log) -> str:
    return b"".join(each.token.text or b"" for each in records_of(log)).decode(errors="replace")


async def test_every_token_has_a_record_with_text(demo: Rig) -> None:
    (log,) = await demo.gateway.ask("emoji", spec("x", logprobs=3))
    records = records_of(log)
    assert [each.token.token_id for each in records] == log.ids.tolist() == OUTPUT["emoji"]
    assert [each.token.logprob for each in records] == [-float(i) for i in log.ids]
    assert [len(each.top) for each in records] == [3] * len(records)
    assert joined(log) == text_of(log) == "a🫠b🥹龜"
    (log,) = await demo.gateway.ask("emoji-none", spec("x"))
    assert log.records == []
    assert log.prompt is None


async def test_a_hidden_end_has_a_record_without_text(tmp_path: Path) -> None:
    async with rig(tmp_path, script, end=EOS, model="demo") as demo:
        (log,) = await demo.gateway.ask("eos", spec("x", logprobs=0))
        assert records_of(log)[-1].token[::2] == (2, b"")
        assert joined(log) == text_of(log) == "Paris."


async def test_a_stop_string_cuts_records_with_their_tokens(demo: Rig) -> None:
    (log,) = await demo.gateway.ask("alphabet", spec("x", logprobs=1, stop=["DE"]))
    assert text_of(log) == "ABC"
    assert len(log.records) == len(log.ids) == len(log.pieces) < len(OUTPUT["alphabet"])
    assert joined(log) == "".join(DEMO.decode([i]) for i in log.ids)


async def test_echo_tells_every_choice_of_the_prompt(demo: Rig) -> None:
    text = "The 🫠 fox\n"
    ids = ids_of(text)
    logs = await demo.gateway.ask("emoji", spec(text, n=3, echo=True))
    for log in logs:
        assert log.prompt is not None
        assert (log.prompt.text, np.frombuffer(log.prompt.ids, np.int32).tolist()) == (text, ids)
        assert log.prompt.records == []
    logs = await demo.gateway.ask("emoji-scored", spec(text, n=2, echo=True, logprobs=1, prompt_logprobs=1))
    first, second = (log.prompt for log in logs)
    assert first is not None
    assert second is not None
    assert (first.text, second.text, second.records) == (text, text, [])
    records = [unpack_text(each) for each in first.records]
    assert [each.token.token_id for each in records] == ids[1:]
    assert first.first + b"".join(each.token.text or b"" for each in records) == text.encode()


async def test_what_is_echoed_of_ids_and_chats_is_their_text(demo: Rig) -> None:
    ids = ids_of("fox", "<|im_end|>", " 🫠")
    (log,) = await demo.gateway.ask("emoji-ids", spec(ids=ids, echo=True))
    assert log.prompt is not None
    assert log.prompt.text == "fox<|im_end|> 🫠"
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    (log,) = await demo.gateway.ask("emoji-chat", spec(chat=chat, echo=True))
    assert log.prompt is not None
    assert log.prompt.text.endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    (log,) = await demo.gateway.ask("emoji-cut", spec("The quick fox", echo=True, truncate_prompt_tokens=1))
    assert log.prompt is not None
    assert log.prompt.text == " fox"


async def test_max_tokens_0_ends_with_the_prompt_alone(demo: Rig) -> None:
    request = spec("The quick fox", echo=True, prompt_logprobs=0, max_tokens=0)
    (log,) = await demo.gateway.ask("emoji", request)
    assert log.end is not None
    assert (log.ids.tolist(), text_of(log), log.end.reason) == ([], "", FinishReason.LENGTH)
    assert log.prompt is not None
    assert log.prompt.text == "The quick fox"
    assert len(log.prompt.records) == len(ids_of("The quick fox")) - 1
    (log,) = await demo.gateway.ask("emoji-one", spec("The", prompt_logprobs=0, max_tokens=0))
    assert log.prompt is not None
    assert (log.prompt.first, log.prompt.records, log.prompt.text) == (b"The", [], "")


async def test_a_bos_that_encoding_adds_is_not_echoed(tmp_path: Path) -> None:
    bos = LLAMA3_SPECIAL[0]
    folder = save(tmp_path / "model", byte_level(LLAMA3_SPECIAL, bos=bos), bos_token=bos)
    async with rig(tmp_path, lambda request: [[70]], model=str(folder)) as made:
        (log,) = await made.gateway.ask("r", spec("fox", echo=True, prompt_logprobs=0))
        assert log.prompt is not None
        assert (log.prompt.text, log.prompt.first) == ("fox", b"")
        ids = np.frombuffer(log.prompt.ids, np.int32).tolist()
        assert ids == made.model.vocabulary.tokenizer.encode("fox").ids
        assert len(log.prompt.records) == len(ids) - 1


def assert_whole(log: Log, ids: list[int]) -> None:
    """Every row came with its record, once."""
    assert log.ids.tolist() == ids
    assert [each.token.token_id for each in records_of(log)] == ids
    assert joined(log) == text_of(log) == DEMO.decode(ids)
    assert log.prompt is not None
    assert [unpack_text(each).token.text for each in log.prompt.records] == [b" quick"]
    assert log.prompt.text == "The quick"


SCORED = spec("The quick", logprobs=2, prompt_logprobs=0, echo=True, max_tokens=500)


async def test_records_go_on_after_an_engine_has_restarted(tmp_path: Path) -> None:
    ids = [*OUTPUT["emoji"], *OUTPUT["alphabet"]] * 7
    async with rig(tmp_path, lambda request: [ids], model="demo") as demo:
        request = demo.gateway.parent.open("long", SCORED)
        await demo.gateway.until(lambda: len(request.logs[0].ids) > 20)
        demo.engine.close()
        demo.engine = await demo.gateway.until(lambda: restarted(demo.engine))
        await demo.gateway.until(lambda: request.over)
        assert_whole(request.logs[0], ids)


async def test_records_go_on_in_another_tokenizer(tmp_path: Path) -> None:
    """The rows that it is given have empty records, and stay with who gave them."""
    ids = [*OUTPUT["emoji"], *OUTPUT["observe"]] * 7
    async with rig(tmp_path, lambda request: [ids], model="demo") as demo:
        other = TokenizerService(dataclasses.replace(demo.settings, listen=f"ipc://{tmp_path}/t2"))
        running = asyncio.get_running_loop().create_task(other.run())
        gateway = CollectingGateway(demo.service.endpoint, other.endpoint)
        await gateway.until(lambda: len(gateway.ready) == 2)
        request = gateway.parent.open("long", SCORED)
        await gateway.until(lambda: len(request.logs[0].ids) > 21)
        assert request.lower is not None
        assert request.lower.child is not None
        gateway.parent.set_children({demo.service.endpoint, other.endpoint} - {request.lower.child.name})
        await gateway.until(lambda: request.over)
        assert_whole(request.logs[0], ids)
        gateway.close()
        other.stop()
        await running


async def test_a_prompt_that_an_engine_tells_again_is_not_taken_again(tmp_path: Path) -> None:
    ids = OUTPUT["emoji"] * 20
    async with rig(tmp_path, lambda request: [ids], model="demo") as demo:
        request = demo.gateway.parent.open("long", SCORED)
        assert demo.service._core is not None
        above = demo.service._core.relay.child.requests
        await demo.gateway.until(lambda: len(request.logs[0].ids) > 3)
        below = demo.engine.child.requests["long"].logs[0]
        below.sent = 0
        demo.engine.child.mark(below)
        await demo.gateway.until(lambda: len(request.logs[0].ids) > 30)
        assert above["long"].logs[0].prompt == request.logs[0].prompt
        await demo.gateway.until(lambda: request.over)
        assert_whole(request.logs[0], ids)
