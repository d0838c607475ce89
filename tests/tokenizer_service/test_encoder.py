from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from shared.errors import RequestError
from shared.messages import TextSpec
from shared.model_source import resolve_model
from tests.tokenizer_service.rig import spec
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.encoder import Encoder
from tokenizer_service.logprob_text import LogprobText
from tokenizer_service.template_runner import TemplateRunner
from tokenizer_service.vocabulary import finish, load_vocabulary

VOCABULARY = load_vocabulary(resolve_model("demo"))
TEXTS = LogprobText(Detokenizer(VOCABULARY.tokenizer), 49_152, 49_152).texts


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    made = Encoder(VOCABULARY, TemplateRunner({}, {}), texts=TEXTS, max_model_len=100)
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
    assert (await encoding).ids.tolist() == VOCABULARY.tokenizer.encode(text).ids


async def test_many_texts_at_once(encoder: Encoder) -> None:
    texts = [f"text number {i} " * (i % 7) for i in range(1, 60)]
    found = await asyncio.gather(*(encoder.ids(spec(text)) for text in texts))
    assert [ids.tolist() for ids in found] == [VOCABULARY.tokenizer.encode(text).ids for text in texts]


async def test_half_a_surrogate_pair_is_refused(encoder: Encoder) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        await encoder.prompt(spec("a\ud800b"))
    assert caught.value.param == "prompt"


async def test_half_a_surrogate_pair_in_a_bad_word_is_refused(encoder: Encoder) -> None:
    with pytest.raises(RequestError, match=r"bad_words\[1\] holds half of a surrogate pair") as caught:
        await encoder.params(spec("x", bad_words=["fine", "a\ud800b"]), 1)
    assert caught.value.param == "bad_words"


async def test_a_model_without_a_template_serves_text(encoder: Encoder) -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        await encoder.prompt(spec(chat=b'{"messages": [{"role": "user", "content": "x"}]}'))
    assert len((await encoder.prompt(spec("x"))).ids) == 1


def test_the_context_is_filled_or_the_request_refused(encoder: Encoder) -> None:
    assert encoder.fit(spec("x", max_tokens=None), 40).max_tokens == 60
    assert encoder.fit(spec("x", max_tokens=60), 40).max_tokens == 60
    beams = spec("x", max_tokens=None, beam_width=2, temperature=0.0)
    assert encoder.fit(beams, 40).max_tokens is None, "the engine knows how long all beams may be"
    for tokens, prompt, param in ((61, 40, "max_tokens"), (None, 100, "prompt"), (5, 120, "prompt")):
        with pytest.raises(RequestError, match="> max_model_len 100") as caught:
            encoder.fit(spec("x", max_tokens=tokens), prompt)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        encoder.fit(spec(chat=b"{}", max_tokens=5), 120)
    assert caught.value.param == "messages"


async def prompt_of(encoder: Encoder, request: TextSpec) -> tuple[list[int], str | None]:
    prompt = await encoder.prompt(request)
    return prompt.ids.tolist(), prompt.text


async def test_a_prompt_is_cut_from_the_left(encoder: Encoder) -> None:
    text = "the quick brown fox jumps"
    ids = VOCABULARY.tokenizer.encode(text).ids
    assert await prompt_of(encoder, spec(text)) == (ids, text)
    assert await prompt_of(encoder, spec(text, truncate_prompt_tokens=len(ids))) == (ids, text)
    assert await prompt_of(encoder, spec(text, truncate_prompt_tokens=2)) == (ids[-2:], None)
    assert await prompt_of(encoder, spec(ids=range(9), truncate_prompt_tokens=4)) == ([5, 6, 7, 8], None)


