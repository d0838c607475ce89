from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ErrorCode, StartupError
from shared.hop import Request
from shared.messages import Detokenize, Detokenized, FinishReason, Load, Tokenize, Tokenized
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import EOS, CollectingGateway, Rig, ScriptedEngine, rig, spec, text_of
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, save
from tokenizer_service.service import TokenizerService
from tokenizer_service.vocabulary import load_vocabulary

DEMO = load_vocabulary(resolve_model("demo")).tokenizer


def ids_of(*pieces: str) -> list[int]:
    """The ids of texts that are encoded one by one."""
    return [i for piece in pieces for i in DEMO.encode(piece, add_special_tokens=False).ids]


OUTPUT: dict[str, list[int]] = {
    "emoji": ids_of("a🫠b🥹龜"),
    "cut": ids_of("a🫠")[:3],
    "alphabet": ids_of("ABC", "DEF", "G", "HI", "J", "K"),
    "observe": ids_of("I see.", "\n", "Obs", "ervatory", "!"),
    "held": ids_of("I see.", "\n", "Obs"),
    "eos": [*ids_of("Paris."), 2],
    "newline": ids_of("Paris.", "\n"),
}


def script(request: Request) -> list[list[int]]:
    name = request.rid.partition("-")[0]
    return [OUTPUT[name]] * request.n


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, script, model="demo") as made:
        yield made


@pytest.fixture
async def demo_eos(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, script, end=EOS, model="demo") as made:
        yield made


async def test_text_of_split_characters(demo: Rig) -> None:
    (log,) = await demo.gateway.ask("emoji", spec("x"))
    assert text_of(log) == "a🫠b🥹龜"
    assert len(log.pieces) == len(log.ids) == len(OUTPUT["emoji"])
    assert log.pieces[0] == "a"
    assert log.end is not None
    assert (log.end.reason, log.end.cached_tokens, log.end.prompt_tokens) == (FinishReason.LENGTH, 3, 1)
    (log,) = await demo.gateway.ask("cut", spec("x"))
    assert [*log.pieces, log.last_piece] == ["a", "", "", "\ufffd"]


async def test_stop_strings_across_and_inside_tokens(demo: Rig) -> None:
    (log,) = await demo.gateway.ask("alphabet-1", spec("x", stop=["DEFGHIJ"]))
    assert text_of(log) == "ABC"
    assert log.end is not None
    assert (log.end.reason, log.end.stop_reason) == (FinishReason.STOP, "DEFGHIJ")
    assert not any("D" in piece for _, piece in demo.gateway.pieces["alphabet-1"])
    (log,) = await demo.gateway.ask("alphabet-2", spec("x", stop=["zz", "DE"]))
    assert text_of(log) == "ABC"
    (log,) = await demo.gateway.ask("alphabet-3", spec("x", stop=["DE"], include_stop_str_in_output=True))
    assert text_of(log) == "ABCDE"
    (log,) = await demo.gateway.ask("alphabet-4", spec("x", stop=["BC", "HI"], min_tokens=2))
    assert text_of(log) == "ABCDEFG"
    await demo.gateway.until(lambda: len(demo.engine.unwanted_logs) == 4)
    await demo.gateway.until(lambda: not demo.engine.child.requests)


async def test_the_length_of_the_prompt_is_told_though_the_engines_word_is_lost(
    demo: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.engine.child, "accept", lambda request, prompt_tokens: None)
    (log,) = await demo.gateway.ask("alphabet-5", spec("x", stop=["DEFGHIJ"]))
    assert log.end is not None
    assert (log.end.reason, log.end.prompt_tokens) == (FinishReason.STOP, 1)


async def test_only_a_live_tail_is_held_back(demo: Rig) -> None:
    stop = ["\nObservation:"]
    (log,) = await demo.gateway.ask("observe", spec("x", stop=stop))
    assert text_of(log) == "I see.\nObservatory!"
    free, held = len(ids_of("I see.")), len(OUTPUT["held"])
    assert "".join(log.pieces[:free]) == "I see."
    assert log.pieces[free:held] == [""] * (held - free)
    assert [piece for piece in log.pieces[held:] if piece] == ["\nObservatory", "!"]
    (log,) = await demo.gateway.ask("held", spec("x", stop=stop))
    assert text_of(log) == "I see.\nObs"
    assert log.last_piece == "\nObs"


