"""Hundreds of random schedules of ``hop_world``, and that it notices when a rule is missing."""

from __future__ import annotations

import inspect

import pytest

from shared.hop import child as child_module
from shared.hop import crashes as crashes_module
from shared.hop import intake as intake_module
from shared.hop import parent as parent_module
from tests.shared.hop_world import Violation, World


def first_failure(seeds, det):
    for seed in seeds:
        try:
            World(seed, det).run()
        except Violation as violation:
            return f"seed {seed}: {violation}"
    return None


@pytest.mark.parametrize("det", [True, False], ids=["det", "nondet"])
def test_no_request_is_lost_repeated_or_mixed(det):
    assert first_failure(range(50), det) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("det", [True, False], ids=["det", "nondet"])
def test_no_request_is_lost_repeated_or_mixed_in_many_runs(det):
    assert first_failure(range(50, 3000), det) is None


MUTANTS = {
    "trim": (intake_module, "start += have - offset", "start += 0"),
    "gap": (intake_module, "if offset > have:", "if False:"),
    "resync": (parent_module, "resync=not lower.heard, beat=True", "resync=False, beat=True"),
    "old attempts": (parent_module, "lower.child.handles.pop(lower.handle, None)", "pass"),
    "raise g": (parent_module, "Attempt(attempt.g + 1, attempt.uid, 0)", "Attempt(attempt.g, attempt.uid, 0)"),
    "raise t": (parent_module, "attempt._replace(t=attempt.t + 1)", "attempt"),
    "lease": (child_module, "if quiet > self._timers.lease_s:", "if False:"),
    "unknown": (
        child_module,
        "self._send(source.peer, Gone(entry.rid",
        "superseded and self._send(source.peer, Gone(entry.rid",
    ),
    "alone": (crashes_module, "lower.alone += lower.go == crashed", "lower.alone += 1"),
    "blame": (crashes_module, "lower.suspect = lower.strikes >= STRIKES", "lower.suspect = False"),
}


def mutate(monkeypatch, module, old, new):
    """Replace a piece of a module's source, and its functions by those of the changed source."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is not there once"
    namespace = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), namespace)  # noqa: S102
    for name, changed in namespace.items():
        if inspect.isfunction(changed) and changed.__module__ == module.__name__:
            for user in (parent_module, child_module, crashes_module, intake_module, module):
                if hasattr(user, name):
                    monkeypatch.setattr(user, name, changed)
        elif (
            inspect.isclass(changed) and changed.__module__ == module.__name__ and not hasattr(changed, "_is_protocol")
        ):
            for attribute, value in vars(changed).items():
                if inspect.isfunction(value) or isinstance(value, staticmethod):
                    monkeypatch.setattr(getattr(module, name), attribute, value)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_world_notices_a_missing_rule(monkeypatch, name):
    mutate(monkeypatch, *MUTANTS[name])
    assert first_failure(range(120), True) or first_failure(range(120), False)
