"""``headrace chat`` against a running server: one question, piped lines, and a person at a terminal."""

from __future__ import annotations

import pathlib
import re
import select
import subprocess
import time
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
OnTerminal = Callable[..., "subprocess.Popen[bytes]"]
QUESTION = "Name the capital of France."
GREEDY = ("--temperature=0", "--max-tokens=12")


def prompt_tokens(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+) prompt tokens", text)]


class Terminal:
    """Types on a command's keyboard and reads its screen."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.screen = ""

    def type(self, keys: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(keys.encode())

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Read until ``text`` is on the screen, and forget all up to its end."""
        assert self.process.stdout is not None
        end = time.monotonic() + limit_s
        while text not in self.screen:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r}: {self.screen!r}"
            chunk = self.process.stdout.read(4096)
            assert chunk, f"ended before {text!r}: {self.screen!r}"
            self.screen += chunk.decode(errors="replace")
        self.screen = self.screen.partition(text)[2]

    def wait_for_reading(self) -> None:
        """Wait until the command sleeps, as it does when all that was typed is read and shown.

        Python's ``input()`` misses a signal that comes just before it waits for the next key.
        """
        (task,) = pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()
        (command,) = (task / "children").read_text().split()
        end = time.monotonic() + 60.0
        while pathlib.Path(f"/proc/{command}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < end
            time.sleep(0.01)


def test_one_question(asks: Run) -> None:
    done = asks("chat", QUESTION, *GREEDY)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert len(prompt_tokens(done.stderr)) == 1


def test_system_prompt_is_sent(asks: Run) -> None:
    with_it, without = (
        prompt_tokens(asks("chat", QUESTION, *GREEDY, *flags).stderr)[0]
        for flags in (["--system", "You are a pirate who only ever speaks of the sea, in rhymes."], [])
    )
    assert with_it != without


def test_lines_are_turns_of_one_conversation_until_reset(asks: Run) -> None:
    done = asks("chat", *GREEDY, stdin=f"{QUESTION}\n\nAnd of Italy?\n/reset\n{QUESTION}\n/exit\nnever asked\n")
    assert done.returncode == 0, done.stderr
    first, second, third = prompt_tokens(done.stderr)
    assert second > first + 8
    assert third == first
    assert done.stdout.count("The capital of France is Paris.\n") == 2


@pytest.mark.parametrize("words", [[QUESTION], []], ids=["argument", "lines"])
def test_a_refusal_is_shown_in_the_servers_words(asks: Run, words: list[str]) -> None:
    done = asks("chat", *words, "--top-p=7", stdin=f"{QUESTION}\n{QUESTION}\n")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace chat: error: HTTP 400: top_p")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_nobody_there_is_said_in_words(run: Run) -> None:
    done = run("chat", QUESTION, HEADRACE_URL="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr == "headrace chat: error: nothing listens at http://127.0.0.1:9 (connection refused)\n"


def test_conversation_on_a_terminal(on_terminal: OnTerminal) -> None:
    terminal = Terminal(on_terminal("chat", *GREEDY))
    terminal.wait_for("> ")
    terminal.type(QUESTION + "\r")
    terminal.wait_for("The capital of France is Paris.\r\n")
    terminal.wait_for("s in all\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_ctrl_c_stops_the_answer_alone(on_terminal: OnTerminal) -> None:
    terminal = Terminal(on_terminal("chat", "--temperature=0", "--seed=1"))
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a river.\r")
    terminal.wait_for("river.\r\n")
    for _ in range(3):
        terminal.wait_for(" ")
    terminal.type("\x03")
    terminal.wait_for("\r\n> ")
    terminal.type("/reset\r")
    terminal.wait_for("> ")
    terminal.type(QUESTION + "\r")
    terminal.wait_for("The capital of France is Paris.")
    terminal.wait_for("\r\n> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.wait_for_reading()
    terminal.type("\x03")
    terminal.wait_for("\r\n> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(30) == 0


def test_an_error_does_not_end_a_conversation(on_terminal: OnTerminal) -> None:
    terminal = Terminal(on_terminal("chat", "--min-p=3"))
    terminal.wait_for("> ")
    terminal.type(QUESTION + "\r")
    terminal.wait_for("headrace chat: error: HTTP 400: min_p")
    terminal.wait_for("> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(30) == 0
