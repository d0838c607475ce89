"""Padded sizes hold what they are asked for, waste little, and are sizes that need no padding themselves."""

from __future__ import annotations

import pytest

from shared.step_shapes import ROWS, padded_rows, padded_total, whole_total


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 128, 129, 1000, ROWS[-1]])
def test_rows_fit(rows: int) -> None:
    padded = padded_rows(rows)
    assert padded is not None
    assert rows <= padded <= max(ROWS[0], 2 * rows)
    assert padded_rows(padded) == padded


def test_too_many_rows_fit_nowhere() -> None:
    assert padded_rows(ROWS[-1] + 1) is None


@pytest.mark.parametrize(
    ("tokens", "padded", "whole"),
    [(1, 64, 0), (64, 64, 64), (65, 128, 64), (512, 512, 512), (513, 640, 512), (640, 640, 640), (1441, 1536, 1408)],
)
def test_totals_are_multiples_of_tiles(tokens: int, padded: int, whole: int) -> None:
    assert (padded_total(tokens), whole_total(tokens)) == (padded, whole)
