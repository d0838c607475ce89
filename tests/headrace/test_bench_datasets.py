"""Data sets: lengths, seeds, and which texts of a file are taken."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from headrace.bench.datasets import LOADERS, SampleRequest, add_dataset_flags, as_texts, load_dataset
from headrace.bench.tokenizer import IdsOnly, ModelTokenizer, open_tokenizer
from shared.errors import StartupError


class Words:
    """A vocabulary in which every character is a token, with a token in front."""

    vocab_size = 50
    special_ids = frozenset({0, 7})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [1] * len(text)

    def decode(self, ids: list[int]) -> str:
        return "x" * len(ids)


@pytest.fixture(scope="module")
def demo() -> ModelTokenizer:
    return open_tokenizer("demo")


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    return parser.parse_args(list(words))


def load(*words: str, seed: int = 0) -> list[SampleRequest]:
    return load_dataset(flags(*words), Words(), seed)


def lengths(samples: list[SampleRequest]) -> list[tuple[int, int]]:
    assert all(len(sample.prompt) == sample.prompt_len for sample in samples)
    return [(sample.prompt_len, sample.expected_output_len) for sample in samples]


def write(path: pathlib.Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_random_lengths_are_fixed_by_default() -> None:
    assert lengths(load("--num-prompts", "5")) == [(1024, 128)] * 5
    assert len(load("--input-len", "1", "--output-len", "1")) == 1000


def test_random_lengths_are_uniform_around_the_mean_with_a_range_ratio() -> None:
    words = ("--random-input-len", "10", "--random-output-len", "5", "--random-range-ratio", "0.5")
    found = lengths(load("--num-prompts", "4000", *words))
    inputs, outputs = zip(*found, strict=True)
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (5, 15, 2, 8)
    assert np.bincount(inputs)[5:] / 4000 == pytest.approx(np.full(11, 1 / 11), abs=0.02)
    assert np.mean(inputs) == pytest.approx(10, abs=0.2)


def test_random_prompts_avoid_control_tokens_and_depend_on_the_seed() -> None:
    def ids(seed: int) -> list[Any]:
        return [sample.prompt for sample in load("--num-prompts", "20", "--input-len", "30", seed=seed)]

    used = {token for prompt in ids(0) for token in prompt}
    assert used == set(range(50)) - {0, 7}
    assert ids(0) == ids(0) != ids(1)


def test_random_prefix_is_shared_and_comes_on_top() -> None:
    first, second = load("--num-prompts", "2", "--random-prefix-len", "6", "--random-input-len", "9")
    assert first.prompt_len == second.prompt_len == 15
    assert first.prompt[:6] == second.prompt[:6]
    assert first.prompt[6:] != second.prompt[6:]


def test_prefix_repetition() -> None:
    words = ("--dataset-name=prefix_repetition", "--num-prompts=11", "--prefix-repetition-num-prefixes=3")
    sizes = ("--prefix-repetition-prefix-len=8", "--prefix-repetition-suffix-len=4", "--prefix-repetition-output-len=2")
    samples = load(*words, *sizes)
    assert lengths(samples) == [(12, 2)] * 9
    prefixes = [tuple(sample.prompt[:8]) for sample in samples]
    assert sorted(map(prefixes.count, set(prefixes))) == [3, 3, 3]
    assert prefixes != sorted(prefixes, key=prefixes.index), "shuffled"
    assert len({tuple(sample.prompt) for sample in samples}) == 9


@pytest.mark.parametrize(
    ("name", "count", "total"), [("nano", 256, (142_827, 133_966)), ("mix", 1000, (196_305, 184_096))]
)
def test_named_workloads_have_their_own_size(name: str, count: int, total: tuple[int, int]) -> None:
    found = lengths(load_dataset(flags("--dataset-name", name), IdsOnly(49_152), 0))
    assert len(found) == count
    assert tuple(map(sum, zip(*found, strict=True))) == total
    assert lengths(load("--dataset-name", name, "--num-prompts", "3")) == found[:3]
    with pytest.raises(StartupError, match=f"{name} has {count} requests, not --num-prompts {count + 1}"):
        load("--dataset-name", name, "--num-prompts", str(count + 1))


def turns(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_sharegpt_takes_the_first_two_turns_of_usual_length(tmp_path: pathlib.Path) -> None:
    """With the token in front: prompts of 4…1024 tokens, answers of at least 4, together at most 2048."""
    entries = [
        turns("a" * 3, "b" * 3, "not used"),
        turns("only one turn"),
        {"id": "without conversations"},
        turns("a" * 2, "b" * 50),
        turns("a" * 50, "b" * 2),
        turns("a" * 1023, "b" * 1023),
        turns("a" * 1024, "b" * 50),
        turns("a" * 1000, "b" * 1047),
    ]
    path = write(tmp_path / "s.json", entries)
    words = ("--dataset-name=sharegpt", "--dataset-path", path, "--no-oversample")
    found = [(sample.prompt_len, sample.expected_output_len) for sample in load(*words, "--disable-shuffle")]
    assert found == [(4, 4), (1024, 1024)]
    # A given output length is not checked against the least one, and replaces the answer's.
    found = [(sample.prompt_len, sample.expected_output_len) for sample in load(*words, "--sharegpt-output-len", "3")]
    assert sorted(found) == [(4, 3), (51, 3), (1001, 3), (1024, 3)]


def test_a_file_is_shuffled_by_the_seed_and_its_prompts_repeated_if_they_are_too_few(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "p.jsonl", "\n".join(json.dumps({"prompt": f"prompt {n}"}) for n in range(10)) + "\n\n")
    words = ("--dataset-name=custom", "--dataset-path", path)

    def prompts(*more: str, seed: int = 0) -> list[Any]:
        return [sample.prompt for sample in load(*words, *more, seed=seed)]

    in_order = [f"prompt {n}" for n in range(10)]
    assert prompts("--disable-shuffle", "--no-oversample") == in_order
    assert prompts("--num-prompts=10") != in_order
    assert sorted(prompts("--num-prompts=10")) == in_order
    assert prompts("--num-prompts=5") == prompts("--num-prompts=5") != prompts("--num-prompts=5", seed=1)
    assert len(prompts("--num-prompts=25")) == 25
    assert set(prompts("--num-prompts=25")) == set(in_order)


def test_custom_output_lengths(tmp_path: pathlib.Path) -> None:
    lines = ['{"prompt": "a", "output_tokens": 5}', '{"prompt": "b", "output_tokens": 6}']
    words = (
        "--dataset-name=custom",
        "--dataset-path",
        write(tmp_path / "p.jsonl", "\n".join(lines)),
        "--num-prompts=2",
    )
    assert [sample.expected_output_len for sample in load(*words)] == [256, 256]
    assert [sample.expected_output_len for sample in load(*words, "--custom-output-len=9")] == [9, 9]
    assert {sample.expected_output_len for sample in load(*words, "--custom-output-len=-1")} == {5, 6}


def test_sonnet_prompts_share_their_first_lines(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "poem.txt", "".join(f"line {chr(97 + n)} of a poem\n" for n in range(20)))
    words = ("--dataset-name=sonnet", "--dataset-path", path, "--num-prompts=4")
    sizes = ("--sonnet-input-len=200", "--sonnet-prefix-len=110", "--sonnet-output-len=7")
    samples = load(*words, *sizes)
    assert {sample.expected_output_len for sample in samples} == {7}
    assert all(150 < sample.prompt_len <= 200 for sample in samples)
    heads = {tuple(str(sample.prompt).splitlines()[1:4]) for sample in samples}
    assert heads == {("line a of a poem", "line b of a poem", "line c of a poem")}
    assert len({sample.prompt for sample in samples}) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ('"text"', "needs prompt"),
        ('{"prompt": 5}', "object 1 needs prompt"),
        ("", "no prompt of a usable length"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: pathlib.Path, content: str, words: str) -> None:
    path = write(tmp_path / "p.jsonl", content)
    with pytest.raises(StartupError, match=words):
        load("--dataset-name=custom", "--dataset-path", path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset-name=custom", "--dataset-path=/none"], "/none cannot be read"),
        (["--dataset-name=sharegpt"], "sharegpt needs --dataset-path"),
        (["--dataset-path=x"], "random takes no --dataset-path"),
        (["--random-range-ratio=1"], r"must be in \[0, 1\), got 1"),
        (["--dataset-name=prefix_repetition", "--num-prompts=3"], "--num-prompts 3 < "),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        load(*flags)


def test_every_name_can_be_chosen() -> None:
    assert {"random", "sharegpt", "sonnet", "prefix_repetition", "custom", "nano", "mix", "uniform"} <= set(LOADERS)


def test_texts_of_random_ids_have_their_length(demo: ModelTokenizer) -> None:
    samples = load_dataset(flags("--num-prompts=20", "--input-len=64", "--random-range-ratio=0.5"), demo, 0)
    texts = as_texts(samples, demo, 0)
    assert all(isinstance(sample.prompt, str) for sample in texts)
    counts = [len(demo.encode(str(sample.prompt), add_special_tokens=False)) for sample in texts]
    assert counts == [sample.prompt_len for sample in texts]
    assert sum(text.prompt_len == sample.prompt_len for text, sample in zip(texts, samples, strict=True)) >= 18


def test_a_models_tokenizer(demo: ModelTokenizer) -> None:
    assert demo.vocab_size == 49_152
    assert demo.encode("<|im_end|>", add_special_tokens=False)[0] in demo.special_ids
    assert demo.decode(demo.encode("some text")) == "some text"


def test_without_a_tokenizer_there_are_ids_and_no_texts(tmp_path: pathlib.Path) -> None:
    samples = load_dataset(flags("--num-prompts=2", "--input-len=3"), IdsOnly(10), 0)
    assert [sample.prompt_len for sample in samples] == [3, 3]
    with pytest.raises(StartupError, match="no text for random ids"):
        as_texts(samples, IdsOnly(10), 0)
    path = write(tmp_path / "p.jsonl", '{"prompt": "x"}')
    with pytest.raises(StartupError, match="without a tokenizer"):
        load_dataset(flags("--dataset-name=custom", "--dataset-path", path), IdsOnly(10), 0)


@pytest.mark.parametrize("name", ["./none", "no such/model name"])
def test_a_tokenizer_that_is_nowhere(name: str) -> None:
    with pytest.raises(StartupError, match=name):
        open_tokenizer(name)
