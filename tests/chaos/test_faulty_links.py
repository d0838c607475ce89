"""A whole deployment whose links delay, drop, duplicate, reorder, truncate and corrupt messages.

Between gateway and tokenizer and between tokenizer and engine any fault may happen: answers must be the same. On the
link to the worker damage ends the epoch, and the sequences are computed again from their tokens.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from shared.config import ENGINE, TOKENIZER, WORKER
from tests.chaos.chaos_run import BEAT_S, ENGINE_FLAGS, LEASE_S, RUN_LIMIT_S, aftermath, clients_of, warm_up
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.fault_proxy import CORRUPT, DELAY, DROP, DUPLICATE, FORGE, MIX, REORDER, TRUNCATE, FaultProxy, total
from tests.chaos.workload import Report, differences, make_requests

FRONT, BACK = (TOKENIZER, ENGINE), (WORKER,)
"""Listeners of the gateway and tokenizer links (the worker connects to ``WORKER``, which is the engine's other one)."""
GIVE_UP_S = 6.0


class FaultyDeployment:
    """A deployment with a proxy before each of its listeners, harmless until ``under``."""

    def __init__(self, folder: pathlib.Path, model: str, seed: int) -> None:
        self._proxies: dict[tuple[str, str], FaultProxy] = {}
        self._seed = seed
        self.deployment = Deployment(
            folder,
            model,
            tokenizers=2,
            flags=ENGINE_FLAGS,
            beat_s=BEAT_S,
            lease_s=LEASE_S,
            via=self._via,
        )
        self._requests = make_requests(seed, model)
        self._model = model

    def _via(self, service: str, endpoint: str) -> str:
        before = endpoint + "-proxy"
        if (service, before) not in self._proxies:
            proxy = FaultProxy(before, endpoint, (), seed=self._seed + len(self._proxies), delay_s=2 * BEAT_S)
            proxy.active = False
            self._proxies[service, before] = proxy.start()
        return before

    def measure(self) -> None:
        """Before the first fault: the answers, and the file descriptors in use."""
        self.baseline = warm_up(self.deployment, self._model)
        self.expected = asyncio.run(clients_of(self.deployment).run(self._requests, RUN_LIMIT_S))
        assert not self.expected.wrong, self.expected.wrong

    def under(
        self, services: tuple[str, ...], kinds: tuple[str, ...], rate: float, seconds: float = RUN_LIMIT_S
    ) -> tuple[Report, Counter[str]]:
        """Ask everything while messages to and from these listeners suffer; what the proxies did."""
        chosen = [proxy for (service, _), proxy in self._proxies.items() if service in services]
        before = total(chosen)
        for proxy in chosen:
            proxy.kinds, proxy.rate, proxy.active = kinds, rate, True
        try:
            report = asyncio.run(clients_of(self.deployment).run(self._requests, seconds))
        finally:
            for proxy in chosen:
                proxy.active = False
        return report, total(chosen) - before

    def check(self, report: Report) -> None:
        assert report.wrong == []
        assert differences(self.expected.answers, report.answers) == []
        assert report.answers.keys() == self.expected.answers.keys()
        assert aftermath(self.deployment, self.baseline) == []

    def epochs_over(self) -> int:
        """Epochs that the engine ended, by its log."""
        return self.deployment.services[f"{ENGINE}/0"].log.read_text().count("epoch over")

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.stop()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, model: str, chaos_seed: int) -> Iterator[FaultyDeployment]:
    found = FaultyDeployment(tmp_path_factory.mktemp("faulty"), model, chaos_seed)
    try:
        with deployed(found.deployment):
            found.measure()
            yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("kind", "rate"), [(DELAY, 0.1), (DROP, 0.1), (DUPLICATE, 0.2), (REORDER, 0.1), (TRUNCATE, 0.1), (CORRUPT, 0.1)]
)
def test_answers_survive_a_kind_of_fault(faulty: FaultyDeployment, kind: str, rate: float) -> None:
    report, counts = faulty.under(FRONT, (kind,), rate)
    assert counts[kind] > 0
    assert kind == TRUNCATE or counts["accepted"] == 0
    faulty.check(report)


@pytest.mark.parametrize("service", FRONT)
def test_answers_survive_the_mix_on_a_link(faulty: FaultyDeployment, service: str) -> None:
    report, counts = faulty.under((service,), MIX, 0.2)
    assert counts.total() > counts["passed"]
    faulty.check(report)


def test_answers_survive_the_mix_on_all_front_links(faulty: FaultyDeployment) -> None:
    report, _ = faulty.under(FRONT, MIX, 0.2)
    faulty.check(report)


@pytest.mark.parametrize("kind", [CORRUPT, TRUNCATE])
def test_damage_on_the_worker_link_ends_the_epoch(faulty: FaultyDeployment, kind: str) -> None:
    before = faulty.epochs_over()
    report, counts = faulty.under(BACK, (kind,), 0.01)
    faulty.check(report)
    assert counts[kind] > 0
    assert faulty.epochs_over() > before


def test_forged_messages_end_no_process(faulty: FaultyDeployment) -> None:
    """Turned bits that still make a message may say anything, but nothing that a process dies of."""
    _, counts = faulty.under(FRONT, (FORGE,), 0.05, GIVE_UP_S)
    assert counts["accepted"] > 0
    assert faulty.deployment.unexpected == []


def test_what_is_seeded_is_the_same(model: str) -> None:
    asked: list[Any] = [make_requests(3, model), make_requests(3, model)]
    assert asked[0] == asked[1] != make_requests(4, model)
