"""One run: the requests of a seed undisturbed, then again while processes are killed or stopped, and what must hold."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER
from tests.chaos.clients import Clients
from tests.chaos.deployment import Deployment
from tests.chaos.workload import STREAMS, Report, Request, differences, make_requests

BEAT_S, LEASE_S = 0.2, 6.0
ENGINE_FLAGS = ("--batch-invariant", "--kv-cache-bytes=64M", "--num-gpu-blocks-override=256", "--step-timeout-s=20")
"""Few blocks, so that requests are preempted as well."""
RUN_LIMIT_S = 120.0
SETTLE_S = 4 * LEASE_S
KINDS = (GATEWAY, TOKENIZER, ENGINE, WORKER)


@dataclass
class Fault:
    """What is done to one process, and when."""

    at_s: float
    name: str
    stopped_s: float | None
    """SIGSTOP for so long; None: SIGKILL."""
    unfinished: int = -1
    """Requests that had not ended at that moment."""


@dataclass
class Outcome:
    """What a run showed; it passed if nothing was wrong."""

    seed: int
    faults: list[Fault]
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    settle_s: float = 0.0
    """From the end of the last request to zero on all gauges."""
    resent: int = 0
    resumed: int = 0
    found_again: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_faults(seed: int, deployment: Deployment, within_s: float) -> list[Fault]:
    """One to three faults at random moments: three in four are kills."""
    rng = random.Random(f"faults {seed}")
    faults = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(deployment.names(rng.choice(KINDS)))
        stopped_s = rng.uniform(0.05, 3.0) if rng.random() < 0.25 else None
        faults.append(Fault(round(rng.uniform(0.0, within_s), 3), name, stopped_s))
    return sorted(faults, key=lambda fault: fault.at_s)


def run_once(deployment: Deployment, model: str, seed: int, baseline: dict[str, int]) -> Outcome:
    """The requests of ``seed``, undisturbed and disturbed.

    Args:
        baseline: open file descriptors of each service when nothing runs; each may have so many afterwards.
    """
    requests = make_requests(seed, model)
    began = time.monotonic()
    expected = asyncio.run(clients_of(deployment).run(requests, RUN_LIMIT_S))
    undisturbed_s = time.monotonic() - began
    outcome = Outcome(seed, plan_faults(seed, deployment, undisturbed_s), undisturbed_s)
    if expected.wrong or expected.cut:
        outcome.wrong = [f"undisturbed: {words}" for words in expected.wrong or ["a connection closed"]]
        return outcome
    began = time.monotonic()
    report = asyncio.run(_disturbed(deployment, requests, outcome.faults))
    outcome.disturbed_s = time.monotonic() - began
    outcome.resent, outcome.resumed = report.resent, report.resumed
    outcome.found_again, outcome.refused = report.found_again, report.refused
    outcome.wrong = report.wrong + differences(expected.answers, report.answers)
    if len(report.answers) + len(report.wrong) != STREAMS:
        outcome.wrong.append(f"{len(report.answers)} of {STREAMS} requests were answered")
    began = time.monotonic()
    outcome.wrong += aftermath(deployment, baseline)
    outcome.settle_s = time.monotonic() - began
    return outcome


def aftermath(deployment: Deployment, baseline: dict[str, int]) -> list[str]:
    """What is left behind, though nobody asks for anything any more."""
    wrong = []
    try:
        deployment.wait_ready()
    except TimeoutError as error:
        wrong.append(str(error))
    if busy := deployment.busy(SETTLE_S):
        wrong.append(f"still held after {SETTLE_S:g} s: {busy}")
    if leaked := deployment.leaked(baseline, SETTLE_S):
        wrong.append(f"file descriptors are left open: {leaked}")
    wrong += deployment.left_behind(SETTLE_S)
    wrong += deployment.unexpected
    deployment.unexpected = []
    return wrong


def warm_up(deployment: Deployment, model: str) -> dict[str, int]:
    """Serve once, so that every process has opened what it keeps; the file descriptors of each, at rest."""
    report = asyncio.run(clients_of(deployment).run(make_requests(-1, model), RUN_LIMIT_S))
    assert not report.wrong, report.wrong
    assert not deployment.busy(SETTLE_S)
    counts = deployment.descriptors()
    for _ in range(3):
        time.sleep(0.3)
        counts = {name: max(count, counts[name]) for name, count in deployment.descriptors().items()}
    # Any process of a kind may be the one that was asked most.
    kinds = {kind: max(counts[name] for name in deployment.names(kind)) for kind in KINDS}
    return {name: kinds[service.kind] for name, service in deployment.services.items()}


def clients_of(deployment: Deployment) -> Clients:
    """Clients of all gateways of a deployment."""
    urls = [deployment.url(i) for i in range(len(deployment.ports))]

    def life(gateway: int) -> object:
        service = deployment.services[f"{GATEWAY}/{gateway}"]
        # Until a killed process is gone it may still take a connection, and then reset it.
        ends = service.dismissed or (service.process is not None and service.pid in service.killed)
        return object() if ends else service.starts

    return Clients(urls, life)


async def _disturbed(deployment: Deployment, requests: list[Request], faults: list[Fault]) -> Report:
    clients = clients_of(deployment)
    disturbing = asyncio.gather(*(_disturb(deployment, fault, clients.report) for fault in faults))
    report = await clients.run(requests, RUN_LIMIT_S)
    await disturbing
    return report


async def _disturb(deployment: Deployment, fault: Fault, report: Report) -> None:
    await asyncio.sleep(fault.at_s)
    fault.unfinished = STREAMS - report.ended
    if fault.stopped_s is None:
        deployment.kill(fault.name)
        return
    pid = deployment.signal(fault.name, signal.SIGSTOP)
    await asyncio.sleep(fault.stopped_s)
    if deployment.services[fault.name].pid == pid:
        deployment.signal(fault.name, signal.SIGCONT, pid)
