"""What the documents say is what the code does."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from api_gateway.metrics_help import HELP
from headrace.cli import COMMANDS

ROOT = pathlib.Path(__file__).parent.parent.parent
SERVICES = ("api_gateway", "tokenizer_service", "core_engine", "shared")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_table_of_flags_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts/flags_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text()[:800]
    assert opening.index("make demo") < opening.index("make test")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_targets_exist(page: pathlib.Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"(?:^|`)headrace (\w[\w-]*)", text, re.MULTILINE)) <= set(COMMANDS)


def families(names: set[str]) -> set[str]:
    """As they are in the help: without the ``_total`` of a counter."""
    return {name if name in HELP else name.removesuffix("_total") for name in names}


def test_every_metric_of_a_service_has_a_help_text() -> None:
    files = [file for service in SERVICES for file in (ROOT / service).glob("*.py") if file.name != "metrics_help.py"]
    names = {
        name
        for file in files
        for name in re.findall(r'"((?:vllm:|headrace:|http_request)\w+)"', file.read_text())
    }  # fmt: skip
    assert families(names) == set(HELP)


def test_the_tables_of_metrics_are_whole() -> None:
    page = (ROOT / "docs/tuning.md").read_text()
    rows = re.findall(r"^\| `((?:vllm:|headrace:|http_request)\w+)` \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert families(set(rows)) == set(HELP)
