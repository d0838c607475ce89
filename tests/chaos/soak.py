"""Thousands of short requests of every kind while processes are killed; the memory of those that live through it.

    python -m tests.chaos.soak [--requests N] --work FOLDER [--json FILE]

During the first twentieth any process is killed, later only the second gateway, tokenizer and worker. Memory of the
first ones and of the engine is compared from a quarter of the requests to the end. Ends with status 1 if an answer was
wrong, something was left behind, or memory was not flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shared.config import ENGINE, GATEWAY, TOKENIZER, WORKER
from tests.chaos.chaos_run import BEAT_S, ENGINE_FLAGS, LEASE_S, RUN_LIMIT_S, aftermath, clients_of, warm_up
from tests.chaos.clients import RETRY_S, ConnectionLost, HungUp, read, session
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.workload import CONNECTION_ERRORS, STREAMS, Answer, Wrong, changes, make_requests
from tests.integration.streams import CHAT, COMPLETIONS
from tests.tiny_models import make_checkpoint

POOL_SEEDS = range(9000, 9008)
"""Of the requests whose answers are known; each is asked for many times."""
TOKENS = (2, 12)
ABORTED_TOKENS = 200
CONCURRENT = 24
SAMPLE_EVERY, FAULT_EVERY = 250, 300
FLAT_PERCENT = 3.0
ROWS_STEP, ROWS_STEPS = 16, 30
"""Prompts of so many lengths, so far apart: products take a multiple of this number of rows in batch-invariant mode."""
PLAIN_IDS = range(10, 300)
"""Token ids of words and letters."""
LASTING = (f"{ENGINE}/0", f"{GATEWAY}/0", f"{TOKENIZER}/0", f"{WORKER}/0")
"""Killed early only, so that they grow old."""
PASSING = (f"{GATEWAY}/1", f"{TOKENIZER}/1", f"{WORKER}/1")
KINDS = {"answered": 14, "resumed": 2, "aborted": 2, "refused": 2}
"""How often each kind is asked for, of 20."""
SHOWN = 20
"""How many of the things that were wrong the result lists."""


@dataclass
class Memory:
    """Of one process, in KiB, at one moment."""

    requests: int
    """That had ended by then."""
    rss: int
    private: int
    """Pages that no other process shares."""


@dataclass
class Soak:
    """A soak of one deployment, and what it showed."""

    deployment: Deployment
    model: str
    count: int
    seed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: dict[str, list[Memory]] = field(default_factory=lambda: {name: [] for name in LASTING})

    def __post_init__(self) -> None:
        self._rng = random.Random(f"soak {self.seed}")
        self._clients = clients_of(self.deployment)
        self._pool = [asked for seed in POOL_SEEDS for asked in make_requests(seed, self.model, TOKENS)]
        self._expected: dict[int, Answer] = {}
        self._invalid = list(invalid_requests(self.model))
        self._pids: dict[str, int] = {}
        self.seconds = 0.0

    async def run(self) -> None:
        """Everything; afterwards nothing is asked for any more."""
        await self._learn_answers()
        kinds = iter(self._rng.choices(list(KINDS), list(KINDS.values()), k=self.count))
        began = time.monotonic()
        async with session() as opened:
            await asyncio.gather(self._fill_caches(opened), *(self._client(opened, kinds) for _ in range(CONCURRENT)))
        self.seconds = time.monotonic() - began
        for name, pid in self._pids.items():
            if self.deployment.services[name].pid != pid:
                self.wrong.append(f"{name} did not live to the end")

    async def _learn_answers(self) -> None:
        for first in range(0, len(self._pool), STREAMS):
            report = await clients_of(self.deployment).run(self._pool[first : first + STREAMS], RUN_LIMIT_S)
            self.wrong += [f"undisturbed: {words}" for words in report.wrong]
            self._expected |= {first + index: answer for index, answer in report.answers.items()}

    async def _fill_caches(self, opened: aiohttp.ClientSession) -> None:
        """Of a tokenizer that of words, 4 MB, and of a worker that of compiled products of matrices, some 100 MB: they
        grow with each new word and each new number of rows of a step up to a bound, and are full afterwards."""
        while self.ended.total() < self.count // 16:
            await asyncio.sleep(0.1)
        url, rng = self.deployment.url(0), self._rng
        for turn in range(120):
            words = ["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(200)]
            ids = [rng.choice(PLAIN_IDS) for _ in range(ROWS_STEP * (1 + turn % ROWS_STEPS))]
            body = {"model": self.model, "prompt": ids, "max_tokens": 1}
            for path, asked in (("/tokenize", {"prompt": " ".join(words)}), (COMPLETIONS, body)):
                async with opened.post(url + path, json=asked) as response:
                    await response.read()
        if self.ended.total() >= self.count // 4:
            self.wrong.append("memory was watched before the caches were full")

    async def _client(self, opened: aiohttp.ClientSession, kinds: Iterator[str]) -> None:
        for kind in kinds:
            try:
                async with asyncio.timeout(RUN_LIMIT_S):
                    await getattr(self, f"_{kind}")(opened)
            except TimeoutError:
                self.wrong.append(f"a request ({kind}) has not ended after {RUN_LIMIT_S:g} s")
            except (Wrong, AssertionError) as wrong:
                self.wrong.append(f"{kind}: {wrong!r}")
            self.ended[kind] += 1
            self._after(self.ended.total())

    # -- kinds of requests -------------------------------------------------------------------------------------------

    async def _answered(self, opened: aiohttp.ClientSession, hang_up_after: int | None = None) -> None:
        index = self._rng.randrange(len(self._pool))
        while hang_up_after is not None and not (self._pool[index].resumes and self._pool[index].body["stream"]):
            index = self._rng.randrange(len(self._pool))
        request, gateway = self._pool[index], self._rng.randrange(2)
        request = request._replace(body=request.body | {"priority": self._rng.randrange(3)})
        answer = await self._clients.ask(opened, request, gateway, hang_up_after)
        for words in changes(self._expected[index], answer):
            raise Wrong(f"{words}, of {request}")

    async def _resumed(self, opened: aiohttp.ClientSession) -> None:
        await self._answered(opened, self._rng.randrange(4))

    async def _aborted(self, opened: aiohttp.ClientSession) -> None:
        request = self._rng.choice(self._pool)
        body = request.body | {"max_tokens": ABORTED_TOKENS, "ignore_eos": True}
        reading = self._clients.begin(request._replace(body=body, resumes=self._rng.random() < 0.2))
        url = self.deployment.url(self._rng.randrange(2))
        try:
            async with asyncio.timeout(None if body["stream"] else self._rng.uniform(0.0, 0.1)):
                await read(opened, url, reading, self._rng.randrange(8))
        except (HungUp, ConnectionLost, TimeoutError):
            pass

    async def _refused(self, opened: aiohttp.ClientSession) -> None:
        path, body, status = self._rng.choice(self._invalid)
        while True:
            url = self.deployment.url(self._rng.randrange(2)) + path
            try:
                async with opened.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                    found, text = response.status, await response.text()
            except CONNECTION_ERRORS:
                found = 503
            if found != 503:
                break
            await asyncio.sleep(RETRY_S)
        if found != status:
            raise Wrong(f"status {found} for {status}: {text}, of {body!r}")

    # -- what happens meanwhile --------------------------------------------------------------------------------------

    def _after(self, ended: int) -> None:
        if ended == self.count // 4:
            self._pids = {name: self.deployment.services[name].pid for name in LASTING}
        if self._pids and ended % SAMPLE_EVERY == 0:
            for name, pid in self._pids.items():
                self.samples[name].append(memory_of(pid, ended))
        if ended % FAULT_EVERY == 0 and ended < self.count:
            name = self._rng.choice(LASTING + PASSING if ended <= self.count // 20 else PASSING)
            self.faults[name] += 1
            self.deployment.kill(name)

    def to_json(self) -> dict[str, Any]:
        report = self._clients.report
        return {
            "requests": self.ended.total(),
            "seconds": round(self.seconds, 1),
            "kinds": dict(sorted(self.ended.items())),
            "killed": dict(sorted(self.faults.items())),
            "sent_again": report.resent,
            "resumed_after_a_kill": report.resumed,
            "found_again": report.found_again,
            "refused_first": report.refused,
            "wrong": self.wrong[:SHOWN],
            "wrong_in_all": len(self.wrong),
            "memory": {name: growth(samples) for name, samples in self.samples.items()},
            "samples": {name: [list(vars(each).values()) for each in found] for name, found in self.samples.items()},
        }


def invalid_requests(model: str) -> Iterator[tuple[str, str, int]]:
    """(path, body, status) of requests that are refused: by the HTTP layer, by the gateway, by the tokenizer."""
    good: dict[str, Any] = {"model": model, "prompt": "the mill", "max_tokens": 4}
    for changed in ({"max_tokens": -1}, {"temperature": "hot"}, {"n": 0}, {"prompt": None}, {"prompt": "mill " * 2000}):
        yield COMPLETIONS, json.dumps(good | changed), 400
    yield COMPLETIONS, json.dumps(good | {"model": "another"}), 404
    yield COMPLETIONS, '{"model": ', 400
    yield CHAT, json.dumps({"model": model, "messages": [{"role": "user"}]}), 400
    yield "/v1/nothing", json.dumps(good), 404


def memory_of(pid: int, requests: int) -> Memory:
    """What a live process holds now."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pages = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return Memory(requests, pages["Rss"], pages["Private_Clean"] + pages["Private_Dirty"])


