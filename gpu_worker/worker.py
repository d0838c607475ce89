"""The worker process: takes steps from one engine, runs them, and sends their results.

The main thread owns the steps link: it receives, launches, and never waits for a result. A second thread owns the
results link. A third one loads the model, so that both links stay alive meanwhile. Imports no torch, so that the engine
hears of this worker at once.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from typing import TYPE_CHECKING

from gpu_worker.device_lease import DeviceLease
from gpu_worker.early_start import start_early
from gpu_worker.model_loading import ModelLoading
from gpu_worker.result_sender import Beats, ResultSender
from gpu_worker.threads import ThreadGovernor, usable_cores
from shared.config import WORKER, Settings
from shared.errors import ProtocolError, StartupError
from shared.heartbeat import Heartbeat
from shared.hop.timers import RunningClock
from shared.links import curve_keys_of, process_name
from shared.logging import get_logger
from shared.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Dismissed,
    Epoch,
    Hello,
    Init,
    Message,
    Ready,
    Step,
    WorkerConfig,
    WorkerFailed,
)
from shared.transport import Connector, Poller, new_boot

if TYPE_CHECKING:
    from gpu_worker.step_output import Runner

log = get_logger()

SWITCH_INTERVAL_S = 1e-4
"""Python's default of 5 ms can hold up a launch while the results thread runs."""
LOADING_POLL_S = 0.02
IDLE_S = 0.2
"""A worker without a step for this long may do what would hold up the next one."""
SILENT_BEATS = 3
"""An engine answers each sign of life; one that has said nothing for this many beats has no use for a worker."""
OVERDUE_S = 5.0
"""When a worker that should have left has not, whatever holds it up, the kernel ends it (SIGALRM)."""
LAST_WORDS_S = 1.0
"""How long a worker that can never be ready repeats why, before it ends."""


