"""Random checkpoints of real shapes, to measure how fast weights are loaded.

    python benchmarks/make_checkpoint.py llama-3.1-8b /tmp/llama-3.1-8b

A folder as one of the hub: config.json, safetensors shards and their index, but no tokenizer. Values are drawn on the
GPU if there is one; threads draw and write the tensors side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.bench.offline import SHAPES
from headrace.bench.startup import drop_from_page_cache

SHARD_BYTES = 5 * 10**9
"""Of the largest file, unless one tensor is larger: as most checkpoints of the hub are cut."""
THREADS = 8
DEVIATION = 0.02
ITEM_BYTES = 2


class Place(NamedTuple):
    """Where a tensor lies in a file."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES * torch.Size(self.shape).numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=sorted(path.stem for path in SHAPES.glob("*.json")))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    nbytes = make_checkpoint(args.shape, args.folder)
    print(f"{nbytes / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s: {args.folder}")


def make_checkpoint(shape_name: str, folder: Path, *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a checkpoint in bfloat16 of the shape ``headrace/bench/shapes/<shape_name>.json`` to ``folder``.

    Norms are 1, other tensors normally distributed with the deviation of an untrained model. The files are on the disk
    when this returns.

    Returns:
        Bytes of all tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES / f"{shape_name}.json"
    shards = _cut(_tensor_shapes(json.loads(config.read_text())), shard_bytes)
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with contextlib.ExitStack() as files, ThreadPoolExecutor(THREADS) as threads:
        written = []
        for name, places in zip(names, shards, strict=True):
            opened = files.enter_context((folder / name).open("wb"))
            header = _header(places)
            opened.write(header)
            opened.flush()
            written += [threads.submit(_write, opened.fileno(), len(header), place, seed) for place in places]
        for result in written:
            result.result()
    total = sum(place.nbytes for places in shards for place in places)
    if len(shards) > 1:
        weight_map = {place.name: name for name, places in zip(names, shards, strict=True) for place in places}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    shutil.copyfile(config, folder / "config.json")
    for path in _files(folder):
        with path.open("rb") as written_file:
            os.fsync(written_file.fileno())
    return total


def drop_page_cache(folder: Path) -> None:
    """Let the kernel forget the contents of the files in ``folder``, so that they are read from the disk again."""
    drop_from_page_cache(_files(folder))


def _tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers stores them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def _cut(shapes: dict[str, tuple[int, ...]], shard_bytes: int) -> list[list[Place]]:
    shards: list[list[Place]] = [[]]
    end = 0
    for name, shape in shapes.items():
        nbytes = Place(name, shape, 0).nbytes
        if shards[-1] and end + nbytes > shard_bytes:
            shards.append([])
            end = 0
        shards[-1].append(Place(name, shape, end))
        end += nbytes
    return shards


def _header(places: list[Place]) -> bytes:
    """The length of the description in eight bytes, and the description padded to a multiple of eight."""
    tensors: dict[str, Any] = {
        place.name: {
            "dtype": "BF16",
            "shape": list(place.shape),
            "data_offsets": [place.offset, place.offset + place.nbytes],
        }
        for place in places
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(file: int, start: int, place: Place, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "norm" in place.name:
        tensor = torch.ones(place.shape, dtype=torch.bfloat16)
    else:
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {place.name}".encode()))
        tensor = torch.empty(place.shape, dtype=torch.bfloat16, device=device)
        tensor = tensor.normal_(0.0, DEVIATION, generator=generator).cpu()
    rest = tensor.view(torch.uint8).reshape(-1).numpy().data
    offset = start + place.offset
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


if __name__ == "__main__":
    main()
