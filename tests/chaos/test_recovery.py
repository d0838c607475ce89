"""A client of ``demo`` goes on after a kill of each kind of process; ``tests.chaos.recovery`` measures how soon."""

from __future__ import annotations

import pathlib

import pytest

from tests.chaos.recovery import CASES, LIMIT_S, Case, measure


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stream_goes_on(tmp_path: pathlib.Path, case: Case) -> None:
    found = measure(case, 1, tmp_path, load_s=10.0)
    assert 0.0 < found.waits_s[0] < LIMIT_S
