"""A whole deployment whose links delay, drop, duplicate, reorder and damage messages.

Between gateway and tokenizer and between tokenizer and engine any fault may happen: answers must be the same. On the
links to the worker damage ends the epoch, and the sequences are computed again from their tokens. Damage is anything
done to the bytes: turned bits, missing bytes, and frames that are missing, repeated or in another order.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from shared.config import ENGINE, TOKENIZER, WORKER
from tests.chaos.chaos_run import BEAT_S, ENGINE_FLAGS, LEASE_S, RUN_LIMIT_S, aftermath, clients_of, warm_up
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.fault_proxy import (
    CORRUPT,
    DAMAGE,
    DELAY,
    DROP,
    DUPLICATE,
    MIX,
    REORDER,
    FaultProxy,
    total,
)
from tests.chaos.workload import differences, make_requests

FRONT, BACK = (TOKENIZER, ENGINE), (WORKER,)
"""Listeners of the gateway and tokenizer links (the worker connects to ``WORKER``, which is the engine's other one)."""
WORKER_RATE = 0.01
"""Highest share of harmed messages there: who never gets on by three tokens between two of them is taken for poison."""
LOSSES = (DELAY, DROP, DUPLICATE, REORDER)
COUNTERS = ("headrace:malformed_messages", "headrace:tokenizer_malformed_messages_total")


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

    def under(self, services: tuple[str, ...], kinds: tuple[str, ...], rate: float) -> None:
        """Ask everything while messages to and from these listeners suffer. The answers must be those of the
        undisturbed run, no damage be taken for a message, and nothing stay behind."""
        chosen = {proxy: service for (service, _), proxy in self._proxies.items() if service in services}
        before, refused = total(chosen), self._malformed()
        for proxy, service in chosen.items():
            proxy.kinds, proxy.active = kinds, True
            proxy.rate = min(rate, WORKER_RATE) if service in BACK else rate
        try:
            report = asyncio.run(clients_of(self.deployment).run(self._requests, RUN_LIMIT_S))
        finally:
            for proxy in chosen:
                proxy.active = False
        counts = total(chosen) - before
        assert report.wrong == []
        assert differences(self.expected.answers, report.answers) == []
        assert report.answers.keys() == self.expected.answers.keys()
        assert aftermath(self.deployment, self.baseline) == []
        assert sum(counts[kind] for kind in kinds)
        assert counts["accepted"] == 0
        if set(kinds) & set(DAMAGE) and set(services) & set(FRONT):
            assert self._malformed() > refused

    def _malformed(self) -> float:
        """Messages that an engine or a tokenizer has dropped because they were damaged."""
        lines = self.deployment.get(0, "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTERS))

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


def test_answers_survive_late_lost_and_repeated_messages(faulty: FaultyDeployment) -> None:
    faulty.under(FRONT, LOSSES, 0.2)


def test_answers_survive_damage_on_front_links(faulty: FaultyDeployment) -> None:
    faulty.under(FRONT, DAMAGE, 0.2)


def test_damage_on_the_worker_links_ends_the_epoch(faulty: FaultyDeployment) -> None:
    before = faulty.epochs_over()
    faulty.under(BACK, DAMAGE, WORKER_RATE)
    assert faulty.epochs_over() > before


def test_turned_bits_on_all_links(faulty: FaultyDeployment) -> None:
    """Also those that would leave a readable message: another token, another boot id, another request."""
    faulty.under((*FRONT, *BACK), (CORRUPT,), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIX)
def test_answers_survive_a_kind_of_fault_on_front_links(faulty: FaultyDeployment, kind: str) -> None:
    faulty.under(FRONT, (kind,), 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("service", FRONT)
def test_answers_survive_the_mix_on_a_link(faulty: FaultyDeployment, service: str) -> None:
    faulty.under((service,), MIX, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DUPLICATE, REORDER, *DAMAGE])
def test_a_kind_of_fault_on_the_worker_links_ends_the_epoch(faulty: FaultyDeployment, kind: str) -> None:
    before = faulty.epochs_over()
    faulty.under(BACK, (kind,), WORKER_RATE)
    assert faulty.epochs_over() > before


def test_what_is_seeded_is_the_same(model: str) -> None:
    asked: list[Any] = [make_requests(3, model), make_requests(3, model)]
    assert asked[0] == asked[1] != make_requests(4, model)
