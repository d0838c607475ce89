from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from shared.errors import RequestError
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import spec
from tokenizer_service.encoder import Encoder
from tokenizer_service.template_runner import TemplateRunner
from tokenizer_service.vocabulary import load_vocabulary

VOCABULARY = load_vocabulary(resolve_model("demo"))


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    made = Encoder(VOCABULARY, TemplateRunner({}, {}), vocab_size=49_152, max_model_len=100)
    yield made
    made.close()


async def test_a_long_text_does_not_hold_up_the_loop(encoder: Encoder) -> None:
    text = "The quick brown fox, 12 🙂. " * 20_000
    encoding = asyncio.get_running_loop().create_task(encoder.prompt(spec(text)))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    assert (await encoding).tolist() == VOCABULARY.tokenizer.encode(text).ids


async def test_many_texts_at_once(encoder: Encoder) -> None:
    texts = [f"text number {i} " * (i % 7) for i in range(1, 60)]
    found = await asyncio.gather(*(encoder.ids(spec(text)) for text in texts))
    assert [ids.tolist() for ids in found] == [VOCABULARY.tokenizer.encode(text).ids for text in texts]


async def test_half_a_surrogate_pair_is_refused(encoder: Encoder) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        await encoder.prompt(spec("a\ud800b"))
    assert caught.value.param == "prompt"


async def test_a_model_without_a_template_serves_text(encoder: Encoder) -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        await encoder.prompt(spec(chat=b'{"messages": [{"role": "user", "content": "x"}]}'))
    assert len(await encoder.prompt(spec("x"))) == 1


def test_the_context_is_filled_or_the_request_refused(encoder: Encoder) -> None:
    assert encoder.fit(spec("x", max_tokens=None), 40).max_tokens == 60
    assert encoder.fit(spec("x", max_tokens=60), 40).max_tokens == 60
    for tokens, prompt, param in ((61, 40, "max_tokens"), (None, 100, "prompt"), (5, 120, "prompt")):
        with pytest.raises(RequestError, match="> max_model_len 100") as caught:
            encoder.fit(spec("x", max_tokens=tokens), prompt)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        encoder.fit(spec(chat=b"{}", max_tokens=5), 120)
    assert caught.value.param == "messages"
