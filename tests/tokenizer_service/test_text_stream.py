from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shared.model_source import resolve_model
from shared.sampling import SamplingParams
from tokenizer_service.detokenizer import Detokenizer
from tokenizer_service.text_stream import TextStream
from tokenizer_service.vocabulary import load_vocabulary

TOKENIZER = load_vocabulary(resolve_model("demo")).tokenizer
DETOKENIZER = Detokenizer(TOKENIZER)
EOS = frozenset([2])


def ids_of(*pieces: str) -> list[int]:
    return [i for piece in pieces for i in TOKENIZER.encode(piece, add_special_tokens=False).ids]


def stream(**params: Any) -> TextStream:
    return TextStream(DETOKENIZER, [], SamplingParams(**params), EOS)


def run(made: TextStream, ids: list[int]) -> list[str]:
    """The pieces up to a stop string, and what comes at the end."""
    pieces = []
    for token_id in ids:
        pieces.append(made.push(token_id))
        if made.stop is not None:
            break
    return [*pieces, made.finish()]


SOME_IDS = st.lists(
    st.sampled_from(ids_of("stop the 🫠 he", "龜 lo", "\n", "lollo")) | st.integers(0, 49_151), max_size=30
)


@given(
    ids=SOME_IDS, cut=st.integers(0, 30), stops=st.lists(st.sampled_from(["lo", "🫠", "he\n", "llo", "e"]), max_size=3)
)
def test_the_same_ids_give_the_same_pieces_wherever_they_were_cut(ids: list[int], cut: int, stops: list[str]) -> None:
    whole = run(stream(stop=stops), ids)
    resumed = stream(stop=stops)
    first = []
    for token_id in ids[:cut]:
        first.append(resumed.push(token_id))
        if resumed.stop is not None:
            assert [*first, resumed.finish()] == whole
            return
    assert [*first, *run(resumed, ids[cut:])] == whole


@given(ids=SOME_IDS, stop=st.sampled_from(["lo", "🫠", "he\n", "�", "e", " "]))
def test_text_up_to_the_stop_string_is_that_of_decode(ids: list[int], stop: str) -> None:
    ids = [i for i in ids if i != 2]
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    made = stream(stop=[stop])
    assert "".join(run(made, ids)) == whole.split(stop)[0]
    assert made.stop == (stop if stop in whole else None)


def test_a_stop_string_may_be_completed_by_the_end() -> None:
    ids = ids_of("a🫠")[:2]
    made = stream(stop=["�"])
    assert run(made, ids) == ["a", "", ""]
    assert made.stop == "�"


def test_min_tokens_counts_tokens() -> None:
    ids = ids_of("A", "A", "A", "A")
    for count in range(4):
        made = stream(stop=["A"], min_tokens=count)
        assert "".join(run(made, ids)) == "A" * count
        assert made.stop == "A"


def test_an_end_token_below_min_tokens_is_text() -> None:
    newline = ids_of("\n")[0]
    ids = [*ids_of("A"), newline, *ids_of("B"), newline]
    assert run(stream(stop_token_ids=[newline], min_tokens=2), ids) == ["A", "\n", "B", "", ""]
