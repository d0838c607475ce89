"""Choices of kernels, the tables that hold them, and the layers that follow them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch

from gpu_worker.kernels.gemm_config import GemmChoice, GemvConfig, SplitKConfig, decode_choice, encode_choice
from gpu_worker.layers import gemm_choice
from gpu_worker.layers.cuda_linear import CudaHead, CudaLinear
from gpu_worker.layers.gemm_choice import (
    BUCKETS,
    MAX_TOKENS,
    SHARED_BYTES,
    SHIPPED,
    GemmShape,
    bucket_of,
    cache_file,
    choices_for,
    invariant_config,
    known_choices,
    load_cached,
    read_choices,
    rule,
    store_cached,
)
from gpu_worker.layers.gemm_tuning import candidates, fastest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
CHOICES: list[GemmChoice] = [None, GemvConfig(4, 512, 4), SplitKConfig(64, 16, 128, 3, 4, 4)]
MODEL_SHAPES = [
    GemmShape(out_features, in_features, torch.bfloat16, out_dtype, *gated)
    for out_features, in_features, out_dtype, *gated in (
        (4096, 1024, torch.bfloat16),
        (1024, 2048, torch.bfloat16),
        (6144, 1024, torch.bfloat16, True),
        (1024, 3072, torch.bfloat16),
        (151936, 1024, torch.float32),
        (6144, 4096, torch.bfloat16),
        (28672, 4096, torch.bfloat16, True),
        (4096, 14336, torch.bfloat16),
        (128256, 4096, torch.float32),
        (960, 576, torch.bfloat16),
    )
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known_choices.cache_clear()
    yield
    known_choices.cache_clear()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choices_survive_json(choice: GemmChoice) -> None:
    assert decode_choice(json.loads(json.dumps(encode_choice(choice)))) == choice


@pytest.mark.parametrize("entry", [[], ["gemv", 4], ["gemv", 4, 0, 4], ["gemv", 4, True, 4], ["mystery", 1], "cublas"])
def test_other_entries_are_refused(entry: list[str | int]) -> None:
    with pytest.raises(ValueError, match="not a choice"):
        decode_choice(entry)


def test_the_next_bucket_decides() -> None:
    assert [bucket_of(tokens) for tokens in (1, 3, 5, 64, 65, 256, 257)] == [1, 4, 8, 64, 128, 256, None]


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.key)
def test_whatever_may_be_chosen_fits_the_shape_and_the_device(shape: GemmShape) -> None:
    for tokens in BUCKETS:
        for choice in (*candidates(shape, tokens), rule(shape, tokens), invariant_config(shape)):
            if isinstance(choice, GemvConfig):
                assert tokens <= 4
            elif choice is not None:
                assert choice.shared_bytes(2) <= SHARED_BYTES
                blocks = -(-shape.in_features // choice.block_k)
                per_part = -(-blocks // choice.parts)
                assert (choice.parts - 1) * per_part < blocks, "a part without work"
            if isinstance(choice, SplitKConfig) and choice != invariant_config(shape):
                assert 1 < tokens <= 128
    assert all(len(list(candidates(shape, tokens))) <= 25 for tokens in BUCKETS)


def test_dtypes_without_a_kernel_go_to_the_library() -> None:
    shape = GemmShape(64, 64, torch.float32, torch.float32)
    assert {rule(shape, tokens) for tokens in BUCKETS} == {None}
    assert list(candidates(shape, 1)) == [None]


def test_measurements_come_before_the_rule() -> None:
    shape = MODEL_SHAPES[0]
    store_cached("Some GPU / 80GB", {shape.key: {4: None, 8: SplitKConfig(64, 16, 64, 2, 4, 4)}})
    assert cache_file("Some GPU / 80GB").name == "Some_GPU_80GB.json"
    choices = choices_for(shape, "Some GPU / 80GB")
    assert choices[3] is choices[4] is None
    assert choices[5] == choices[8] == SplitKConfig(64, 16, 64, 2, 4, 4)
    assert choices[1] == rule(shape, 1)
    assert len(choices) == MAX_TOKENS + 1


def test_measurements_are_added_to_earlier_ones() -> None:
    store_cached("gpu", {"a": {1: None}, "b": {1: None}})
    store_cached("gpu", {"a": {2: None}})
    assert load_cached("gpu") == {"a": {1: None, 2: None}, "b": {1: None}}


def test_measurements_with_other_libraries_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store_cached("gpu", {"a": {1: None}})
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert load_cached("gpu") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"libraries": "x"}',
        f'{{"libraries": "torch {torch.__version__}", "choices": {{"a": {{"8": []}}}}}}',
    ],
)
def test_a_damaged_cache_is_left_alone(text: str) -> None:
    path = cache_file("gpu")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_cached("gpu") == {}


def test_a_gemv_for_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take 8 tokens"):
        read_choices({"a": {"8": ["gemv", 4, 512, 4]}})


def test_the_shipped_table_can_be_read() -> None:
    for entries in json.loads(SHIPPED.read_text()).values():
        for choices in read_choices(entries).values():
            assert set(choices) <= set(BUCKETS)


def test_the_library_stays_where_nothing_is_clearly_faster() -> None:
    kernel = CHOICES[1]
    assert fastest({None: 10.0, kernel: 9.9}) is None
    assert fastest({None: 10.0, kernel: 9.0}) == kernel


@pytest.mark.parametrize("tokens", [0, 1, 3, 5, 16, 33, 70, 300])
def test_a_layer_computes_the_product_for_any_number_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SplitKConfig(64, 32, 32, 2, 4, 3)
    measured = {1: GemvConfig(2, 32, 2), 4: GemvConfig(4, 64, 4), 16: small, 64: small}
    monkeypatch.setattr(gemm_choice, "known_choices", lambda name: {LAYER_SHAPE.key: measured})
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(tokens, 64)
    weight, bias, x = (tensor.to(HALF).to(DEVICE) for tensor in (weight, bias, x))
    layer = CudaLinear(weight, bias)
    result = layer(x)
    expected = x.float() @ weight.float().T + bias.float()
    assert result.dtype == HALF
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=2e-2)


LAYER_SHAPE = GemmShape(96, 64, HALF, HALF)


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_head_gives_unrounded_logits(tokens: int) -> None:
    weight, x = (torch.randn(rows, 64).to(HALF).to(DEVICE) for rows in (96, tokens))
    result = CudaHead(weight)(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_an_invariant_layer_gives_a_token_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    weight, x = (torch.randn(rows, 192).to(dtype).to(DEVICE) for rows in (128, 70))
    layer = CudaLinear(weight, batch_invariant=True)
    together = layer(x)
    torch.testing.assert_close(together.float(), x.float() @ weight.float().T, rtol=1e-2, atol=2e-2)
    for first, last in ((0, 1), (69, 70), (3, 20)):
        assert torch.equal(layer(x[first:last]), together[first:last])
