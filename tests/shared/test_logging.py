"""What a log says of an error, and lines of processes that share one output."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from shared.logging import setup_logging
log = setup_logging("a_service", style=sys.argv[1])
def divide(prompt):
    return 1 / 0
try:
    divide("what only the user should read")
except ZeroDivisionError:
    log.exception("a step failed", step=7)
"""


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="without it tracebacks are always plain")
@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_shows_no_values(style: str) -> None:
    """Prompts and keys are in local variables, and so are tensors of thousands of lines."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, style], capture_output=True, text=True, check=True)
    text = run.stderr
    if style == "json":
        said = json.loads(text)
        assert (said["event"], said["level"], said["step"]) == ("a step failed", "error", 7)
        assert said["service"] == "a_service"
        text = said["exception"]
    else:
        assert "[error] a step failed service=a_service step=7" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "in divide" in text
    assert "what only the user should read" not in text
    assert len(text.splitlines()) < 10


TALKER = """
import sys
from shared.logging import setup_logging
log = setup_logging(sys.argv[1], style="json")
for step in range(2000):
    log.info("a step has ended", step=step)
"""


def test_lines_of_processes_that_share_an_output_stay_whole() -> None:
    """As those of ``headrace serve`` do, in a container without Python's own buffers too."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    receiving, sending = os.pipe()
    talkers = [
        subprocess.Popen([sys.executable, "-c", TALKER, name], stderr=sending, env=environ) for name in ("a", "b", "c")
    ]
    os.close(sending)
    with open(receiving) as lines:
        said = [json.loads(line) for line in lines]
    assert [talker.wait() for talker in talkers] == [0, 0, 0]
    for name in ("a", "b", "c"):
        assert [line["step"] for line in said if line["service"] == name] == list(range(2000))
