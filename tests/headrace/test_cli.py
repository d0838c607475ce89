"""The ``headrace`` command."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from headrace.cli import COMMANDS, main


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    page = capsys.readouterr().err
    assert all(name in page for name in COMMANDS)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(command.summary in page for command in COMMANDS.values())


@pytest.mark.parametrize("argument", ["version", "--version", "-V"])
def test_version(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 0
    assert capsys.readouterr().out.startswith("headrace ")


def test_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_target_exists(name: str) -> None:
    module, _, function = COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_launcher_imports_nothing_heavy() -> None:
    code = (
        "import sys, headrace.launcher; "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'zmq', 'aiohttp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
