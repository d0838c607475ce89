"""``headrace run-batch`` against a server of the test's own, which can be overloaded, break connections and go away."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import email.utils
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from headrace import batch_client
from headrace.batch_client import delay_s, retry_after_s
from headrace.batch_journal import Journal
from headrace.run_batch import main

COMMAND = (sys.executable, "-P", "-m", "headrace", "run-batch")
Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], "contextlib.AbstractContextManager[str]"]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


async def echo(_request: web.Request, prompt: str) -> web.StreamResponse:
    return web.json_response({"text": prompt, "usage": USAGE}, headers={"X-Request-Id": f"rid-{prompt}"})


@pytest.fixture
def serve() -> Serve:
    """``with serve(handler) as url``: calls ``handler(request, prompt)`` for each POST."""

    @contextlib.contextmanager
    def serving(handler: Handler) -> Iterator[str]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            return await handler(request, body.get("prompt") or body["messages"])

        async def run() -> None:
            app = web.Application()
            app.router.add_post("/v1/{tail:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=0.05)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            started.set()
            await stop.wait()
            await runner.cleanup()

        url: list[str] = []
        started, loop = threading.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        try:
            assert started.wait(10)
            yield url[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    return serving


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_client, "FIRST_DELAY_S", 0.05)
    for name in ("HEADRACE_URL", "HEADRACE_MODEL", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(custom_id: str, /, **changes: Any) -> str:
    found = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return json.dumps(found | changes)


def write(path: pathlib.Path, *lines: str) -> None:
    path.write_text("".join(text + "\n" for text in lines))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(found) for found in text.splitlines()]


def ids(path: pathlib.Path) -> list[str]:
    return sorted(str(found["custom_id"]) for found in read(path))


def run(files: tuple[pathlib.Path, pathlib.Path], url: str, *flags: str) -> int:
    return main(["-i", str(files[0]), "-o", str(files[1]), "--url", url, *flags])


# -- format ----------------------------------------------------------------------------------------------------------


def test_results_have_openais_form(serve: Serve, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chat = line("b", url="/v1/chat/completions", body={"messages": [{"role": "user", "content": "é\n✓"}]})
    write(files[0], line("a"), "", chat)
    with serve(echo) as url:
        assert run(files, url) == 0
    found = {result["custom_id"]: result for result in read(files[1])}
    assert list(found["a"]) == ["id", "custom_id", "response", "error"]
    assert found["a"]["id"].startswith("batch_req_")
    assert found["a"]["response"] == {
        "status_code": 200,
        "request_id": "rid-a",
        "body": {"text": "a", "usage": USAGE},
    }
    assert found["a"]["error"] is None
    assert found["b"]["response"]["body"]["text"] == [{"role": "user", "content": "é\n✓"}]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("2 succeeded; 6 prompt tokens, 4 output tokens in ")


def test_the_key_is_sent_and_an_http_error_is_a_response(serve: Serve, files: Any) -> None:
    async def guarded(request: web.Request, prompt: str) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.Response(text="plain words", status=200 if prompt == "a" else 500)

    write(files[0], line("a"), line("b"))
    with serve(guarded) as url:
        assert run(files, url) == 1
        assert [found["response"]["status_code"] for found in read(files[1])] == [401, 401]
        assert run(files, url, "--retry-failed", "--api-key", "secret") == 1
    found = {result["custom_id"]: result for result in read(files[1])}
    assert found["a"]["response"]["body"] == "plain words"
    assert (found["b"]["response"]["status_code"], found["b"]["error"]) == (500, None)


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        ("{", "invalid_json", "not JSON: "),
        ('{"custom_id": NaN}', "invalid_json", "not JSON: "),
        ("[1]", "invalid_json", "not a JSON object"),
        (line("x", custom_id=None), "missing_custom_id", "custom_id is missing"),
        (line("x", custom_id=5), "invalid_custom_id", "custom_id must be a string that is not empty"),
        (line(""), "invalid_custom_id", "custom_id must be a string that is not empty"),
        (line("first"), "duplicate_custom_id", "custom_id 'first' is that of line 1 already"),
        (line("x", method="GET"), "invalid_method", 'method must be POST, got "GET"'),
        (line("x", url="/v1/images"), "invalid_url", "url must be one of /v1/chat/completions, /v1/completions, got"),
        (line("x", url=["/v1/completions"]), "invalid_url", "url must be one of"),
        (line("x", body="text"), "invalid_body", 'body must be an object, got "text"'),
        (line("x", body={"stream": True}), "invalid_body", "stream must be left out"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(
    serve: Serve, files: Any, bad: str, code: str, words: str
) -> None:
    write(files[0], line("first"), bad, line("last"))
    with serve(echo) as url:
        assert run(files, url) == 1
        assert run(files, url) == 1
    refusals = [result for result in read(files[1]) if result["error"]]
    assert [(found["error"]["code"], found["error"]["line"]) for found in refusals] == [(code, 2)]
    assert refusals[0]["error"]["message"].startswith(f"line 2: {words}")
    assert refusals[0]["response"] is None
    own = "x" if code in ("invalid_method", "invalid_url", "invalid_body") else None
    assert ids(files[1]) == sorted(["first", "last", str(own)])


def test_marks_and_line_ends_of_other_systems_are_taken(serve: Serve, files: Any) -> None:
    files[0].write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(line, "abc")).encode())
    with serve(echo) as url:
        assert run(files, url) == 0
    assert ids(files[1]) == ["a", "b", "c"]


# -- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_an_overloaded_server_is_asked_again(serve: Serve, files: Any, status: int) -> None:
    tries: collections.Counter[str] = collections.Counter()

    async def overloaded(request: web.Request, prompt: str) -> web.StreamResponse:
        tries[prompt] += 1
        if tries[prompt] <= 2:
            return web.json_response({"error": {"message": "full"}}, status=status, headers={"Retry-After": "0"})
        return await echo(request, prompt)

    write(files[0], *map(line, "abcdef"))
    with serve(overloaded) as url:
        assert run(files, url) == 0
    assert ids(files[1]) == list("abcdef")
    assert set(tries.values()) == {3}


def test_retry_after_is_obeyed(serve: Serve, files: Any) -> None:
    at: list[float] = []

    async def later(request: web.Request, prompt: str) -> web.StreamResponse:
        at.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "1"}) if len(at) == 1 else await echo(request, prompt)

    write(files[0], line("a"))
    with serve(later) as url:
        assert run(files, url) == 0
    assert at[1] - at[0] >= 1.0


def test_a_slow_server_is_not_given_up_while_it_answers(serve: Serve, files: Any) -> None:
    """One request meets 429 more often than ``--max-retries`` says, and between two times another one is answered."""
    refusals = answers_wanted = 0

    def results() -> int:
        return files[1].read_bytes().count(b"\n")

    async def slow(request: web.Request, prompt: str) -> web.StreamResponse:
        nonlocal refusals, answers_wanted
        if prompt == "unlucky" and refusals < 4:
            before = results()
            answers_wanted = refusals
            while refusals and results() == before:
                await asyncio.sleep(0.001)
            refusals += 1
            return web.Response(status=429)
        while prompt != "unlucky" and int(prompt) > answers_wanted:
            await asyncio.sleep(0.001)
        return await echo(request, prompt)

    write(files[0], *map(line, ["unlucky", "1", "2", "3"]))
    with serve(slow) as url:
        assert run(files, url, "--max-retries=1") == 0
    assert ids(files[1]) == ["1", "2", "3", "unlucky"]
    assert refusals == 4


def test_after_the_last_try_the_last_answer_stands(serve: Serve, files: Any) -> None:
    tries = collections.Counter[str]()

    async def stuck(request: web.Request, prompt: str) -> web.StreamResponse:
        tries[prompt] += 1
        return web.json_response({"error": {}}, status=503) if prompt == "a" else await echo(request, prompt)

    write(files[0], line("a"), line("b"))
    with serve(stuck) as url:
        assert run(files, url, "--max-retries=2", "--max-concurrency=1") == 1
    assert [(r["custom_id"], r["response"]["status_code"]) for r in read(files[1])] == [("a", 503), ("b", 200)]
    assert tries == {"a": 3, "b": 1}


def test_a_lost_connection_is_tried_again_and_then_fails_alone(serve: Serve, files: Any) -> None:
    tries = collections.Counter[str]()

    async def breaking(request: web.Request, prompt: str) -> web.StreamResponse:
        tries[prompt] += 1
        if prompt == "never" or (prompt == "once" and tries[prompt] == 1):
            assert request.transport is not None
            request.transport.abort()
        return await echo(request, prompt)

    write(files[0], line("never"), line("once"), line("good"))
    with serve(breaking) as url:
        assert run(files, url, "--max-retries=1") == 1
    found = {result["custom_id"]: result for result in read(files[1])}
    assert [found[name]["error"] for name in ("once", "good")] == [None, None]
    assert (found["never"]["response"], found["never"]["error"]["code"]) == (None, "connection_error")
    assert tries == {"never": 2, "once": 2, "good": 1}


def test_a_try_that_takes_too_long_is_ended(serve: Serve, files: Any) -> None:
    async def slow(request: web.Request, prompt: str) -> web.StreamResponse:
        await asyncio.sleep(60 if prompt == "slow" else 0)
        return await echo(request, prompt)

    write(files[0], line("slow"), line("good"))
    with serve(slow) as url:
        assert run(files, url, "--max-retries=0", "--timeout=4") == 1
    assert {r["custom_id"]: r["error"] and r["error"]["code"] for r in read(files[1])} == {
        "slow": "timeout",
        "good": None,
    }


def test_a_server_that_is_gone_ends_the_run_and_leaves_the_rest_to_do(
    serve: Serve, files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    leave: list[Callable[[], object]] = []

    async def leaving(request: web.Request, prompt: str) -> web.StreamResponse:
        if prompt == "r3":
            threading.Thread(target=leave[0]).start()
            await asyncio.sleep(5)
        return await echo(request, prompt)

    write(files[0], *(line(f"r{i}") for i in range(6)))
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serve(leaving))
        leave.append(stack.pop_all().close)
        assert run(files, url, "--max-retries=2", "--max-concurrency=1") == 1
    assert ids(files[1]) == ["r0", "r1", "r2"]
    said = capsys.readouterr().err
    assert "Not finished: the same command does the rest.\n" in said
    assert f"headrace run-batch: error: {url}: Cannot connect to host" in said
    with serve(echo) as url:
        assert run(files, url) == 0
    assert ids(files[1]) == [f"r{i}" for i in range(6)]


def test_nobody_there_is_said_at_once(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write(files[0], line("a"))
    assert run(files, "127.0.0.1:9") == 1
    assert capsys.readouterr().err.endswith("headrace run-batch: error: nothing answers at http://127.0.0.1:9\n")
    assert files[1].read_text() == ""


def test_waits() -> None:
    assert retry_after_s("7") == 7.0
    soon = email.utils.format_datetime(email.utils.localtime() + datetime.timedelta(seconds=60))
    assert 55 <= retry_after_s(soon) <= 60
    assert [retry_after_s(text) for text in ("", "soon", "-3", "nan", "1e9")] == [0, 0, 0, 0, 600]
    assert all(0.5 <= delay_s(tries) / min(30, 0.05 * 2 ** (tries - 1)) <= 1 for tries in range(1, 60))


# -- continuing ------------------------------------------------------------------------------------------------------


def test_wherever_a_run_was_cut_off_the_next_one_completes_it(serve: Serve, files: Any) -> None:
    write(files[0], *map(line, "abc"))
    asked = collections.Counter[str]()

    async def counting(request: web.Request, prompt: str) -> web.StreamResponse:
        asked[prompt] += 1
        return await echo(request, prompt)

    with serve(counting) as url:
        assert run(files, url, "--quiet", "--max-concurrency=1") == 0
        whole = files[1].read_bytes()
        for cut in [*range(0, len(whole), 17), len(whole) - 1]:
            for tail in (b"", b"\0" * 9):
                complete = whole[:cut].count(b"\n") + (cut == len(whole) - 1 and not tail)
                files[1].write_bytes(whole[:cut] + (tail if cut and whole[cut - 1] != b"\n" else b""))
                asked.clear()
                assert run(files, url, "--quiet") == 0
                assert ids(files[1]) == ["a", "b", "c"]
                assert sum(asked.values()) == 3 - complete
        assert run(files, url, "--quiet") == 0


@pytest.mark.parametrize("foreign", ["notes of mine", '{"custom_id": "a"}\n', line("a") + "\n", "\n"])
def test_another_file_is_neither_changed_nor_added_to(
    files: Any, capsys: pytest.CaptureFixture[str], foreign: str
) -> None:
    write(files[0], line("a"))
    files[1].write_text(foreign)
    assert run(files, "127.0.0.1:9") == 2
    assert f"{files[1]}, line 1 is no result of a batch" in capsys.readouterr().err
    assert files[1].read_text() == foreign


def test_failures_stand_until_they_are_to_be_tried_again(serve: Serve, files: Any) -> None:
    healthy = False

    async def moody(request: web.Request, prompt: str) -> web.StreamResponse:
        return await echo(request, prompt) if healthy or prompt == "a" else web.Response(status=500)

    write(files[0], line("a"), line("b"), line("c"), "{")
    files[1].touch(0o600)
    with serve(moody) as url:
        assert run(files, url) == 1
        first = files[1].read_text()
        healthy = True
        assert run(files, url) == 1
        assert files[1].read_text() == first
        write(files[0], line("a"), line("b"), line("c"), line("d"))
        assert run(files, url, "--retry-failed") == 0
    assert ids(files[1]) == ["a", "b", "c", "d"]
    assert files[1].stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in files[1].parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_error_file_takes_what_is_no_success(serve: Serve, files: Any) -> None:
    async def picky(request: web.Request, prompt: str) -> web.StreamResponse:
        return web.Response(status=400) if prompt == "bad" else await echo(request, prompt)

    errors = files[0].with_name("errors.jsonl")
    write(files[0], line("good"), line("bad"), "{")
    with serve(picky) as url:
        for _ in range(2):
            assert run(files, url, "-e", str(errors)) == 1
            assert ids(files[1]) == ["good"]
            assert ids(errors) == ["None", "bad"]
        write(files[0], line("good"))
        assert run(files, url, "-e", str(errors), "--retry-failed") == 0
    assert errors.read_text() == ""


def test_two_runs_do_not_write_the_same_file(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write(files[0], line("a"))
    with Journal(str(files[1]), None, False):
        assert run(files, "127.0.0.1:9") == 2
    assert f"{files[1]} is being written by another headrace run-batch" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_is_continued(serve: Serve, files: Any, signum: signal.Signals) -> None:
    asked, ended = 0, False

    async def slow(request: web.Request, prompt: str) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        while asked > 40 and not ended:
            await asyncio.sleep(0.01)
        return await echo(request, prompt)

    write(files[0], *(line(f"r{i}") for i in range(200)))
    with serve(slow) as url:
        words = ["-i", str(files[0]), "-o", str(files[1]), "--url", url, "--max-concurrency=4"]
        with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as process:
            while not files[1].exists() or files[1].read_bytes().count(b"\n") < 20:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signum)
            _, said = process.communicate(timeout=30)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert "Traceback" not in said
        assert ("Not finished" in said) == (signum != signal.SIGKILL)
        assert 20 <= files[1].read_bytes().count(b"\n") < 200
        ended = True
        assert run(files, url) == 0
    assert ids(files[1]) == sorted(f"r{i}" for i in range(200))


# -- the command -----------------------------------------------------------------------------------------------------


def test_standard_input_is_taken_line_by_line_and_standard_output_gets_results(serve: Serve) -> None:
    with serve(echo) as url:
        words = [*COMMAND, "-i", "-", "-o", "-", "--url", url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, text=True, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for name in "abc":
                process.stdin.write(line(name) + "\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["custom_id"] == name
            rest, said = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")
    assert said.startswith("3 succeeded; ")


def test_ctrl_c_ends_the_wait_for_standard_input(serve: Serve) -> None:
    with serve(echo) as url:
        words = [*COMMAND, "-i", "-", "-o", "-", "--url", url]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line("a").encode() + b"\n")
            process.stdin.flush()
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


@pytest.mark.parametrize(("flag", "shown"), [("--progress", True), ("--no-progress", False), ("--quiet", False)])
def test_progress_goes_to_standard_error(
    serve: Serve, files: Any, capsys: pytest.CaptureFixture[str], flag: str, shown: bool
) -> None:
    write(files[0], line("a"), line("b", url="/v1/nothing"))
    with serve(echo) as url:
        run(files, url, flag)
    said = capsys.readouterr().err
    assert ("batch: 100%" in said) == shown
    assert (said == "") == (flag == "--quiet")


def test_more_lines_are_not_read_than_are_under_way(serve: Serve, tmp_path: pathlib.Path) -> None:
    waiting = threading.Event()

    async def held(request: web.Request, prompt: str) -> web.StreamResponse:
        await asyncio.to_thread(waiting.wait, 30)
        return await echo(request, prompt)

    fifo, out = tmp_path / "fifo", tmp_path / "out.jsonl"
    os.mkfifo(fifo)
    taken = 0

    def feed() -> None:
        nonlocal taken
        with fifo.open("w") as pipe:
            for i in range(40):
                # Longer than a pipe's buffer.
                pipe.write(line(f"r{i}", body={"prompt": f"r{i}", "padding": "x" * 100_000}) + "\n")
                pipe.flush()
                taken += 1
        waiting.set()

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    checks = threading.Timer(1.0, lambda: (seen.append(taken), waiting.set()))
    seen: list[int] = []
    checks.start()
    with serve(held) as url:
        assert main(["-i", str(fifo), "-o", str(out), "--url", url, "--max-concurrency=4"]) == 0
    feeding.join()
    assert len(ids(out)) == 40
    assert seen[0] <= 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give --model MODEL to serve meanwhile, or --url URL of a server that runs"),
        (["--url=ftp://x"], "is not the URL of a server"),
        (["--url=127.0.0.1:9", "--max-num-seqs", "8"], "--max-num-seqs: for a server that is started"),
        (["--model=demo", "--port=80"], "--port: the server that is started gets a free port"),
        (["--url=127.0.0.1:9", "--max-concurency=2"], "did you mean --max-concurrency?"),
        (["--url=127.0.0.1:9", "--max-concurrency=0"], "0 is less than 1"),
        (["--url=127.0.0.1:9", "-e", "OUT"], "--output-file and --error-file are the same file"),
        (["--url=127.0.0.1:9", "-o", "IN"], "--input-file and --output-file are the same file"),
        (["--url=127.0.0.1:9", "-i", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["--url=127.0.0.1:9", "-o", "/no/such/file"], "cannot write /no/such/file: No such file or directory"),
        (["--url=127.0.0.1:9", "-o", "/"], "cannot write /: Is a directory"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    files: Any, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    write(files[0], line("a"))
    given = [{"IN": str(files[0]), "OUT": str(files[1])}.get(flag, flag) for flag in flags]
    try:
        code = main(["-i", str(files[0]), "-o", str(files[1]), *given])
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_full_disk_is_said_in_words(serve: Serve, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write(files[0], line("a"))
    with serve(echo) as url:
        assert main(["-i", str(files[0]), "-o", "/dev/full", "--url", url]) == 1
    assert "headrace run-batch: error: [Errno 28] No space left on device" in capsys.readouterr().err
