"""``--config FILE.yaml`` of ``headrace serve``."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest

from headrace.client import RequestFailed, stream_chat
from headrace.local_server import local_server
from shared.config import Settings, parse_settings

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    def write_file(text: str) -> str:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def parse(*argv: str, **environ: str) -> Settings:
    return parse_settings(None, argv, environ=environ, positional_model=True)


def test_every_kind_of_value(write: Write) -> None:
    path = write(
        "model: m\nmax-model-len: 16K\nmax_num_seqs: 4\nwatermark: 1e-1\nenforce-eager: true\n"
        "enable-prefix-caching: no\napi-key: [a, b]\nserved-model-name: n\nrevision:\nstep-timeout-s: 5\n"
    )
    assert parse("--config", path) == Settings(
        config=path,
        model="m",
        max_model_len=16_384,
        max_num_seqs=4,
        watermark=0.1,
        enforce_eager=True,
        enable_prefix_caching=False,
        api_key=["a", "b"],
        served_model_name=["n"],
        step_timeout_s=5.0,
    )


def test_flags_then_environment_then_file_then_defaults(write: Write) -> None:
    path = write("model: file\nport: 1\nhost: file\nblock-size: 32\nenforce-eager: true\n")
    found = parse("flag", "--no-enforce-eager", HEADRACE_CONFIG=path, HEADRACE_MODEL="environment", HEADRACE_PORT="2")
    assert (found.model, found.port, found.host, found.block_size) == ("flag", 2, "file", 32)
    assert (found.enforce_eager, found.max_num_seqs) == (False, None)


def test_an_empty_file_changes_nothing(write: Write) -> None:
    path = write("# nothing\n")
    assert parse("--config", path) == Settings(config=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 4", "unknown setting max-num-seq; did you mean max-num-seqs?"),
        ("config: other.yaml", "unknown setting config"),
        ("1: 2", "unknown setting 1"),
        ("block-size: 16\nblock_size: 32", "block-size is given twice"),
        ("max-num-seqs: many", "max-num-seqs: 'many' is not a whole number"),
        ("max-num-seqs: true", "max-num-seqs: True is not a number"),
        ("max-num-seqs: 0", "--max-num-seqs must be at least 1"),
        ("watermark: [1]", "watermark: [1] is not a number"),
        ("enforce-eager: 'false'", "enforce-eager: 'false' is not true or false"),
        ("revision: 0123", "revision: 83 is not text; put it in quotes"),
        ("api-key: [a, 5]", "api-key: 5 is not text; put it in quotes"),
        ("dtype: int3", "dtype: 'int3' is not one of auto,"),
        ("- model", "it must hold lines of the form flag-name: value"),
        ("model: [", "cannot be read"),
        ("model: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(write: Write, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--config", write(text))
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_errors_of_the_command(run: Run, write: Write) -> None:
    done = run("serve", "--config", "no/such.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("headrace serve: error: --config no/such.yaml cannot be read: ")
    done = run("serve", "--config", write("prot: 8000"))
    assert done.returncode == 2
    assert "unknown setting prot; did you mean port?" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_takes_its_settings_from_the_file(write: Write, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    path = write(f"port: 1\nserved-model-name: from-file\nmax-model-len: 64\nrun-dir: {tmp_path / 'run'}\n")
    body = {"model": "from-file", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with local_server("demo", print, ["--config", path]) as url:
        assert "".join(reply.text for reply in stream_chat(url, body))
        with pytest.raises(RequestFailed, match="max_model_len is 64"):
            list(stream_chat(url, body | {"max_tokens": 100}))