@pytest.mark.parametrize(("max_tokens", "kept"), [(30, 70), (1, 99), (None, 99), (0, 99), (99, 1), (500, 1)])
async def test_a_prompt_is_cut_to_what_the_context_holds(encoder: Encoder, max_tokens: int | None, kept: int) -> None:
    request = spec(ids=range(300), truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert await prompt_of(encoder, request) == (list(range(300 - kept, 300)), None)
    if max_tokens != 500:
        params = await encoder.params(request, kept)
        assert params.max_tokens == (1 if max_tokens is None else max_tokens)
        assert params.truncate_prompt_tokens is None
    short = spec(ids=[7], truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert await prompt_of(encoder, short) == ([7], None)


async def test_truncation_beyond_the_context_is_refused(encoder: Encoder) -> None:
    assert len((await encoder.prompt(spec("x", truncate_prompt_tokens=100))).ids) == 1
    with pytest.raises(RequestError, match="truncate_prompt_tokens 101 > max_model_len 100") as caught:
        await encoder.prompt(spec("x", truncate_prompt_tokens=101))
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(RequestError, match=r"max_tokens 500 \+ prompt 1 > max_model_len 100"):
        await encoder.params(spec("x", truncate_prompt_tokens=-1, max_tokens=500), 1)


async def test_bos_is_cut_like_any_token() -> None:
    bos = LLAMA3_SPECIAL[0]
    vocabulary = finish(byte_level(LLAMA3_SPECIAL, bos=bos), {"bos_token": bos}, {})
    made = Encoder(vocabulary, TemplateRunner({}, {}), texts=[b""] * 500, max_model_len=100)
    whole = (await made.prompt(spec("the fox"))).ids.tolist()
    assert whole[0] == vocabulary.bos_id
    assert (await made.prompt(spec("the fox", truncate_prompt_tokens=1))).ids.tolist() == whole[-1:]
    made.close()


async def test_the_longest_output_by_default() -> None:
    made = Encoder(VOCABULARY, TemplateRunner({}, {}), texts=TEXTS, max_model_len=100, default_max_tokens=20)
    for prompt, expected in ((40, 20), (90, 10)):
        assert made.fit(spec("x", max_tokens=None), prompt).max_tokens == expected
    assert made.fit(spec("x", max_tokens=30), 40).max_tokens == 30
    assert made.fit(spec("x", max_tokens=0), 40).max_tokens == 0
    made.close()


@pytest.fixture
def padded() -> Iterator[Encoder]:
    """Of a model with 128 logits more than tokens."""
    texts = LogprobText(Detokenizer(VOCABULARY.tokenizer), 49_280, 49_152).texts
    made = Encoder(VOCABULARY, TemplateRunner({}, {}), texts=texts, max_model_len=100)
    yield made
    made.close()


async def test_ids_without_a_token_may_not_be_preferred(padded: Encoder) -> None:
    for param, value in (("logit_bias", [(5, 1.0), (49_279, 100.0)]), ("allowed_token_ids", [5, 49_279])):
        with pytest.raises(RequestError, match="the id 49279 has no token") as caught:
            await padded.params(spec("x", **{param: value}), 1)
        assert caught.value.param == param
    params = await padded.params(spec("x", logit_bias=[(49_151, 1.0)], stop_token_ids=[49_279]), 1)
    assert params.stop_token_ids == [49_279]


@pytest.mark.parametrize("value", [49_280, -1, 2**40])
async def test_ids_beyond_the_logits_are_refused(padded: Encoder, value: int) -> None:
    for param, given in (
        ("logit_bias", [(value, 1.0)]),
        ("allowed_token_ids", [value]),
        ("stop_token_ids", [value]),
        ("bad_words_token_ids", [[5, value]]),
    ):
        with pytest.raises(RequestError, match=r"not a token id in 0\.\.49279") as caught:
            await padded.params(spec("x", **{param: given}), 1)
        assert caught.value.param == param


async def test_a_text_with_tokens_that_the_model_lacks_is_refused() -> None:
    made = Encoder(VOCABULARY, TemplateRunner({}, {}), texts=TEXTS[:1000], max_model_len=100)
    with pytest.raises(RequestError, match=r"prompt\[\d\] = \d+ is not a token id in 0\.\.999"):
        await made.prompt(spec("extraordinary weather"))
    made.close()
