"""The processes of one ``LLM`` and the thread that keeps them and talks to them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from headrace.launcher import programs
from headrace.offline.errors import EngineDead, error_of
from headrace.offline.jobs import Job
from headrace.offline.link import EngineLink
from headrace.offline.prompts import Prompt, text_spec, token_spec
from headrace.offline.streams import Mailbox
from headrace.run_dir import RunDir
from headrace.sampling_params import SamplingParams
from headrace.supervisor import Program, RestartPolicy, Supervisor
from shared import sampling
from shared.config import ENGINE, TOKENIZER, WORKER, Settings
from shared.errors import ErrorCode, RequestError, StartupError
from shared.lifecycle import FAILURE_VARIABLE
from shared.logging import own_logger
from shared.messages import ErrorInfo, ModelCard
from shared.model_source import resolve_model
from shared.sampling import MAX_SEED

T = TypeVar("T")
STOP_S = 60.0
"""How long an orderly stop may take before the rest is killed."""
CLOSED = "the LLM was closed"


class Session:
    """Starts the processes and returns when they are ready; ``close`` ends them.

    A thread with an event loop of its own supervises them and holds the link; callers hand jobs to it.

    Args:
        with_tokenizer: start a tokenizer; else the engine is spoken to directly, in token ids.
        seed: of the seeds of requests that have none; None: they are drawn anew each time.

    Raises:
        StartupError: in the words of the process that could not start.
    """

    def __init__(self, settings: Settings, *, with_tokenizer: bool, seed: int | None) -> None:
        self.settings = settings
        self.with_tokenizer = with_tokenizer
        self._log = own_logger("llm", settings.log_level, settings.log_format)
        self._draw = random.Random(secrets.randbits(64) if seed is None else seed)
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
        self._ready: concurrent.futures.Future[ModelCard] = concurrent.futures.Future()
        self._lock = threading.RLock()  # a stream that is collected while it is held aborts its request
        self._death: str | None = None
        """Why nothing can be asked any more."""
        self._stopping = False
        self._questions: set[asyncio.Future[None]] = set()
        self.link: EngineLink
        """To be read; what it does is done in its loop."""
        self._supervisor: Supervisor | None = None
        source = resolve_model(settings.model, settings.revision)
        self._run_dir = RunDir(settings.run_dir)
        try:
            services = (TOKENIZER, ENGINE, WORKER) if with_tokenizer else (ENGINE, WORKER)
            to_run = programs(settings, source, self._run_dir, services)
            endpoint = self._run_dir.ipc("tokenizer-0" if with_tokenizer else "engine")
            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(
                target=self._main, args=(to_run, endpoint), name="headrace-llm", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._run_dir.close()
            raise
        try:
            self.card = self._ready.result()
        except BaseException:
            self.close()
            raise

    # -- for callers, in any thread ----------------------------------------------------------------------------------

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        wire: sampling.SamplingParams,
        *,
        index: int = 0,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Job:
        """A checked job. ``wire``: what ``params.to_shared`` gave.

        Raises:
            InvalidRequest: the prompt is wrong, or a parameter needs a tokenizer that is not there.
        """
        if wire.seed is None:
            wire = dataclasses.replace(wire, seed=self._draw.randint(0, MAX_SEED))
        make = text_spec if self.with_tokenizer else token_spec
        if request_id is None:
            request_id = str(next(self._numbers))
        return Job(request_id, index, prompt, params, make(prompt, wire, priority, self.card), time.time())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs served; their sinks hear what happens.

        Raises:
            EngineDead: the processes have ended.
        """
        self._call(lambda: self.link.submit(jobs))

    def abort(self, jobs: Sequence[Job]) -> None:
        """Stop jobs that are not over; nobody hears of them again. Never waits, never fails."""
        with contextlib.suppress(EngineDead):
            self._call(lambda: self.link.abort(jobs))

    def abort_ids(self, request_ids: Sequence[str]) -> None:
        """End these requests if they run; their sinks hear it."""
        with contextlib.suppress(EngineDead):
            self._call(lambda: self.link.abort(self.link.find(request_ids), tell=True))

    async def ask(self, make: Callable[[EngineLink], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the link in its loop, from another loop.

        Raises:
            EngineDead: the processes have ended.
            InvalidRequest, RequestFailed: what its ``RequestError`` says.
        """
        return await asyncio.wrap_future(self._asked(make))

    def ask_and_wait(self, make: Callable[[EngineLink], Coroutine[Any, Any, T]]) -> T:
        """``ask``, from a thread."""
        return self._asked(make).result()

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """What wakes the streams that are read in ``loop``."""
        with self._lock:
            return self._mailboxes.setdefault(loop, Mailbox(loop))

    def pids(self) -> dict[str, int]:
        """Process ids of what runs, by the name of the program."""
        return self._supervisor.pids() if self._supervisor else {}

    def close(self) -> None:
        """End jobs and processes, in order. In a forked child of the caller, nothing."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(EngineDead):
            self._call(self._stop)
        if threading.current_thread() is self._thread:
            return  # collected as garbage in the loop itself, which ends by itself
        try:
            self._thread.join(STOP_S)
        finally:
            if self._thread.is_alive():
                with contextlib.suppress(EngineDead):
                    self._call(self._stop)
                self._thread.join(STOP_S)

    # -- how they reach the loop -------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with self._lock:
            if self._death is not None:
                raise EngineDead(self._death, ErrorCode.UNAVAILABLE)
            self._loop.call_soon_threadsafe(function, *arguments)

    def _asked(self, make: Callable[[EngineLink], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def answer() -> None:
            try:
                future.set_result(await make(self.link))
            except asyncio.CancelledError:
                future.set_exception(EngineDead(self._death or CLOSED, ErrorCode.UNAVAILABLE))
            except RequestError as error:
                future.set_exception(error_of(ErrorInfo(error.code, error.message, error.param)))
            except Exception as error:
                future.set_exception(error)

        self._call(lambda: self._ask(answer()))
        return future

    # -- in the thread of the loop -----------------------------------------------------------------------------------

    def _main(self, to_run: Sequence[Program], endpoint: str) -> None:
        try:
            self._loop.run_until_complete(self._serve(to_run, endpoint))
        except BaseException as error:
            self._log.exception("ended by an error")
            self._die(f"ended by an error: {error}")
        finally:
            self._loop.close()
            self._run_dir.close()
            if not self._ready.done():
                self._ready.set_exception(StartupError(self._death or "closed"))

    async def _serve(self, to_run: Sequence[Program], endpoint: str) -> None:
        self._supervisor = Supervisor(
            [self._telling(program) for program in to_run],
            RestartPolicy.of(self.settings),
            run_dir=self._run_dir,
            log=self._log,
        )
        self.link = EngineLink(self.settings, endpoint, self._on_ready)
        self.link.start()
        if self._stopping:
            return
        try:
            await self._supervisor.run()
        finally:
            self._die(self._words())
            await asyncio.sleep(0)  # what was asked for before the end is here now
            self.link.stop(ErrorInfo(ErrorCode.UNAVAILABLE, self._death or ""))
            questions = list(self._questions)
            for question in questions:
                question.cancel()
            await asyncio.gather(*questions, return_exceptions=True)

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    def _stop(self) -> None:
        """The first time in order, the second time at once."""
        self._stopping = True
        if self._supervisor is not None:
            self.link.fail_all(ErrorInfo(ErrorCode.UNAVAILABLE, CLOSED))
            self._supervisor.stop()

    def _on_ready(self, card: ModelCard) -> None:
        if not self._ready.done():
            self._ready.set_result(card)

    def _die(self, words: str) -> None:
        with self._lock:
            self._death = self._death or words

    def _telling(self, program: Program) -> Program:
        """A program that leaves its last words where ``_words`` finds them."""
        return dataclasses.replace(
            program, environ={**program.environ, FAILURE_VARIABLE: str(self._last_words(program.name))}
        )

    def _last_words(self, name: str) -> Path:
        return self._run_dir.path / f"{name.replace('/', '-')}.failure"

    def _words(self) -> str:
        """Why the processes have ended."""
        if self._stopping or self._supervisor is None:
            return CLOSED
        for service in (TOKENIZER, ENGINE, WORKER):
            for path in self._run_dir.path.glob(f"{service}*.failure"):
                with contextlib.suppress(OSError):
                    return f"{service}: {path.read_text(encoding='utf-8')}"
        return self._supervisor.failure or "the processes have ended"