async def test_tokens_that_end_a_text_are_not_shown(demo_eos: Rig) -> None:
    ask = demo_eos.gateway.ask
    assert text_of((await ask("eos-1", spec("x")))[0]) == "Paris."
    assert text_of((await ask("eos-2", spec("x", skip_special_tokens=False)))[0]) == "Paris."
    assert text_of((await ask("eos-3", spec("x", skip_special_tokens=False, ignore_eos=True)))[0]) == "Paris.<|im_end|>"
    newline = OUTPUT["newline"][-1]
    assert text_of((await ask("newline-1", spec("x", stop_token_ids=[newline])))[0]) == "Paris."
    shown = spec("x", stop_token_ids=[newline], include_stop_str_in_output=True)
    assert text_of((await ask("newline-2", shown))[0]) == "Paris.\n"


async def test_choices_and_prompts(demo: Rig) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    logs = await demo.gateway.ask("emoji-n", spec(chat=chat, n=3, max_tokens=None))
    assert [text_of(log) for log in logs] == ["a🫠b🥹龜"] * 3
    prompt = np.frombuffer(demo.engine.begun[0].prompt, np.int32)
    assert DEMO.decode(prompt.tolist(), skip_special_tokens=False).endswith(
        "user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.engine.begun[0].params.max_tokens == 8192 - len(prompt)
    await demo.gateway.ask("emoji-ids", spec(ids=[5, 6, 49151]))
    assert np.frombuffer(demo.engine.begun[1].prompt, np.int32).tolist() == [5, 6, 49151]


REFUSED = [
    (spec(ids=range(812), max_tokens=9000), "max_tokens 9000 + prompt 812 > max_model_len 8192", "max_tokens"),
    (spec("a " * 9000), "prompt 9001 + at least 1 output token > max_model_len 8192", "prompt"),
    (spec(""), "the prompt is empty", "prompt"),
    (spec(ids=[]), "the prompt is empty", "prompt"),
    (spec(ids=[1, 49152]), "prompt[1] = 49152 is not a token id in 0..49151", "prompt"),
    (spec(ids=[-1]), "prompt[0] = -1 is not a token id in 0..49151", "prompt"),
    (spec(chat=b'{"messages": []}'), "messages must be a list with at least one message", "messages"),
    (spec(chat=b"\xff"), "the chat is not JSON", "messages"),
    (spec("x", stop_token_ids=[99999]), "stop_token_ids[0] = 99999", "stop_token_ids"),
]


async def test_refusals_name_the_field(demo: Rig) -> None:
    for index, (request, message, param) in enumerate(REFUSED):
        (log,) = await demo.gateway.ask(f"emoji-{index}", request)
        assert log.end is not None
        assert log.end.error is not None
        assert (log.ids.tolist(), log.end.reason) == ([], FinishReason.ERROR)
        assert log.end.error.message.startswith(message)
        assert (log.end.error.param, log.end.error.code) == (param, ErrorCode.INVALID_REQUEST)
    assert not demo.engine.begun
    assert text_of((await demo.gateway.ask("emoji-good", spec("x")))[0]) == "a🫠b🥹龜"


async def test_a_failure_inside_a_request_ends_only_that_request(demo: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.service._core is not None
    write = demo.service._core.requests._write

    def failing(log: Any, first: int) -> None:
        if log.request.rid == "emoji-broken":
            raise ValueError("broken")
        write(log, first)

    monkeypatch.setattr(demo.service._core.requests, "_write", failing)
    bad, good = await asyncio.gather(
        demo.gateway.ask("emoji-broken", spec("x")), demo.gateway.ask("emoji-fine", spec("x"))
    )
    assert text_of(good[0]) == "a🫠b🥹龜"
    assert bad[0].end is not None
    assert bad[0].end.error is not None
    assert bad[0].end.error.code == ErrorCode.INTERNAL
    await demo.gateway.until(lambda: not demo.engine.child.requests)


async def test_many_requests_end_once_and_leave_nothing(demo: Rig) -> None:
    names = [name for name in OUTPUT if name != "cut"] * 25
    logs = await asyncio.gather(
        *(demo.gateway.ask(f"{name}-{i}", spec("some text", stop=["HI"])) for i, name in enumerate(names))
    )
    for name, (log,) in zip(names, logs, strict=True):
        whole = DEMO.decode(OUTPUT[name], skip_special_tokens=True)
        assert text_of(log) == whole.split("HI")[0]
    core = demo.service._core
    assert core is not None
    await demo.gateway.until(lambda: not (core.relay.child.requests or core.relay.parent.requests))
    await demo.gateway.until(lambda: not demo.engine.child.requests)
    assert core.requests.encoding == 0


async def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path, lambda request: [[5] * 100_000], model="demo") as demo:
        request = demo.gateway.parent.open("long", spec("x"))
        await demo.gateway.until(lambda: len(request.logs[0].ids) > 3)
        demo.gateway.parent.close(request)
        await demo.gateway.until(lambda: demo.engine.dropped_ids == ["long"])


async def test_calls(demo: Rig) -> None:
    gateway = demo.gateway

    async def call(message: Any) -> Any:
        gateway.answers.clear()
        gateway.link.send(message)
        return await gateway.until(lambda: gateway.answers and gateway.answers[0])

    answer = await call(Tokenize(1, spec("  12  34"), want_strings=True))
    assert isinstance(answer, Tokenized)
    assert (answer.call, answer.tokens.tolist()) == (1, [256, 33, 34, 256, 35, 36])
    assert answer.strings == ["ĠĠ", "1", "2", "ĠĠ", "3", "4"]
    assert (await call(Tokenize(2, spec("")))).tokens.tolist() == []
    answer = await call(Tokenize(3, spec(chat=b"{}")))
    assert answer.error is not None
    assert answer.error.param == "messages"
    answer = await call(Detokenize(4, np.array([256, 33, 34, 2], np.int32)))
    assert isinstance(answer, Detokenized)
    assert answer.text == "  12<|im_end|>"
    answer = await call(Detokenize(5, np.array([7, 70_000], np.int32)))
    assert answer.error.message == "tokens[1] = 70000 is not a token id in 0..49151"


async def test_readiness_follows_the_engine_and_loads_are_passed_on(tmp_path: Path) -> None:
    async with rig(tmp_path, script, model="demo", ready=False) as demo:
        gateway = demo.gateway
        await gateway.until(lambda: gateway.hello and gateway.hello.status == "loading weights")
        assert gateway.hello is not None
        assert not gateway.hello.ready
        assert gateway.hello.card == demo.model.card
        demo.engine.ready = True
        await demo.start()
        demo.engine.report(Load("engine/e", 5, 1, 2, 0.5, [("vllm:prompt_tokens_total", {}, 7.0)]))
        await gateway.until(lambda: any(load.source == "engine/e" for load in gateway.loads))
        await gateway.until(lambda: any(load.source.startswith("tokenizer/") for load in gateway.loads))
        demo.engine.close()
        await gateway.until(lambda: gateway.hello and not gateway.hello.ready)


async def test_an_engine_with_another_model_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, script, model="demo", ready=False) as demo:
        demo.engine.card = dataclasses.replace(demo.model.card, digest="other")
        demo.engine.ready = True
        await demo.gateway.until(lambda: demo.gateway.hello and "another model: digest" in demo.gateway.hello.status)
        await demo.gateway.until(lambda: any(hello.refusal for hello in demo.engine.peers.values()))
        assert demo.gateway.hello is not None
        assert not demo.gateway.hello.ready


