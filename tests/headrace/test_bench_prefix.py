"""The traces of ``headrace bench prefix``, and eviction policies on them with an engine and without one."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from headrace.bench.main import main as bench
from headrace.bench.prefix_policies import FORMULAS, replay_blocks
from headrace.bench.prefix_traces import TRACES, Sessions, Turn, blocks_wanted, longest
from headrace.simulate.main import main as simulate
from shared.config import Settings
from shared.lifecycle import EXIT_OK, EXIT_USAGE

VOCAB = 400
SHAPE = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


@pytest.fixture
def shape_file(tmp_path: pathlib.Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(SHAPE))
    return str(file)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed(name: str) -> None:
    first, again, other = (TRACES[name](random.Random(seed), 200, VOCAB, 4) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 200
    assert all(0 <= token < VOCAB for turn in first for token in turn.ids)
    assert longest(first) <= 12 * 164


def test_what_a_trace_wants() -> None:
    prompt = list(range(8))
    shared = [Turn(0, [*prompt, 20], 1), Turn(1, [*prompt, 21], 1)]
    assert blocks_wanted(shared, 4) == 3
    assert blocks_wanted([shared[0], Turn(2, list(range(50, 70)), 1), shared[1]], 4) == 2 + 5
    assert blocks_wanted([shared[0], Turn(2, list(range(50, 70)), 1)], 4) == 5
    assert blocks_wanted([Turn(0, [1, 2, 3], 2), Turn(0, [4, 5], 3)], 4) == 3


def test_a_turn_follows_the_answer_of_the_one_before() -> None:
    sessions = Sessions()
    sessions.answered(Turn(0, [1, 2], 1), [3])
    assert sessions.prompt(Turn(0, [4], 1)) == [1, 2, 3, 4]
    assert sessions.prompt(Turn(1, [4], 1)) == [4]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_a_pool_that_is_large_enough_finds_all_that_comes_again(policy: str) -> None:
    turns = TRACES["system"](random.Random(0), 100, VOCAB, 4)
    everything = sum(-(-(len(turn.ids) + 4) // 16) for turn in turns) + 1
    enough, half = (
        replay_blocks(turns, Settings(prefix_cache_policy=policy, num_gpu_blocks_override=count), VOCAB)
        for count in (everything, blocks_wanted(turns, 16) // 2)
    )
    assert 0.0 < half < enough < 1.0


@pytest.mark.parametrize("name", TRACES)
def test_the_simulator_finds_what_the_blocks_alone_say(name: str, shape_file: str, tmp_path: pathlib.Path) -> None:
    trace, result, simulated = (str(tmp_path / each) for each in ("t.jsonl", "r.json", "s.json"))
    flags = ["--model-config", shape_file, "--trace", name, "--num-requests", "150", "--policies", "lru"]
    assert bench(["prefix", *flags, "--blocks-only", "--write-trace", trace, "--output-json", result]) == EXIT_OK
    found = json.loads(pathlib.Path(result).read_text())[name]
    blocks = ["--num-gpu-blocks", str(found["num_blocks"]), "--max-concurrency", "1"]
    assert simulate([trace, *blocks, "--output", simulated, "--disable-tqdm"]) == EXIT_OK
    outcome = json.loads(pathlib.Path(simulated).read_text())
    rate = outcome["prefix_cache_hits"] / outcome["prefix_cache_queries"]
    assert rate == pytest.approx(found["policies"]["lru"]["hit_rate"], abs=0.01)


def test_policies_in_an_engine_find_what_the_blocks_alone_say(
    shape_file: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = []
    for extra in ([], ["--blocks-only"]):
        file = tmp_path / "result.json"
        flags = ["--num-requests=16", "--output-len=3", "--policies", "lfu", "--disable-tqdm", "--pool-share=0.8"]
        common = ["--model-config", shape_file, "--threads=1", "--output-json", str(file)]
        code = bench(["prefix", *common, "--trace=chat", *flags, *extra])
        printed, errors = capfd.readouterr()
        assert code == EXIT_OK, errors
        assert FORMULAS in printed
        found.append(json.loads(file.read_text())["chat"])
    engine, blocks = found
    assert engine["num_blocks"] == blocks["num_blocks"]
    assert 0.0 < engine["policies"]["lfu"]["hit_rate"] == blocks["policies"]["lfu"]["hit_rate"]
    assert engine["policies"]["lfu"]["mean_ttft_ms"] > 0
    assert list(blocks["policies"]) == ["lfu"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--blocks-only"], "--blocks-only needs --trace"),
        (["--num-prompts=2"], "give --num-prompts and --input-length-range, or --trace"),
        (["--trace=chat", "--num-prompts=2"], "--trace makes its own prompts"),
        (["--trace=scan", "--num-requests=20", "--pool-share=0.01", "--blocks-only"], "raise --pool-share"),
        (["--trace=chat", "--max-model-len=64", "--blocks-only"], "max_model_len 64"),
    ],
)
def test_flags_that_do_not_go_together(
    shape_file: str, capfd: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert bench(["prefix", "--model-config", shape_file, *flags]) == EXIT_USAGE
    assert words in capfd.readouterr().err
