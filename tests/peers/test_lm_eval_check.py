"""The items given to lm-eval, and how its outcomes are compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from lm_eval_check import Outcome, compare, read_outcome
from lm_eval_items import TASKS, make_items, write_tasks
from tokenizer_folder import export_tokenizer
from tokenizers import Tokenizer

REFERENCE = Outcome(
    scores={"headrace_choice/acc": 0.5, "headrace_word/perplexity": 20.0},
    answers={
        "headrace_choice/0/0": (-1.0, True),
        "headrace_choice/0/1": (-2.0, False),
        "headrace_text/0/0": (-9.0, None),
    },
    seconds=1.0,
)


def test_there_are_200_items_and_they_are_the_same_at_every_call() -> None:
    items = make_items()
    assert {name: len(of_task) for name, of_task in items.items()} == {
        "headrace_choice": 150,
        "headrace_word": 40,
        "headrace_text": 10,
    }
    assert make_items() == items


def test_every_question_has_two_to_four_different_choices_and_the_right_one_is_among_them() -> None:
    for item in make_items()["headrace_choice"]:
        assert 2 <= len(set(item["choices"])) == len(item["choices"]) <= 4
        assert 0 <= item["gold"] < len(item["choices"])


def test_prompts_are_short_long_and_of_many_scripts(tmp_path: Path) -> None:
    export_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    long = [item["query"] for item in make_items()["headrace_choice"] if item["kind"] == "long"]
    lengths = [len(tokenizer.encode(text).ids) for text in long]
    assert min(lengths) > 512
    assert max(lengths) < 2048
    choices = "".join(choice for item in make_items()["headrace_choice"] for choice in item["choices"])
    assert len({ord(character) >> 8 for character in choices}) > 10


def test_tasks_are_written_as_json_lines_beside_their_descriptions(tmp_path: Path) -> None:
    assert write_tasks(tmp_path) == 200
    for name in TASKS:
        task = json.loads((tmp_path / f"{name}.yaml").read_text())
        lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        assert [json.loads(line) for line in lines] == make_items()[name]


def test_equal_outcomes_are_good() -> None:
    found = compare(REFERENCE, REFERENCE)
    assert found.largest == 0
    assert found.good(0.0)


def test_the_largest_difference_is_found() -> None:
    answers = REFERENCE.answers | {"headrace_choice/0/1": (-2.5, False), "headrace_text/0/0": (-9.25, None)}
    found = compare(replace(REFERENCE, answers=answers), REFERENCE)
    assert (found.largest, found.where) == (0.5, "headrace_choice/0/1")
    assert found.good(0.5)
    assert not found.good(0.49)


@pytest.mark.parametrize(
    "answers",
    [
        {"headrace_choice/0/0": (-1.0, False)},
        {"headrace_choice/0/0": (math.nan, True)},
        {"headrace_choice/0/2": (-1.0, True)},
    ],
    ids=["is_greedy", "not a number", "another request"],
)
def test_other_answers_are_no_good(answers: dict[str, tuple[float, bool | None]]) -> None:
    assert not compare(replace(REFERENCE, answers=REFERENCE.answers | answers), REFERENCE).good(1.0)


@pytest.mark.parametrize(
    ("score", "good"),
    [
        ({"headrace_choice/acc": 0.5000001}, False),
        ({"headrace_word/perplexity": 20.001}, True),
        ({"headrace_word/perplexity": 20.01}, False),
    ],
)
def test_accuracies_must_be_equal_and_perplexities_close(score: dict[str, float], good: bool) -> None:
    assert compare(replace(REFERENCE, scores=REFERENCE.scores | score), REFERENCE).good(1.0) == good


def test_outcomes_are_read_from_what_lm_eval_writes(tmp_path: Path) -> None:
    results = {"headrace_choice": {"name": "headrace_choice", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 1}}
    (tmp_path / "results_1.json").write_text(json.dumps({"results": results}))
    samples = {
        "headrace_choice": [["-1.5", "True"], ["-2.5", "False"]],
        "headrace_word": [["-3.0", "False"]],
        "headrace_text": ["-40.0"],
    }
    for task, answers in samples.items():
        line = json.dumps({"doc_id": 0, "filtered_resps": answers})
        (tmp_path / f"samples_{task}_1.jsonl").write_text(line + "\n")
    outcome = read_outcome(tmp_path, 2.0)
    assert outcome.scores == {"headrace_choice/acc": 0.5}
    assert outcome.answers == {
        "headrace_choice/0/0": (-1.5, True),
        "headrace_choice/0/1": (-2.5, False),
        "headrace_word/0/0": (-3.0, False),
        "headrace_text/0/0": (-40.0, None),
    }
