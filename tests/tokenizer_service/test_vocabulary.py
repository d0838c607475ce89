from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shared.errors import StartupError
from shared.model_source import ModelSource, resolve_model
from tests.tokenizer_service.gguf_files import sentencepiece_pieces, write_bpe, write_sentencepiece
from tests.tokenizer_service.vocabularies import LLAMA3_SPECIAL, byte_level, save, word_level
from tokenizer_service.vocabulary import Vocabulary, load_vocabulary

BOS, END, *_ = LLAMA3_SPECIAL
TEXTS = [
    "",
    "  12  34",
    "Hello, world!",
    "a🫠b🥹龜 👩‍👩‍👧‍👦",
    "don't I'LL we've THEY'RE",
    "\n\n\t  tabs\r\n \n  x",
    "١٢٣ ½ ⅷ 3.14159 1234567",
    "naïve café ﬁ ŉ",
    "한국어 테스트 日本語 テスト。",
    "x=1;y+=2//c <tool_call> a<|eot_id|>b <s>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "the quick brown fox the thing",
    "   ",
    "\u200b\u00a0\u3000",
    "A" * 200,
]


def random_texts(count: int) -> list[str]:
    draw = random.Random(7)
    letters = "ab Z09\n\t.,'!?-_<>|=+éñß漢字かなЖя🙂🏽\u200d½²٣\u00a0\u3000\r/\\\"(){}[]ingthe"
    return ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(count)]


def ids(vocabulary: Vocabulary, text: str, *, special: bool = True) -> list[int]:
    return list(vocabulary.tokenizer.encode(text, add_special_tokens=special).ids)


def from_gguf(path: Path) -> Vocabulary:
    return load_vocabulary(ModelSource(path, "gguf", str(path)))


def from_folder(path: Path) -> Vocabulary:
    return load_vocabulary(ModelSource(path, "folder", str(path)))


def test_demo() -> None:
    demo = load_vocabulary(resolve_model("demo"))
    assert ids(demo, "  12  34") == [256, 33, 34, 256, 35, 36]
    assert ids(demo, "<|im_start|>x<|im_end|>") == [1, 104, 2]
    assert demo.bos_id is None
    assert demo.special_tokens["bos_token"] == "<|im_start|>"
    assert "add_generation_prompt" in demo.chat_templates["default"]
    assert demo.tokenizer.decode(ids(demo, TEXTS[3]), skip_special_tokens=True) == TEXTS[3]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("bos", [None, BOS])
def test_folders_encode_like_transformers(tmp_path: Path, bos: str | None, config: dict[str, bool]) -> None:
    named = {"bos_token": BOS, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save(tmp_path / "m", byte_level(LLAMA3_SPECIAL, bos=bos), **named, **config)
    ours, theirs = from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ids(ours, text) == theirs(text)["input_ids"]
        assert ids(ours, text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos_id is not None) == (theirs("x")["input_ids"][0] == theirs.bos_token_id)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level(LLAMA3_SPECIAL)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    vocabulary = from_folder(save(tmp_path / "m", tokenizer))
    assert len(ids(vocabulary, "x")) == 1
    assert len(ids(vocabulary, "the lazy dog jumps over")) > 4


def test_where_chat_templates_come_from(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", word_level())
    assert from_folder(folder).chat_templates == {}
    save(folder, word_level(), chat_template="one")
    assert from_folder(folder).chat_templates == {"default": "one"}
    save(
        folder,
        word_level(),
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    )
    assert from_folder(folder).chat_templates == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("file")
    assert from_folder(folder).chat_templates == {"default": "file"}


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", word_level(), bos_token={"content": "<s>"}, pad_token=None)
    assert from_folder(folder).special_tokens == {"bos_token": "<s>"}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        from_folder(tmp_path)


def bpe_file(folder: Path, pre: str, add_bos: bool | None = None) -> tuple[Path, Tokenizer]:
    tokenizer = byte_level(LLAMA3_SPECIAL)
    return write_bpe(folder / f"{pre}.gguf", tokenizer, pre, bos=BOS, eos=END, add_bos=add_bos), tokenizer


def test_gguf_gives_the_ids_of_the_tokenizer_that_it_was_made_from(tmp_path: Path) -> None:
    path, tokenizer = bpe_file(tmp_path, "qwen2")
    vocabulary = from_gguf(path)
    for text in TEXTS[1:8]:
        assert vocabulary.tokenizer.decode(ids(vocabulary, text)) == text
    assert ids(vocabulary, "<tool_call>12<|eot_id|>") == tokenizer.encode("<tool_call>12<|eot_id|>").ids


def test_gguf_bos(tmp_path: Path) -> None:
    for pre, add_bos, expected in (
        ("qwen2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ):
        path, tokenizer = bpe_file(tmp_path, pre, add_bos)
        vocabulary = from_gguf(path)
        assert vocabulary.bos_id == (tokenizer.token_to_id(BOS) if expected else None)
        assert (ids(vocabulary, "x")[0] == tokenizer.token_to_id(BOS)) == expected


def test_gguf_sentencepiece(tmp_path: Path) -> None:
    pieces = sentencepiece_pieces()
    names = [piece for piece, _, _ in pieces]
    vocabulary = from_gguf(write_sentencepiece(tmp_path / "s.gguf", pieces, add_space_prefix=True))
    assert [names[i] for i in ids(vocabulary, "the quick")] == ["<s>", "▁the", "▁quick"]
    assert [names[i] for i in ids(vocabulary, "ñ")] == ["<s>", "▁", "<0xC3>", "<0xB1>"]
    assert vocabulary.tokenizer.decode(ids(vocabulary, "the ñ 漢")) == "the ñ 漢"


def test_gguf_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    path, _ = bpe_file(tmp_path, "unheard-of")
    with pytest.raises(StartupError, match="'unheard-of', which is not supported"):
        from_gguf(path)


# -- against llama.cpp, where it is installed ------------------------------------------------------------------------


@contextmanager
def llama_cpp(path: Path) -> Iterator[Callable[[str], list[int]]]:
    """The encoder of llama.cpp's own server, on loopback."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.port, params.warmup = 256, 1, 0, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)

    def encode(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return list(json.load(answer)["tokens"])

    yield encode


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["demo", "llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "default", "sentencepiece", "no-prefix"],
)
def test_gguf_ids_equal_llama_cpps(tmp_path: Path, kind: str) -> None:
    if kind == "demo":
        path = resolve_model("demo").path
    elif kind in ("sentencepiece", "no-prefix"):
        path = write_sentencepiece(
            tmp_path / "s.gguf", sentencepiece_pieces(), add_space_prefix=kind == "sentencepiece"
        )
    else:
        path, _ = bpe_file(tmp_path, kind)
    vocabulary = from_gguf(path)
    with llama_cpp(path) as encode:
        for text in [*TEXTS, *random_texts(150)]:
            assert ids(vocabulary, text) == encode(text), text
