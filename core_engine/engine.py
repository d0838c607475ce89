"""The engine process: one loop that drains its links, settles what came, plans, sends, and never waits but in poll."""

from __future__ import annotations

import gc
import time
from typing import Any

import structlog

from core_engine.core import EngineCore
from core_engine.engine_config import load_engine_config, scheduler_for
from core_engine.frontend_link import FrontendLink
from core_engine.host_memory import host_memory_of
from core_engine.pressure import Pressure
from core_engine.replica import Replica
from core_engine.settle import Settled
from core_engine.step_record import StepLog
from core_engine.suspects import CONVICT
from core_engine.worker_link import WorkerLink
from shared.config import Settings
from shared.errors import ErrorCode, ProtocolError, RequestError, StartupError
from shared.heartbeat import Heartbeat
from shared.hop import RunningClock, Timers
from shared.links import (
    DEFAULT_ENGINE_ENDPOINT,
    DEFAULT_WORKERS_ENDPOINT,
    curve_keys_of,
    process_name,
    speaks_our_protocol,
)
from shared.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello, Ready, Step
from shared.transport import Listener, Poller, new_boot

log: structlog.stdlib.BoundLogger = structlog.get_logger()

TICKS_PER_BEAT = 10
LAST_WORDS_S = 0.2
"""Sockets drop on close what they have not sent: time for the last Hello to leave."""
GC_THRESHOLDS = (5_000, 5, 800)
"""A pass over what is young meets 25,000 objects at most, a few milliseconds, and one over all is as rare as can be. A
pool's blocks are young for a while: they are made as they are first used, many at once where a long prompt comes in."""


