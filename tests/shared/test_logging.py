"""What a log says of an error."""

from __future__ import annotations

import importlib.util
import json
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