def growth(samples: list[Memory]) -> dict[str, float]:
    """Means of the first and the last tenth, in MiB, and how much more the last is."""
    tenth = max(1, len(samples) // 10)
    found: dict[str, float] = {}
    for name in ("rss", "private"):
        values = [getattr(sample, name) / 1024 for sample in samples]
        if values:
            first, last = statistics.fmean(values[:tenth]), statistics.fmean(values[-tenth:])
            found |= {f"{name}_first_mib": round(first, 2), f"{name}_last_mib": round(last, 2)}
            found[f"{name}_growth_percent"] = round(100 * (last / first - 1), 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve thousands of requests under faults, and watch the memory.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for the model and logs")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the result to")
    options = parser.parse_args()
    model = options.work / "model"
    if not (model / "tokenizer.json").exists():
        make_checkpoint(model, "llama")
    deployment = Deployment(
        options.work / "logs",
        str(model),
        gateways=2,
        tokenizers=2,
        workers=2,
        flags=ENGINE_FLAGS,
        beat_s=BEAT_S,
        lease_s=LEASE_S,
    )
    with deployed(deployment):
        baseline = warm_up(deployment, str(model))
        soak = Soak(deployment, str(model), options.requests, options.seed)
        asyncio.run(soak.run())
        soak.wrong += aftermath(deployment, baseline)
    for name, samples in soak.samples.items():
        if abs(growth(samples).get("rss_growth_percent", 0.0)) > FLAT_PERCENT:
            soak.wrong.append(f"memory of {name} is not flat")
    found = soak.to_json()
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=2))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
