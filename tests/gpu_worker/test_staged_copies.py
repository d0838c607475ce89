"""Weights copied through buffers by threads, as to a GPU: here to tensors of the CPU."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runner_harness import Harness, make_runner
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, TinyModels

from gpu_worker.loading.read_ahead import PIECE_BYTES, ReadAhead
from gpu_worker.loading.safetensors_header import DTYPES, read_header
from gpu_worker.loading.safetensors_weights import SafetensorsWeights
from gpu_worker.loading.staged_copies import StagedCopies
from shared.errors import StartupError
from shared.model_config import load_model_config
from shared.model_source import local_source

CPU = torch.device("cpu")
PROMPT = list(range(5, 35))
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    assert not {"load-weights", "read-ahead"} & {thread.name for thread in threading.enumerate()}


def staged(folder: Path, *, threads: int = 3, buffer_bytes: int = 1000) -> SafetensorsWeights:
    weights = SafetensorsWeights(folder)
    weights.stage(StagedCopies(CPU, weights.progress.update, threads=threads, buffer_bytes=buffer_bytes))
    return weights


def folder_with(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_equal_those_in_the_file(tmp_path: Path, stored: str, wanted: torch.dtype) -> None:
    dtype = getattr(torch, stored)
    tensors = {f"t{rows}": torch.randn(rows, 33).to(dtype) for rows in (1, 7, 30)}
    weights = staged(folder_with(tmp_path / "m", tensors))
    loaded = {name: weights.stack([name], [tuple(t.shape)], wanted, CPU) for name, t in tensors.items()}
    weights.finish()
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor.to(wanted), rtol=0, atol=0)
    weights.close()


@pytest.mark.parametrize(("threads", "buffer_bytes"), [(1, 64), (4, 64), (4, 4096), (2, 2**20)])
def test_parts_of_a_fused_layer_lie_one_below_the_other(tmp_path: Path, threads: int, buffer_bytes: int) -> None:
    rows = {"q": 32, "k": 8, "v": 8, "q.bias": 32, "k.bias": 8, "v.bias": 8}
    tensors = {name: torch.randn(size, 24) if "." not in name else torch.randn(size) for name, size in rows.items()}
    weights = staged(folder_with(tmp_path / "m", tensors), threads=threads, buffer_bytes=buffer_bytes)
    stacks = [
        weights.stack(names, [tuple(tensors[name].shape) for name in names], torch.float32, CPU)
        for names in (["q", "k", "v"], ["q.bias", "k.bias", "v.bias"])
    ]
    weights.finish()
    assert torch.equal(stacks[0], torch.cat([tensors[name] for name in ("q", "k", "v")]))
    assert torch.equal(stacks[1], torch.cat([tensors[f"{name}.bias"] for name in ("q", "k", "v")]))
    weights.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_loaded_so_gives_the_same_ids(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool
) -> None:
    folder = tiny_models.folder(architecture, shard_bytes=120_000, tie_word_embeddings=tied)
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = Harness(make_runner(folder)).generate(PROMPT, 8)
    made: list[SafetensorsWeights] = []

    def open_staged(path: Path, **_: bool) -> SafetensorsWeights:
        made.append(staged(path))
        return made[-1]

    monkeypatch.setattr("gpu_worker.loading.open_weights.SafetensorsWeights", open_staged)
    # A weight is repacked when its layer is made, before its contents have come.
    monkeypatch.setattr("gpu_worker.layers.linear.can_prepack", lambda weight: False)
    assert Harness(make_runner(folder)).generate(PROMPT, 8) == expected
    assert made[0].progress.percent == 100


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.randn(50, 20) for index in range(6)}
    weights = staged(folder_with(tmp_path / "m", tensors))
    for name in tensors:
        weights.stack([name], [(50, 20)], torch.float32, CPU)
    weights.finish()
    assert weights.progress.loaded_bytes == sum(tensor.nbytes for tensor in tensors.values())
    weights.close()


def test_a_missing_tensor_and_another_shape_are_named(tmp_path: Path) -> None:
    weights = staged(folder_with(tmp_path / "m", {"here": torch.randn(4, 3)}))
    with pytest.raises(StartupError, match=r"the tensor gone is missing in .*model\.safetensors"):
        weights.stack(["here", "gone"], [(4, 3), (4, 3)], torch.float32, CPU)
    with pytest.raises(StartupError, match=r"the tensor here in .* has the shape \[4, 3\].* \[3, 4\]"):
        weights.stack(["here"], [(3, 4)], torch.float32, CPU)
    weights.close()


def test_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"here": torch.randn(4, 4)})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F4x"'))
    weights = staged(folder)
    with pytest.raises(StartupError, match=r"the tensor here in .* has the type F4x"):
        weights.stack(["here"], [(4, 4)], torch.float32, CPU)
    weights.close()


def test_a_truncated_file_is_named_before_it_is_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"first": torch.randn(4, 4), "second": torch.randn(4, 4)})
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    weights = staged(folder)
    with pytest.raises(StartupError, match=r"model\.safetensors ends before the tensor second does"):
        weights.stack(["first"], [(4, 4)], torch.float32, CPU)
    weights.close()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"here": torch.randn(400, 40)})
    path = folder / "model.safetensors"
    header = read_header(path)
    os.truncate(path, header["here"].offset + 5000)
    copies = StagedCopies(CPU, lambda _: None, threads=2, buffer_bytes=4096)
    copies.copy("here", path, header["here"].offset, torch.float32, torch.empty(400, 40))
    with pytest.raises(StartupError, match=r"cannot read the tensor here in .*model\.safetensors: the file ends"):
        copies.finish()
    copies.close()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    copies = StagedCopies(CPU, lambda _: None, threads=2)
    copies.copy("here", tmp_path / "gone.safetensors", 0, torch.float32, torch.empty(4))
    with pytest.raises(StartupError, match=r"cannot read the tensor here in .*gone\.safetensors: .*No such file"):
        copies.finish()


def test_closing_early_stops_the_threads(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"here": torch.randn(4000, 40)})
    weights = staged(folder, buffer_bytes=64)
    weights.stack(["here"], [(4000, 40)], torch.float32, CPU)
    weights.close()


def test_a_failed_start_stops_the_threads(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.folder("llama", shard_bytes=120_000)
    monkeypatch.setattr("gpu_worker.loading.open_weights.SafetensorsWeights", lambda path, **_: staged(path))
    shape = load_model_config(local_source(folder, "m"))
    assert shape.vocab_size == VOCABULARY
    with pytest.raises(StartupError, match="--kv-cache-bytes"):
        make_runner(folder, num_blocks_override=None, kv_cache_bytes=20_000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:5], "unpack requires"),
        (lambda data: struct.pack("<Q", 10**12) + data[8:], "does not begin like a safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "Expecting value"),
        (lambda data: data.replace(b'"shape":[4,4]', b'"shape":[4,5]'), r"shape \[4, 5\]"),
        (lambda data: data.replace(b'"dtype"', b'"dtypo"'), "dtype"),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], reason: str) -> None:
    path = folder_with(tmp_path / "m", {"here": torch.randn(4, 4)}) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError, match=rf"cannot read the weights in .*model\.safetensors: .*{reason}"):
        read_header(path)


def test_the_header_says_what_safetensors_says(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, 2).to(getattr(torch, dtype)) for name, (dtype, _) in DTYPES.items()} | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }
    path = folder_with(tmp_path / "m", tensors) / "model.safetensors"
    header, data = read_header(path), path.read_bytes()
    loaded = load_file(path)
    assert header.keys() == loaded.keys()
    for name, stored in header.items():
        assert (getattr(torch, stored.dtype), stored.shape) == (loaded[name].dtype, tuple(loaded[name].shape))
        assert stored.nbytes == loaded[name].nbytes
    scalar = header["scalar"]
    assert struct.unpack("<f", data[scalar.offset : scalar.offset + 4]) == (1.5,)


def test_reading_ahead(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PIECE_BYTES + 5000))
    for paths in ([path], [path, path], []):
        ahead = ReadAhead(paths)
        ahead.join()
        assert 0 <= ahead.bytes_read <= len(paths) * path.stat().st_size
    ahead = ReadAhead([path])
    path.unlink()
    ahead.stop()


def test_weights_read_ahead_end_with_them(tiny_models: TinyModels) -> None:
    folder = tiny_models.folder("llama", shard_bytes=120_000)
    weights = SafetensorsWeights(folder, read_ahead=True)
    name = next(iter(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]))
    shape = load_file(folder / weights._file(name))[name].shape
    assert weights.take(name, tuple(shape)).shape == shape
    weights.close()
