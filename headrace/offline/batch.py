"""Many requests at once: the caller waits for all of them, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from headrace.offline.errors import InvalidRequest, RequestFailed, error_of
from headrace.offline.jobs import Job
from headrace.offline.render import request_output
from headrace.outputs import RequestOutput
from shared.hop import Log

if TYPE_CHECKING:
    from headrace.offline.session import Session

Progress = bool | Callable[..., Any]


class Batch:
    """The sink of jobs that were given together."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._ended: list[Job] = []
        self._news: SimpleQueue[list[Job]] = SimpleQueue()
        for job in jobs:
            job.sink = self

    def run(self, session: Session, use_tqdm: Progress) -> list[RequestOutput]:
        """Have all jobs served and return their outputs in order.

        Raises:
            InvalidRequest, RequestFailed: the first error by order, when all others are done; its ``outputs`` has
                theirs.
        """
        outputs: list[RequestOutput | None] = [None] * len(self._jobs)
        left = len(self._jobs)
        session.submit(self._jobs)
        bar = _Bar(left, use_tqdm)
        try:
            while left:
                ended = self._news.get()
                left -= len(ended)
                for job in ended:
                    if job.error is None:
                        output = outputs[job.index] = request_output(job)
                        bar.add(output)
                bar.show(len(ended))
        except BaseException:
            session.abort(self._jobs)
            raise
        finally:
            bar.close()
        error = next((self._error(job) for job in self._jobs if job.error is not None), None)
        if error is not None:
            error.outputs = outputs
            raise error
        return [output for output in outputs if output is not None]

    @staticmethod
    def _error(job: Job) -> InvalidRequest | RequestFailed:
        assert job.error is not None
        return error_of(job.error, job.prompt.place)

    # -- what the link tells, in its thread --------------------------------------------------------------------------

    def grew(self, job: Job, log: Log, first: int) -> None:
        """Nothing to do before the end."""

    def over(self, job: Job) -> None:
        self._ended.append(job)

    def flush(self) -> None:
        if self._ended:
            self._news.put(self._ended)
            self._ended = []


class _Bar:
    """vLLM's progress bar: prompts done, and the mean speed so far."""

    def __init__(self, total: int, use_tqdm: Progress) -> None:
        self._bar: Any = None
        self._began = time.monotonic()
        self._input = self._output = 0
        if use_tqdm:
            make: Any = use_tqdm
            if use_tqdm is True:
                from tqdm.auto import tqdm as make
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed())

    def add(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in output.outputs)

    def show(self, count: int) -> None:
        if self._bar is not None:
            self._bar.postfix = self._speed()
            self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _speed(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._began)
        return f"est. speed input: {self._input / seconds:.2f} toks/s, output: {self._output / seconds:.2f} toks/s"