class Worker:
    """One worker of one engine; ``run`` returns when ``stop`` was called and the engine needs it no more.

    Args:
        lease: of the device; if it is not held yet, the worker says what it waits for, and loads nothing until it is.
    """

    def __init__(self, settings: Settings, lease: DeviceLease) -> None:
        if settings.worker_endpoint is None:
            raise StartupError("--worker-endpoint is missing: where the engine listens for workers")
        self._endpoint = settings.worker_endpoint
        self._lease, self._beat_s = lease, settings.beat_s
        self._curve = curve_keys_of(settings)
        self._name = process_name(settings)
        self._boot = new_boot()
        self._governor = ThreadGovernor(settings.threads, usable_cores())
        self._heartbeat, self._step_timeout_s = Heartbeat(), settings.step_timeout_s
        self._stopping = False
        self._patience_s = settings.shutdown_timeout
        self._leave_by: float | None = None
        """When a worker that was asked to stop ends, whatever is left to compute."""
        self._dismissed = False
        self._clock = RunningClock(time.monotonic)
        self._heard_at = self._clock()
        self._said_silent = False
        self._epoch: Epoch | None = None
        self._config: WorkerConfig | None = None
        """What the current epoch asks for."""
        self._loading: ModelLoading | None = None
        self._runner: Runner | None = None
        self._runner_config: WorkerConfig | None = None
        """What ``_runner`` was made for."""
        self._fatal: Exception | None = None
        self._next_step = 1
        self._idle_from = 0.0
        """Until then a further step is to be expected."""
        self._failed = False
        self._link = self._connect("steps")
        self._beats = Beats(self._link, self._hello, self._beat_s)
        self._results = ResultSender(lambda: self._connect("results"), self._hello, self._beat_s)

    def stop(self) -> None:
        """End ``run`` once what the engine sent is computed; may be called from a signal handler."""
        self._stopping = True
        signal.setitimer(signal.ITIMER_REAL, self._patience_s + OVERDUE_S)

    def run(self) -> None:
        """Serve until stopped. Then say so with each sign of life, and go on until the engine dismisses this worker, it
        is gone or answers no more, nothing runs here, or ``--shutdown-timeout`` is over.

        Raises:
            StartupError: the model can never be ready; the engine was told.
            RuntimeError: it could not be loaded, for a reason that nobody foresaw; the engine was told.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        poller, heartbeat = Poller(), self._heartbeat
        poller.register(self._link)
        self._results.start()
        try:
            while not (self._stopping and self._may_leave()):
                received = self._link.receive()
                if received is not None:
                    self._handle(received.message)
                    self._heard_at = self._clock()
                elif not self._prepare():
                    poller.poll(LOADING_POLL_S if self._loading or self._epoch is None else self._beat_s / 4)
                self._take_device()
                self._finish_loading()
                self._follow_load()
                self._tell_silence()
                self._beats.beat()
                heartbeat.beat()
                if self._fatal is not None:
                    self._say_last_words(self._fatal)
        finally:
            self._results.stop()
            self._link.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Init):
            self._on_init(message)
        elif isinstance(message, Dismissed):
            self._dismissed = self._dismissed or (self._stopping and not self._is_past(message.epoch))
        elif isinstance(message, Hello) and message.refusal:
            log.error("the engine refuses this worker", reason=message.refusal)

    def _on_step(self, step: Step) -> None:
        """Launch a step of this epoch; whatever goes wrong ends the epoch."""
        if step.epoch != self._epoch or self._failed:
            return
        if self._runner is None or self._loading is not None:
            self._fail(step.number, "a step came before Ready", on_the_way=True)
        elif step.number != self._next_step:
            reason = f"step {step.number} came where step {self._next_step} was due"
            self._fail(step.number, reason, on_the_way=True)
        else:
            self._next_step += 1
            self._idle_from = time.monotonic() + IDLE_S
            try:
                with self._heartbeat.busy(self._step_timeout_s):
                    launched = self._runner.launch(step)
            except Exception as error:
                log.exception("a step failed", step=step.number, epoch=step.epoch.counter)
                self._fail(step.number, f"{type(error).__name__}: {error}")
            else:
                self._results.put((step.epoch, launched))

    def _on_init(self, init: Init) -> None:
        """Begin a new epoch with empty slots; the same one again is only answered again."""
        if init.epoch == self._epoch:
            self._send_ready()
            return
        if self._is_past(init.epoch):
            return
        if self._stopping:
            # What was computed here goes on elsewhere.
            self._dismissed = True
            return
        log.info("a new epoch", epoch=init.epoch.counter)
        self._epoch, self._config = init.epoch, init.config
        self._next_step, self._failed = 1, False
        self._results.begin(init.epoch)
        if self._loading is None and self._lease.held:
            self._provide_runner(init.config)

    def _is_past(self, epoch: Epoch) -> bool:
        """Whether an epoch is one of this engine's from before the current one."""
        return self._epoch is not None and epoch.boot == self._epoch.boot and epoch < self._epoch

    def _on_malformed(self, _peer: str, error: ProtocolError) -> None:
        self._fail(self._next_step, f"a malformed frame came: {error}", on_the_way=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _may_leave(self) -> bool:
        """Whether a worker that was asked to stop is of no more use."""
        now = time.monotonic()
        if self._leave_by is None:
            self._leave_by = now + self._patience_s
            self._beats.beat_now()
            if self._serving and self._beats.connected:
                log.info("leaving when what runs is done", seconds_at_most=self._patience_s)
        if not self._serving or self._dismissed or not self._beats.connected:
            return True
        if self._engine_is_silent:
            log.warning("leaving an engine that does not answer", silent_s=round(self._clock() - self._heard_at, 1))
            return True
        if now < self._leave_by:
            return False
        log.warning("leaving with work left, which the engine moves", after_seconds=self._patience_s)
        return True

    @property
    def _serving(self) -> bool:
        """Whether the engine may have work here."""
        return self._runner is not None and self._loading is None and self._epoch is not None and not self._failed

    @property
    def _engine_is_silent(self) -> bool:
        return self._clock() - self._heard_at > SILENT_BEATS * self._beat_s and not self._link.readable

    def _tell_silence(self) -> None:
        """Say in the log once that no engine answers, and when one does again."""
        if self._engine_is_silent == self._said_silent:
            return
        self._said_silent = not self._said_silent
        if not self._said_silent:
            log.info("the engine answers", endpoint=self._endpoint)
        elif self._epoch is None:
            log.info("no engine answers yet; still trying", endpoint=self._endpoint)
        else:
            log.warning("the engine answers no more; waiting for it", endpoint=self._endpoint)

    # -- the model ---------------------------------------------------------------------------------------------------

    def _take_device(self) -> None:
        """Look whether a device has become free, if this worker waits for one."""
        if self._lease.held or not self._lease.take():
            return
        start_early(self._lease.device)
        if self._config is not None:
            self._provide_runner(self._config)

    def _provide_runner(self, config: WorkerConfig) -> None:
        """Empty the runner if it was made for this configuration; begin to load one otherwise."""
        if self._runner is not None and config == self._runner_config:
            self._runner.reset()
            self._send_ready()
            return
        previous, self._runner = self._runner, None
        self._loading = ModelLoading(config, self._lease.device, previous, self._runner_config)

    def _finish_loading(self) -> None:
        loading = self._loading
        if loading is None or not loading.finished:
            return
        self._loading = None
        if loading.runner is None:
            self._fatal = loading.error or RuntimeError("loading the model failed")
            self._send_ready()
            return
        self._runner, self._runner_config = loading.runner, loading.config
        if self._runner.device.type == "cpu":
            self._lease.give_back()
        self._use_threads()
        gc.collect()
        gc.freeze()
        assert self._config is not None
        if self._config == loading.config:
            self._send_ready()
        else:
            self._provide_runner(self._config)

    def _send_ready(self) -> None:
        if self._epoch is None or self._loading is not None:
            return
        if self._fatal is not None:
            self._link.send(Ready(self._epoch, 0, 0, "", "", str(self._fatal)))
        elif self._runner is not None:
            cache, pool, device = self._runner.cache, self._runner.host_pool, str(self._runner.device)
            dtype = str(cache.tensor.dtype).removeprefix("torch.")
            host = (pool.num_blocks, pool.rates) if pool is not None else (0, (0.0, 0.0))
            self._link.send(Ready(self._epoch, cache.num_blocks, cache.block_bytes, device, dtype, None, *host))

    def _say_last_words(self, reason: Exception) -> None:
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end and not self._stopping:
            time.sleep(LOADING_POLL_S)
            while (received := self._link.receive()) is not None:
                if isinstance(received.message, Init):
                    self._epoch = received.message.epoch
                    self._send_ready()
        raise reason

    def _follow_load(self) -> None:
        if self._runner is not None and self._governor.update():
            self._use_threads()

    def _use_threads(self) -> None:
        import torch

        if torch.get_num_threads() != self._governor.threads:
            torch.set_num_threads(self._governor.threads)
            log.debug("CPU threads", threads=self._governor.threads, busy_elsewhere=round(self._governor.others, 2))

    def _prepare(self) -> bool:
        """Where no step came lately, let the runner work ahead a little; returns whether there is more to do."""
        if self._runner is None or self._loading is not None or time.monotonic() < self._idle_from:
            return False
        return self._runner.prepare()

    # -- links -------------------------------------------------------------------------------------------------------

    def _connect(self, link: str) -> Connector:
        return Connector(
            self._endpoint,
            identity=f"{self._name}/{link}",
            boot=self._boot,
            curve=self._curve,
            on_malformed=self._on_malformed if link == "steps" else None,
            on_connection=self._on_connection if link == "steps" else None,
        )

    def _on_connection(self, connected: bool) -> None:
        """An engine that was started again hears of this worker at once."""
        if connected:
            self._beats.beat_now()

    def _hello(self) -> Hello:
        ready = self._runner is not None and self._loading is None
        status = "" if ready else self._status
        refusal = None if self._fatal is None else str(self._fatal)
        return Hello(
            WORKER, self._name, OLDEST_PROTOCOL, PROTOCOL_VERSION, ready, None, refusal, status, self._stopping
        )

    @property
    def _status(self) -> str:
        """What a worker does that is not ready, in words."""
        loading = self._loading
        if loading is not None:
            return loading.status
        return "waiting for the engine's Init" if self._lease.held else self._lease.status

    def _fail(self, number: int, reason: str, *, on_the_way: bool = False) -> None:
        """Tell the engine that this epoch is over, after the results of earlier steps; wait for a new Init."""
        if self._epoch is None or self._failed:
            return
        self._failed = True
        log.error("the epoch ends", step=number, reason=reason)
        self._results.put(WorkerFailed(self._epoch, number, reason, on_the_way))
