"""``headrace complete`` against a running server, as a user runs it."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from headrace.client import stream_completion

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROMPT = "Once upon a time"
KEY = "the key of the test server"
FIGURES = r"\d+ prompt tokens, \d+ output tokens, first token after \d+ ms, then [\d.]+ tokens/s, [\d.]+ s in all\n"
GREEDY = ("--temperature=0", "--max-tokens=12")


@pytest.mark.parametrize("from_stdin", [False, True])
def test_prints_what_the_api_answers(demo_server: str, asks: Run, from_stdin: bool) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    expected = "".join(reply.text for reply in stream_completion(demo_server, body, api_key=KEY))
    done = asks("complete", *GREEDY, stdin=PROMPT + "\n") if from_stdin else asks("complete", PROMPT, *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.removesuffix("\n") + "\n"
    assert re.fullmatch(FIGURES, done.stderr)
    assert ", 12 output tokens," in done.stderr


def test_quiet_prints_the_answer_alone(asks: Run) -> None:
    done = asks("complete", PROMPT, *GREEDY, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_sampling_flags_reach_the_server(asks: Run) -> None:
    flags = ("--max-tokens=8", "--temperature=2", "--top-p=0.9", "--top-k=50", "--min-p=0.01", "--quiet")
    answers = [asks("complete", PROMPT, *flags, f"--seed={seed}").stdout for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_stop_ends_the_answer(asks: Run) -> None:
    whole = asks("complete", PROMPT, *GREEDY, "--quiet").stdout
    word = whole.split()[3]
    stopped = asks("complete", PROMPT, *GREEDY, "--quiet", "--stop", "no such text", "--stop", word).stdout
    assert stopped.rstrip("\n") == whole[: whole.index(word)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature=1000"], "HTTP 400: temperature"),
        (["--model=another"], "HTTP 404: "),
        (["--api-key=wrong"], "HTTP 401: "),
    ],
    ids=["field", "model", "key"],
)
def test_a_refusal_is_shown_in_the_servers_words(asks: Run, flags: list[str], words: str) -> None:
    done = asks("complete", PROMPT, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(f"headrace complete: error: {words}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_nobody_there_is_said_in_words(run: Run) -> None:
    done = run("complete", PROMPT, "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert done.stderr == "headrace complete: error: nothing listens at http://127.0.0.1:9 (connection refused)\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "ftp://127.0.0.1", "http://127.0.0.1/other", ""])
def test_what_is_no_url_is_refused(run: Run, url: str) -> None:
    done = run("complete", PROMPT, f"--url={url}")
    assert done.returncode == 2
    assert "is not the URL of a server" in done.stderr


def test_a_model_is_served_when_nobody_is_there(run: Run, tmp_path: pathlib.Path) -> None:
    done = run("complete", PROMPT, *GREEDY, "--url=127.0.0.1:9", "--model=demo", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_said_in_words(run: Run) -> None:
    done = run("complete", PROMPT, "--url=127.0.0.1:9", "--model=./no/such/model")
    assert done.returncode == 78
    assert "./no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_text_comes_as_it_is_generated_and_ctrl_c_ends_it(demo_server: str) -> None:
    command = [sys.executable, "-P", "-m", "headrace", "complete", PROMPT, f"--url={demo_server}", f"--api-key={KEY}"]
    with subprocess.Popen([*command, "--max-tokens=4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