def restarted(old: ScriptedEngine) -> ScriptedEngine | None:
    """A new life of a closed engine; None: ZeroMQ has not let go of the address yet."""
    try:
        return ScriptedEngine(old.link.endpoint, old.card, old.script)
    except StartupError:
        return None


async def test_a_restarted_engine_goes_on_from_the_tokens_so_far(tmp_path: Path) -> None:
    ids = [*OUTPUT["emoji"], *OUTPUT["alphabet"]] * 7
    async with rig(tmp_path, lambda request: [ids], model="demo") as demo:
        request = demo.gateway.parent.open("long", spec("x"))
        await demo.gateway.until(lambda: len(request.logs[0].ids) > 20)
        demo.engine.close()
        demo.engine = await demo.gateway.until(lambda: restarted(demo.engine))
        await demo.gateway.until(lambda: request.over)
        assert request.logs[0].ids.tolist() == ids
        assert text_of(request.logs[0]) == DEMO.decode(ids)


async def test_decoding_resumes_at_the_same_character_in_another_tokenizer(tmp_path: Path) -> None:
    ids = [*OUTPUT["emoji"], *OUTPUT["observe"]] * 7
    async with rig(tmp_path, lambda request: [ids], model="demo") as demo:
        second = dataclasses.replace(demo.settings, listen=f"ipc://{tmp_path}/t2")
        other = TokenizerService(second)
        running = asyncio.get_running_loop().create_task(other.run())
        gateway = CollectingGateway(demo.service.endpoint, other.endpoint)
        await gateway.until(lambda: len(gateway.ready) == 2)
        request = gateway.parent.open("long", spec("x", stop=["\nObservation"]))
        await gateway.until(lambda: len(request.logs[0].ids) > 21)
        assert request.lower is not None
        assert request.lower.child is not None
        gateway.parent.set_children({demo.service.endpoint, other.endpoint} - {request.lower.child.name})
        await gateway.until(lambda: request.over)
        assert request.logs[0].ids.tolist() == ids
        assert text_of(request.logs[0]) == DEMO.decode(ids)
        assert "".join(piece for _, piece in gateway.pieces["long"]) == DEMO.decode(ids)
        gateway.close()
        other.stop()
        await running


