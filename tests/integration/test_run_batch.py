"""``headrace run-batch`` with the built-in model: killed and continued, and with a server of its own."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-m", "headrace", "run-batch")
COUNT = 24
TOKENS, LAST_TOKENS = 12, 300
"""The last answer of a batch that is to be killed is long, so that no run ends before it is killed."""


def write_requests(path: pathlib.Path, count: int, last_tokens: int = TOKENS) -> None:
    with path.open("w") as file:
        for i in range(count):
            text = f"The number {i} is"
            chat = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": text}]}}
            request = chat if i % 2 else {"url": "/v1/completions", "body": {"prompt": text}}
            tokens = last_tokens if i == count - 1 else TOKENS
            request["body"] |= {"model": "demo", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
            file.write(json.dumps({"custom_id": f"r{i}", "method": "POST", **request}) + "\n")


def results(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Results by custom_id, of which each stands there once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    counts = collections.Counter(result["custom_id"] for result in found)
    assert set(counts.values()) == {1}
    return {result["custom_id"]: result for result in found}


def test_killed_and_continued_every_request_has_one_result(demo: Any, tmp_path: pathlib.Path) -> None:
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(requests, COUNT, LAST_TOKENS)
    words = [*COMMAND, "-i", str(requests), "-o", str(out), "--url", demo.url]
    kills = 0
    while True:
        before = out.read_bytes().count(b"\n") if out.exists() else 0
        with subprocess.Popen([*words, "--max-concurrency=6"], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and kills < 2:
                if out.exists() and out.read_bytes().count(b"\n") >= before + 5:
                    process.kill()
                    kills += 1
                    break
                time.sleep(0.01)
        if process.returncode != -9:
            break
    assert (process.returncode, kills) == (0, 2)
    found = results(out)
    assert set(found) == {f"r{i}" for i in range(COUNT)}
    for name, result in found.items():
        assert result["response"]["status_code"] == 200
        tokens = result["response"]["body"]["usage"]["completion_tokens"]
        assert tokens == (LAST_TOKENS if name == f"r{COUNT - 1}" else TOKENS)
    body = json.loads(requests.read_text().splitlines()[0])["body"]
    assert found["r0"]["response"]["body"]["choices"] == demo.post("/v1/completions", body)["choices"]
    demo.wait_idle(30)


def test_a_model_is_served_meanwhile(tmp_path: pathlib.Path) -> None:
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(requests, 4)
    words = [*COMMAND, "-i", str(requests), "-o", str(out), "--model", "demo", "--max-num-seqs", "2"]
    environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "\n4 succeeded; " in done.stderr
    assert set(results(out)) == {"r0", "r1", "r2", "r3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
