"""Processes are killed and stopped (SIGKILL, SIGSTOP) under sixteen requests; answers are as if nothing had been.

``scripts/chaos.sh`` does the same hundreds of times. The seeds are in the names of the tests; ``HEADRACE_CHAOS_SEED``
shifts them.
"""

from __future__ import annotations

import asyncio
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER
from tests.chaos.chaos_run import RUN_LIMIT_S, aftermath, clients_of, run_once, warm_up
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.many_runs import SHAPES, deployment_of, run_seeds
from tests.chaos.workload import STREAMS, differences, make_requests


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Deployment]:
    with deployed(deployment_of(tmp_path_factory.mktemp("chaos"), model, SHAPES[0])) as found:
        yield found


@pytest.fixture(scope="module")
def baseline(deployment: Deployment, model: str) -> dict[str, int]:
    return warm_up(deployment, model)


@pytest.mark.parametrize("number", range(4))
def test_random_faults(
    deployment: Deployment, baseline: dict[str, int], model: str, chaos_seed: int, number: int
) -> None:
    outcome = run_once(deployment, model, chaos_seed + number, baseline)
    print(outcome)
    assert outcome.wrong == []


@pytest.mark.parametrize("name", [f"{TOKENIZER}/0", f"{ENGINE}/0", f"{WORKER}/0"])
def test_stopped_under_load_and_continued(
    deployment: Deployment, baseline: dict[str, int], model: str, name: str
) -> None:
    """Longer than five beats: others believe that it is gone, and then it wakes up with what it knew."""
    requests = make_requests(77, model)
    expected = asyncio.run(clients_of(deployment).run(requests, RUN_LIMIT_S))

    async def disturbed() -> None:
        await asyncio.sleep(0.3)
        pid = deployment.signal(name, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        deployment.signal(name, signal.SIGCONT, pid)

    async def both() -> None:
        clients = clients_of(deployment)
        report, _ = await asyncio.gather(clients.run(requests, RUN_LIMIT_S), disturbed())
        assert (expected.wrong, report.wrong, report.cut) == ([], [], 0)
        assert differences(expected.answers, report.answers) == []

    asyncio.run(both())
    assert aftermath(deployment, baseline) == []


def test_everything_is_killed_at_once(deployment: Deployment, baseline: dict[str, int], model: str) -> None:
    """All that is not a gateway: the gateways' logs are the truth, from which the others begin again."""
    requests = make_requests(78, model)
    expected = asyncio.run(clients_of(deployment).run(requests, RUN_LIMIT_S))

    async def disturbed() -> None:
        await asyncio.sleep(0.5)
        for kind in (TOKENIZER, ENGINE, WORKER):
            for name in deployment.names(kind):
                deployment.kill(name)

    async def both() -> None:
        report, _ = await asyncio.gather(clients_of(deployment).run(requests, RUN_LIMIT_S), disturbed())
        assert (expected.wrong, report.wrong, report.cut) == ([], [], 0)
        assert differences(expected.answers, report.answers) == []

    asyncio.run(both())
    assert aftermath(deployment, baseline) == []


def test_a_killed_gateway_takes_only_its_own_connections(
    deployment: Deployment, baseline: dict[str, int], model: str
) -> None:
    """Those that resume go on after their last event, the others begin again."""
    requests = make_requests(79, model)
    expected = asyncio.run(clients_of(deployment).run(requests, RUN_LIMIT_S))

    async def both() -> None:
        clients = clients_of(deployment)
        running = asyncio.create_task(clients.run(requests, RUN_LIMIT_S))
        async with asyncio.timeout(RUN_LIMIT_S):
            while len([reading for reading in clients.readings if reading.events]) < STREAMS // 4:
                await asyncio.sleep(0.01)
        deployment.kill(f"{GATEWAY}/0")
        report = await running
        assert report.wrong == []
        assert report.resumed > 0
        assert 0 < report.cut <= len(requests) // 2
        assert differences(expected.answers, report.answers) == []

    asyncio.run(both())
    assert aftermath(deployment, baseline) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_faults(tmp_path: pathlib.Path, model: str, chaos_seed: int) -> None:
    failures = []
    for number, shape in enumerate(SHAPES):
        seeds = range(chaos_seed + 1000 * (number + 1), chaos_seed + 1000 * (number + 1) + 25)
        failures += [outcome for outcome in run_seeds(tmp_path, model, shape, seeds) if outcome.wrong]
    assert failures == []


def test_what_is_killed_starts_again_and_leaves_nothing(deployment: Deployment) -> None:
    service = deployment.services[f"{TOKENIZER}/1"]
    pid, starts = service.pid, service.starts
    assert deployment.kill(service.name) == pid
    end = time.monotonic() + 10
    while service.starts == starts:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert deployment.left_behind(10) == []
