"""The link to workers: who is there, in which epoch, and what is to be settled.

    worker                              engine
    Hello(name/steps, boot) ─────────▶  new boot: new epoch
                 ◀───────── Init(epoch, config), again each beat until
    Ready(epoch, blocks) ────────────▶  a new Replica
                 ◀───────── Step 1, 2, …    (a window of steps in flight)
    StepResult 1, 2, … (name/results) ▶
    Hello(leaving) ──────────────────▶  its replica admits nothing more; once that is empty
                 ◀───────── Dismissed(epoch)

An epoch ends when the worker's boot changes, it says that it failed, a frame or number is wrong, a message cannot be
sent, or nothing is settled for too long. Its replica is given up, and its sequences wait again. Steps and results that
were under way on a lost connection are lost, so one that is soon back is a new epoch, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import structlog

from core_engine.replica import Replica
from shared.errors import ProtocolError, StartupError
from shared.messages import Dismissed, Epoch, Hello, Init, Ready, Step, StepResult, WorkerConfig, WorkerFailed
from shared.transport import Listener

log: structlog.stdlib.BoundLogger = structlog.get_logger()

MOST_AT_ONCE = 64
"""Messages that are taken from the socket in one turn of the loop."""
LONGEST_BACK_OFF_S = 10.0
SILENT_BEATS = 2
"""A worker that says nothing for so long is probed. That it is gone shows when a message to it cannot be sent."""
STEPS, RESULTS = "/steps", "/results"


@dataclasses.dataclass(slots=True)
class Worker:
    """One worker, by name."""

    name: str
    boot: int
    epoch: Epoch
    heard_at: float
    init_due: float
    replica: Replica | None = None
    progress_at: float = 0.0
    """When the window was last empty, or a step was settled."""
    failures: int = 0
    """Epochs in a row that ended without a settled step."""
    status: str = ""
    leaving: bool = False
    """It was asked to stop; without a replica it is told to, again with each of its beats."""


class WorkerLink:
    """All workers of an engine.

    Args:
        begin: a worker is ready; makes its replica.
        on_leaving: a replica admits nothing more.
        end: an epoch with a replica is over, for what reason, and whether that lies in messages on their way: then no
            request is to blame.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        boot: int,
        config: WorkerConfig,
        clock: Callable[[], float],
        beat_s: float,
        step_timeout_s: float,
        begin: Callable[[str, Ready], Replica],
        end: Callable[[Replica, str, bool], None],
        on_leaving: Callable[[], None],
        make_hello: Callable[[Hello | None], Hello],
        make_listener: Callable[..., Listener],
    ) -> None:
        self.listener = make_listener(endpoint, on_malformed=self._on_malformed, on_disconnected=self._on_disconnected)
        self.workers: dict[str, Worker] = {}
        self.stale = 0
        """Messages of an old epoch that were dropped."""
        self._boot = boot
        self._config = config
        self._clock = clock
        self._beat_s = beat_s
        self._step_timeout_s = step_timeout_s
        self._begin = begin
        self._end = end
        self._on_leaving = on_leaving
        self._make_hello = make_hello
        self._counter = itertools.count(1)
        self._has_served = False
        """A worker was ready once: what the engine asks for can be done."""
        self._doubtful = False
        """Somebody's connection was lost since the last tick."""

    @property
    def status(self) -> str:
        """What the workers are doing, in words, while none is ready."""
        for worker in self.workers.values():
            if not worker.leaving:
                return worker.status or f"worker {worker.name} is loading the model"
        return "waiting for a worker"

    # -- the loop's side -------------------------------------------------------------------------------------------

    def drain(self) -> list[tuple[Replica, StepResult]]:
        """Take what has arrived. Returns the results of live epochs, in order.

        Raises:
            StartupError: the first worker can never be ready.
        """
        results: list[tuple[Replica, StepResult]] = []
        for _ in range(MOST_AT_ONCE):
            received = self.listener.receive() if self.listener.readable else None
            if received is None:
                break
            match received.message:
                case StepResult() as result:
                    worker = self._of_epoch(received.peer, result.epoch)
                    if worker is not None and worker.replica is not None:
                        worker.progress_at = self._clock()
                        worker.failures = 0
                        results.append((worker.replica, result))
                case Hello() as hello:
                    self._on_hello(received.peer, received.boot, hello)
                case Ready() as ready:
                    self._on_ready(received.peer, ready)
                case WorkerFailed() as failed:
                    worker = self._of_epoch(received.peer, failed.epoch)
                    if worker is not None:
                        reason = f"it failed in step {failed.number}: {failed.reason}"
                        self._new_epoch(worker, reason, on_the_way=failed.on_the_way)
                case _:
                    self._on_malformed(received.peer, ProtocolError("not a message of a worker"))
        return [(replica, result) for replica, result in results if self._worker_of(replica) is not None]

    def send(self, replica: Replica, step: Step) -> None:
        """Send a step; if that fails the epoch is over."""
        worker = self._worker_of(replica)
        assert worker is not None
        log.debug(
            "step",
            worker=worker.name,
            epoch=step.epoch.counter,
            step=step.number,
            new=[init.rid for init in step.new],
            prefills=len(step.prefill),
            decodes=len(step.decode),
        )
        if len(replica.window) == 1:
            worker.progress_at = self._clock()
        if not self.listener.send(worker.name + STEPS, step):
            self.lose(worker, "it is not connected")

    def fail(self, replica: Replica, error: ProtocolError) -> None:
        """What came from the worker of this replica cannot be used."""
        worker = self._worker_of(replica)
        if worker is not None:
            self._new_epoch(worker, str(error))

    def tick(self) -> None:
        """Repeat Inits, probe silent workers, end stuck epochs, dismiss who leaves; call it several times a beat."""
        now = self._clock()
        if self._doubtful:
            self._doubtful = False
            self._probe_all()
        for worker in list(self.workers.values()):
            if worker.leaving and (worker.replica is None or worker.replica.is_idle):
                self._dismiss(worker)
            elif worker.replica is None:
                if now >= worker.init_due:
                    worker.init_due = now + self._beat_s
                    if not self.listener.send(worker.name + STEPS, Init(worker.epoch, self._config)):
                        self.lose(worker, "it is not connected")
            elif worker.replica.window and now - worker.progress_at > self._step_timeout_s:
                self._new_epoch(worker, f"no step was settled for {self._step_timeout_s:g} s")
            elif now - worker.heard_at > SILENT_BEATS * self._beat_s:
                self._probe(worker)

    def _on_disconnected(self) -> None:
        """A worker may have been killed: ask which. The socket may learn of it a moment later than we: so the next tick
        asks again, and for all connections that are lost until then."""
        if not self._doubtful:
            self._doubtful = True
            self._probe_all()

    def _probe_all(self) -> None:
        for worker in list(self.workers.values()):
            self._probe(worker)

    def _probe(self, worker: Worker) -> None:
        worker.heard_at = self._clock()
        if not self.listener.send(worker.name + STEPS, self._make_hello(None)):
            self.lose(worker, "it is not connected")

    def lose(self, worker: Worker, reason: str) -> None:
        """Forget a worker; it may come back with a Hello."""
        if worker.leaving and worker.replica is None:
            log.info("worker has left", worker=worker.name, epoch=worker.epoch.counter)
        else:
            log.warning("worker lost", worker=worker.name, epoch=worker.epoch.counter, reason=reason)
        del self.workers[worker.name]
        self._give_up(worker, reason)

    # -- what workers send -----------------------------------------------------------------------------------------

    def _on_hello(self, peer: str, boot: int, hello: Hello) -> None:
        reply = self._make_hello(hello)
        self.listener.send(peer, reply)
        name = peer.removesuffix(STEPS)
        refusal = reply.refusal or hello.refusal
        if refusal is not None:
            log.error("worker refused", worker=peer, reason=refusal)
        if refusal is not None or name == peer:
            return
        worker, now = self.workers.get(name), self._clock()
        if worker is None:
            worker = Worker(name, boot, self._next_epoch(), now, now, leaving=hello.leaving)
            self.workers[name] = worker
            log.info("worker connected", worker=name, epoch=worker.epoch.counter)
            self._send_init(worker)
        elif worker.boot != boot:
            worker.boot, worker.leaving = boot, hello.leaving
            self._new_epoch(worker, "it was started again")
        worker.heard_at, worker.status = now, hello.status
        if hello.leaving and not worker.leaving:
            self._leave(worker)

    def _on_ready(self, peer: str, ready: Ready) -> None:
        worker = self._of_epoch(peer, ready.epoch)
        if worker is None or worker.replica is not None:
            return
        if ready.error is not None:
            words = f"worker {worker.name} cannot work: {ready.error}"
            if not self._has_served:
                raise StartupError(words)
            # It ends by itself; whoever keeps it running starts another one.
            log.error(words)
            return
        worker.heard_at = worker.progress_at = self._clock()
        if worker.leaving:
            return
        worker.replica, self._has_served = self._begin(worker.name, ready), True

    def _on_malformed(self, peer: str, error: ProtocolError) -> None:
        worker = self.workers.get(peer.removesuffix(STEPS).removesuffix(RESULTS))
        log.error("malformed message from a worker", worker=peer, error=str(error))
        if worker is not None:
            self._new_epoch(worker, f"malformed message: {error}", on_the_way=True)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _leave(self, worker: Worker) -> None:
        """Its sequences may finish; nothing new is admitted."""
        worker.leaving = True
        log.info("worker is leaving", worker=worker.name, running=worker.replica.num_running if worker.replica else 0)
        if worker.replica is not None:
            worker.replica.leaving = True
            self._on_leaving()

    def _dismiss(self, worker: Worker) -> None:
        """Let a worker without work end. It is forgotten once it cannot be reached."""
        if worker.replica is not None:
            log.info("worker dismissed", worker=worker.name, epoch=worker.epoch.counter)
            self._give_up(worker, "it was dismissed", on_the_way=True)
        if self._clock() >= worker.init_due:
            worker.init_due = self._clock() + self._beat_s
            if not self.listener.send(worker.name + STEPS, Dismissed(worker.epoch)):
                del self.workers[worker.name]

    # -- epochs ----------------------------------------------------------------------------------------------------

    def _next_epoch(self) -> Epoch:
        return Epoch(self._boot, next(self._counter))

    def _new_epoch(self, worker: Worker, reason: str, *, on_the_way: bool = False) -> None:
        log.warning("epoch over", worker=worker.name, epoch=worker.epoch.counter, reason=reason)
        self._give_up(worker, reason, on_the_way=on_the_way)
        if not worker.leaving:
            worker.epoch = self._next_epoch()
        delay = 0.0 if worker.failures < 2 else min(0.1 * 2**worker.failures, LONGEST_BACK_OFF_S)
        worker.failures += 1
        worker.init_due = self._clock() + delay
        if not delay:
            self._send_init(worker)

    def _send_init(self, worker: Worker) -> None:
        if worker.leaving:
            return
        worker.init_due = self._clock() + self._beat_s
        self.listener.send(worker.name + STEPS, Init(worker.epoch, self._config))

    def _give_up(self, worker: Worker, reason: str, *, on_the_way: bool = False) -> None:
        replica, worker.replica = worker.replica, None
        if replica is not None:
            self._end(replica, reason, on_the_way)

    def _of_epoch(self, peer: str, epoch: Epoch) -> Worker | None:
        """The worker, if the message is of its current epoch."""
        worker = self.workers.get(peer.removesuffix(STEPS).removesuffix(RESULTS))
        if worker is not None and worker.epoch == epoch:
            worker.heard_at = self._clock()
            return worker
        self.stale += 1
        return None

    def _worker_of(self, replica: Replica) -> Worker | None:
        return next((worker for worker in self.workers.values() if worker.replica is replica), None)