class Engine:
    """Binds both endpoints at once; ``run`` returns after ``stop``.

    Raises:
        StartupError: the model or a setting is unusable, or an endpoint cannot be bound.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.config = load_engine_config(settings)
        self.name = process_name(settings)
        self._boot = new_boot()
        self._curve = curve_keys_of(settings)
        self._stopping = False
        self._failure = ""
        self._clock = RunningClock(time.monotonic)
        self._step_log = StepLog(settings.step_log) if settings.step_log else None
        self.core = EngineCore(self.config.core, clock=time.monotonic, recorder=self._step_log, timer=self._step_log)
        timers = Timers(settings.beat_s, settings.lease_s)
        self.workers = WorkerLink(
            settings.listen_workers or DEFAULT_WORKERS_ENDPOINT,
            boot=self._boot,
            config=self.config.worker,
            clock=self._clock,
            beat_s=settings.beat_s,
            step_timeout_s=settings.step_timeout_s,
            begin=self._begin_epoch,
            end=self._end_epoch,
            on_leaving=self._on_leaving,
            make_hello=self._hello,
            make_listener=self._listener,
        )
        self.frontends = FrontendLink(
            self._listener(settings.listen or DEFAULT_ENGINE_ENDPOINT),
            self.core,
            name=self.name,
            timers=timers,
            clock=self._clock,
            recompute=settings.batch_invariant,
            eos_ids=self.config.eos_ids,
            make_hello=self._hello,
        )
        self._poller = Poller()
        self._poller.register(self.workers.listener)
        self._poller.register(self.frontends.listener)
        self._settled: list[Settled] = []
        self._tick_s = settings.beat_s / TICKS_PER_BEAT
        self._tick_due = 0.0
        self._heartbeat = Heartbeat()
        self._pressure = Pressure(self.core, self._clock)

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            StartupError: a worker can never be ready.
        """
        log.info("listening", front_ends=self.frontends.listener.endpoint, workers=self.workers.listener.endpoint)
        gc.set_threshold(*GC_THRESHOLDS)
        _set_garbage_apart()
        try:
            while not self._stopping:
                self.turn()
        except StartupError as error:
            self._failure = str(error)
            self.frontends.announce()
            time.sleep(LAST_WORDS_S)
            raise
        finally:
            self.close()

    def turn(self) -> None:
        """Drain, settle, plan, send: one turn of the loop."""
        ready = self._poller.poll(self._tick_due - self._clock())
        if self.frontends.listener in ready:
            self.frontends.drain()
        if self.workers.listener in ready:
            self._settle()
        self.frontends.expire()
        for replica in list(self.core.replicas):
            while replica in self.core.replicas and (step := self.plan(replica)) is not None:
                self.workers.send(replica, step)
        self._deliver()
        self.frontends.flush()
        if self._clock() >= self._tick_due:
            self._tick()

    def _settle(self) -> None:
        """Apply the results that have arrived; what cannot be applied ends its epoch."""
        for replica, result in self.workers.drain():
            if replica in self.core.replicas:
                try:
                    self._settled.append(self.core.settle(replica, result))
                except ProtocolError as error:
                    self.workers.fail(replica, error)

    def _deliver(self) -> None:
        """Send what was settled: after the next steps, so that workers wait for no front end."""
        for settled in self._settled:
            self.frontends.deliver(settled)
        self._settled.clear()

    def plan(self, replica: Replica) -> Step | None:
        return self.core.plan(replica)

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stopping = True

    def close(self) -> None:
        self.workers.listener.close()
        self.frontends.listener.close()
        if self._step_log is not None:
            self._step_log.close()

    def _tick(self) -> None:
        self._tick_due = self._clock() + self._tick_s
        self._heartbeat.beat()
        self.workers.tick()
        self.core.metrics.stale_messages.set(self.workers.stale)
        self.core.metrics.malformed_messages.set(self.workers.listener.malformed + self.frontends.listener.malformed)
        for warning in self._pressure.look():
            log.warning(warning)
        self.frontends.tick()

    # -- replicas --------------------------------------------------------------------------------------------------

    def _begin_epoch(self, name: str, ready: Ready) -> Replica:
        settings, scheduler = self.settings, self.core.scheduler
        scheduler.config = scheduler_for(settings, scheduler.config.max_model_len, ready.device)
        refused = self.core.begin_epoch(name, ready.epoch, ready.num_blocks, host_memory_of(ready))
        self.core.metrics.cache_configured(
            block_size=settings.block_size,
            num_blocks=ready.num_blocks,
            prefix_caching=settings.enable_prefix_caching,
            memory_utilization=settings.gpu_memory_utilization,
        )
        _set_garbage_apart()
        self._describe(name, ready)
        self._deliver()
        for sequence, error in refused:
            self.frontends.fail(sequence, error)
        self.frontends.announce()
        return self.core.replicas[-1]

    def _end_epoch(self, replica: Replica, reason: str, on_the_way: bool) -> None:
        self._deliver()
        convicted = self.core.end_epoch(replica, blames=not on_the_way)
        if convicted is not None:
            log.error("a request is ended because workers are lost when they compute it", request_id=convicted.rid)
            words = f"the request was stopped: {CONVICT} times a worker was lost that computed nothing else: {reason}"
            self.frontends.fail(convicted.sequences[-1], RequestError(words, code=ErrorCode.POISON))
        for sequence, error in self.core.refuse_homeless():
            self.frontends.fail(sequence, error)
        self.frontends.announce()

    def _on_leaving(self) -> None:
        self.frontends.announce()

    def _describe(self, name: str, ready: Ready) -> None:
        """Say in plain words what the KV cache can hold."""
        block_size = self.settings.block_size
        max_model_len = self.config.card.max_model_len
        tokens = (ready.num_blocks - 1) * block_size
        log.info(
            f"worker {name} is ready on {ready.device} in {ready.dtype}: "
            f"{ready.block_bytes // block_size:,} bytes of KV cache per token, {ready.block_bytes:,} per block of "
            f"{block_size}; cache of {tokens:,} tokens; at most {tokens / max_model_len:.1f} requests of "
            f"{max_model_len:,} tokens at the same time",
            epoch=ready.epoch.counter,
        )
        if ready.num_host_blocks:
            out, back = ready.transfer_rates
            log.info(
                f"worker {name} keeps {ready.num_host_blocks:,} blocks more in host memory: copied there at "
                f"{out / 1e9:.1f} GB/s, and back at {back / 1e9:.1f} GB/s",
                epoch=ready.epoch.counter,
            )
        if tokens < max_model_len:
            log.warning(f"the KV cache holds {tokens:,} tokens: requests longer than that are refused")

    # -- links -----------------------------------------------------------------------------------------------------

    def _listener(self, endpoint: str, **hears: Any) -> Listener:
        return Listener(endpoint, boot=self._boot, curve=self._curve, **hears)

    def _hello(self, peer: Hello | None) -> Hello:
        """What the engine says of itself, to ``peer`` if it spoke first."""
        ready = self.core.is_ready and not self._failure
        return Hello(
            role="core_engine",
            name=self.name,
            oldest_protocol=OLDEST_PROTOCOL,
            protocol=PROTOCOL_VERSION,
            ready=ready,
            card=self.config.card,
            refusal=None if peer is None else self._refusal_of(peer),
            status="" if ready else self._failure or self.workers.status,
        )

    def _refusal_of(self, peer: Hello) -> str | None:
        if not speaks_our_protocol(peer):
            return (
                f"{peer.role} {peer.name} speaks protocol {peer.oldest_protocol} to {peer.protocol}, this engine "
                f"{OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
            )
        card = self.config.card
        if peer.card is not None and (peer.card.digest, peer.card.vocab_size) != (card.digest, card.vocab_size):
            return f"{peer.role} {peer.name} has another model ({peer.card.model}) than this engine ({card.model})"
        return None


def _set_garbage_apart() -> None:
    """Keep what lives long, such as a pool's blocks, out of the collector's later passes."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
