"""The times of a hop must fit each other."""

from __future__ import annotations

import pytest

from shared.errors import StartupError
from shared.hop import Timers


def test_a_lease_that_ends_before_its_renewals_are_missed_is_refused() -> None:
    assert Timers(beat_s=2, lease_s=10).orphan_s == 10
    for timers in ({"lease_s": 4}, {"beat_s": 4.1}):
        with pytest.raises(StartupError, match=r"--lease-s .* is too short: with --beat-s .* at least"):
            Timers(**timers)
