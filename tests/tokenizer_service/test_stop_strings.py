from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_service.stop_strings import Match, StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What leaves with each piece (and at the end), and the stop string that was found."""
    search, released = StopStrings(stops, include), []
    for piece in pieces:
        out = search.push(piece)
        if isinstance(out, Match):
            return [*released, out.text], out.stop
        released.append(out)
    return [*released, search.flush()], None


def test_match_across_pieces_shows_nothing_of_it() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J", "K"]) == (["", "", "", ""], "DEFGHIJ")


def test_match_inside_a_piece_cuts_the_rest() -> None:
    assert run(["DE"], ["ABC", "xDEF"]) == (["ABC", "x"], "DE")
    assert run(["DE"], ["ABC", "xDEF"], include=True) == (["ABC", "xDE"], "DE")
    assert run(["DEFG"], ["ABCD", "EFGH"], include=True) == (["ABC", "DEFG"], "DEFG")


def test_only_a_live_prefix_is_held_back() -> None:
    stop = "\nObservation:"
    assert run([stop], ["I see. ", "Obs", "ervatory", "!"]) == (["I see. ", "Obs", "ervatory", "!", ""], None)
    assert run([stop], ["I see.", "\nObs", "ervatory", "!"]) == (["I see.", "", "\nObservatory", "!", ""], None)
    assert run([stop], ["I see.", "\nObs"]) == (["I see.", "", "\nObs"], None)


def test_held_text_may_begin_a_later_match() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_the_first_complete_stop_string_wins() -> None:
    assert run(["world", "hello"], ["say hello world"]) == (["say "], "hello")
    assert run(["EF", "DEF"], ["CDEFG"]) == (["C"], "DEF")


def test_text_before_min_tokens_takes_no_part() -> None:
    search = StopStrings(["ab"])
    assert search.push("xab", search=False) == "xab"
    assert search.push("a", search=False) == "a"
    assert search.push("b") == "b"
    assert search.push("ab") == Match("ab", "")


@pytest.mark.parametrize("include", [False, True])
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_pieces_do_not_matter(include: bool, stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    ends = sorted((whole.find(s) + len(s), whole.find(s), s) for s in stops if s in whole)
    expected = whole[: ends[0][0] if include else ends[0][1]] if ends else whole
    released, stop = run(stops, pieces, include=include)
    assert "".join(released) == expected
    assert stop == (ends[0][2] if ends else None)
    # Nothing is held longer than needed: what has left is all but the longest live tail.
    text = ""
    for index, piece in enumerate(pieces[: len(released) - 1]):
        text += piece
        tails = [t for t in range(len(text) + 1) if t == len(text) or any(s.startswith(text[t:]) for s in stops)]
        assert len("".join(released[: index + 1])) == tails[0]