async def test_bos_of_a_model_that_wants_one(tmp_path: Path) -> None:
    bos = LLAMA3_SPECIAL[0]
    folder = save(
        tmp_path / "model",
        byte_level(LLAMA3_SPECIAL, bos=bos),
        bos_token=bos,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    async with rig(tmp_path, lambda request: [[70]], model=str(folder)) as made:
        tokenizer = made.model.vocabulary.tokenizer
        bos_id = tokenizer.token_to_id(bos)
        plain = tokenizer.encode("fox", add_special_tokens=False).ids
        cases = [
            (spec("fox"), [bos_id, *plain]),
            (spec(bos + "fox"), [bos_id, *plain]),
            (spec("fox", add_special_tokens=False), plain),
            (spec(chat=b'{"messages": [{"role": "user", "content": "fox"}]}'), [bos_id, *plain]),
            (spec(""), [bos_id]),
        ]
        for index, (request, expected) in enumerate(cases):
            await made.gateway.ask(f"r{index}", request)
            assert np.frombuffer(made.engine.begun[index].prompt, np.int32).tolist() == expected


async def test_chat_template_option(tmp_path: Path) -> None:
    (tmp_path / "good.jinja").write_text("{{ messages[0].content }}!")
    async with rig(tmp_path, script, model="demo", chat_template=str(tmp_path / "good.jinja")) as made:
        await made.gateway.ask("emoji", spec(chat=b'{"messages": [{"role": "user", "content": "fox"}]}'))
        assert DEMO.decode(np.frombuffer(made.engine.begun[0].prompt, np.int32).tolist()) == "fox!"
    (tmp_path / "bad.jinja").write_text("{% for %}")
    settings = dataclasses.replace(made.settings, chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(StartupError, match=r"bad\.jinja is broken: line 1"):
        await TokenizerService(settings).run()
    settings = dataclasses.replace(made.settings, chat_template=str(tmp_path / "absent.jinja"))
    with pytest.raises(StartupError, match=r"absent\.jinja"):
        await TokenizerService(settings).run()
