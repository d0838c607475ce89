"""200 items for lm-eval, the same at every call: choices, last words and whole texts, from one token to 1,387.

``write_tasks`` writes them as three tasks of lm-eval: a JSON-lines file and a YAML file each.

* ``headrace_choice`` (150, ``multiple_choice``): facts and sums behind a shared few-shot prefix, opposites,
  translations in many scripts, endings of sentences, and questions about a list that is longer than 512 tokens.
* ``headrace_word`` (40, ``loglikelihood``): the last word of a text, in the way of LAMBADA.
* ``headrace_text`` (10, ``loglikelihood_rolling``): the perplexity of a text.
"""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

Item = dict[str, Any]

DATA: dict[str, Any] = json.loads(pathlib.Path(__file__).with_name("lm_eval_data.json").read_text())

LISTS = {28: 530, 38: 720, 66: 1250}
"""Rows of the long lists, and how many tokens that makes, roughly."""


def others(values: list[str], right: str, count: int, rng: random.Random) -> list[str]:
    return rng.sample([value for value in values if value != right], count)


def choice(query: str, right: str, wrong: list[str], rng: random.Random, kind: str) -> Item:
    options = [right, *wrong]
    rng.shuffle(options)
    return {"kind": kind, "query": query, "choices": options, "gold": options.index(right)}


def capitals(rng: random.Random) -> list[Item]:
    pairs = list(DATA["capitals"].items())
    cities = [city for _, city in pairs]
    shots = "".join(f"Question: What is the capital of {name}?\nAnswer: {city}\n\n" for name, city in pairs[:3])
    items = []
    for name, city in pairs[3:]:
        query = f"{shots}Question: What is the capital of {name}?\nAnswer:"
        items.append(choice(query, city, others(cities, city, 3, rng), rng, "capital"))
    return items


def sums(rng: random.Random, count: int) -> list[Item]:
    shots = "2 + 5 = 7\n14 + 21 = 35\n30 - 12 = 18\n"
    items = []
    for _ in range(count):
        left, right, sign = rng.randrange(10, 200), rng.randrange(1, 100), rng.choice("+-")
        result = left + right if sign == "+" else left - right
        wrong = [str(result + off) for off in rng.sample([-10, -2, -1, 1, 2, 3, 10, 100], 3)]
        items.append(choice(f"{shots}{left} {sign} {right} =", str(result), wrong, rng, "sum"))
    return items


def opposites(rng: random.Random) -> list[Item]:
    words = list(DATA["opposites"].values())
    return [
        choice(f"The opposite of {word} is", right, others(words, right, 1, rng), rng, "opposite")
        for word, right in DATA["opposites"].items()
    ]


def translations(rng: random.Random) -> list[Item]:
    words = [right for _, _, right in DATA["translations"]]
    return [
        choice(f'The {language} for "{word}" is', right, others(words, right, 2, rng), rng, "translation")
        for language, word, right in DATA["translations"]
    ]


def endings(rng: random.Random) -> list[Item]:
    return [choice(start, right, wrong, rng, "ending") for start, right, *wrong in DATA["endings"]]


def long_lists(rng: random.Random) -> list[Item]:
    """Four questions about each of a few lists, so that long prompts share a long prefix."""
    colours = ["red", "blue", "green", "white", "black", "brown"]
    things = ["box", "bag", "jar", "drawer", "basket", "case", "trunk", "shelf", "crate", "tin", "tub"]
    words = [f"{colour} {thing}" for colour in colours for thing in things]
    places = ["kitchen", "garden", "attic", "cellar", "garage", "office", "hall", "library"]
    items = []
    for rows in LISTS:
        keys = rng.sample(words, rows)
        where = {key: rng.choice(places) for key in keys}
        table = "".join(
            f"{n}. The {key} with the number {rng.randrange(100, 1000)} stands in the {where[key]}.\n"
            for n, key in enumerate(keys, 1)
        )
        for key in rng.sample(keys, 4):
            wrong = others(places, where[key], 1, rng)
            items.append(choice(f"{table}Therefore the {key} stands in the", where[key], wrong, rng, "long"))
    return items


def choices(rng: random.Random) -> list[Item]:
    items = [*capitals(rng), *opposites(rng), *translations(rng), *endings(rng), *long_lists(rng)]
    return items + sums(rng, 150 - len(items))


def words() -> list[Item]:
    items = []
    for text in DATA["last_words"]:
        start, _, last = text.rpartition(" ")
        items.append({"kind": "word", "query": start, "word": last})
    return items


def texts(rng: random.Random) -> list[Item]:
    """From one word to about a thousand tokens, with every script of the translations."""
    lengths = [1, 2, 5, 10, 20, 30, 40, 60, 80, 120]
    glossary = [f'"{word}" is {right} in {language}' for language, word, right in DATA["translations"]]
    sentences = DATA["last_words"] + glossary
    items = [{"kind": "text", "text": ". ".join(rng.choices(sentences, k=length)) + "."} for length in lengths[1:]]
    return [{"kind": "text", "text": "Hello"}, *items]


TASKS: dict[str, dict[str, Any]] = {
    "headrace_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    },
    "headrace_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{' ' ~ word}}",
    },
    "headrace_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    },
}
"""What the YAML of each task says of its items."""

METRICS = {
    "headrace_choice": {"acc": "mean", "acc_norm": "mean"},
    "headrace_word": {"acc": "mean", "perplexity": "perplexity"},
    "headrace_text": {
        "word_perplexity": "weighted_perplexity",
        "byte_perplexity": "weighted_perplexity",
        "bits_per_byte": "bits_per_byte",
    },
}
"""The metrics of each task and how lm-eval aggregates them."""


def make_items() -> dict[str, list[Item]]:
    """The items of each task, 200 in all."""
    rng = random.Random(20)
    return {"headrace_choice": choices(rng), "headrace_word": words(), "headrace_text": texts(rng)}


def write_tasks(folder: pathlib.Path) -> int:
    """Write ``NAME.jsonl`` and ``NAME.yaml`` of every task into ``folder``; returns the number of items.

    The YAML is written as JSON, which YAML includes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    items = make_items()
    for name, fields in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items[name]))
        metrics = [
            {"metric": metric, "aggregation": aggregation, "higher_is_better": metric.startswith("acc")}
            for metric, aggregation in METRICS[name].items()
        ]
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metric_list": metrics,
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1))
    return sum(len(of_task) for of_task in items.values())
