"""``python -m benchmarks.h200``: measure all cases, or those that are asked for."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.h200 import table
from benchmarks.h200.measures import MEASURES
from benchmarks.h200.plan import CASES, GROUPS, MODELS, Group, Model
from benchmarks.h200.results import UNITS, Results, environment
from benchmarks.h200.work import Skipped, Work

MAX_CASE_S = 120.0
"""One that takes longer is stuck."""


class OutOfTime(Exception):
    """A limit of time is reached."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure and write; returns 1 when a case has failed."""
    args = _parsed(argv)
    results = Results(args.out, environment(args.commit), keep=args.keep)
    if args.scale != 1:
        results.environment["scale"] = args.scale
    failed: list[str] = []
    for model in args.models:
        failed += Run(model, results, Work(args.repeat, args.scale), args.max_seconds).all(args.cases)
    print(table.markdown(results.all()), flush=True)
    if args.out.resolve() == table.RESULTS and args.scale == 1:
        table.update_docs()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


class Run:
    """All groups of one model, within a time."""

    def __init__(self, model: Model, results: Results, work: Work, max_seconds: float) -> None:
        self._model = model
        self._results = results
        self._work = work
        self._end = time.monotonic() + max_seconds
        self._failed: list[str] = []

    def all(self, wanted: Sequence[str]) -> list[str]:
        """Measure the cases ``wanted``, or all when there are none; returns those that failed."""
        for group in GROUPS:
            if left := group.chosen(self._model, wanted):
                with self._going_on(left):
                    self._group(group, left)
        return self._failed

    def _group(self, group: Group, left: list[str]) -> None:
        """Take case after case off ``left``. One that reaches its limit of time may have left a stuck engine behind."""
        began = time.monotonic()
        with contextlib.ExitStack() as ends:
            with time_limit(self._end):
                subject = ends.enter_context(group.open(self._model))
            print(f"-- {self._model.name}, {group.name}: up in {time.monotonic() - began:.1f} s", flush=True)
            while left:
                with self._going_on(left[:1], OutOfTime):
                    self._case(subject, left[0])
                del left[0]

    def _case(self, subject: object, case: str) -> None:
        """Note the figures after each run, so that those before a failure stay."""
        began = time.monotonic()
        end = min(self._end, began + MAX_CASE_S)
        runs: dict[str, list[float]] = {}
        measuring = MEASURES[case.partition("_")[0]](subject, self._work, case)
        while True:
            with time_limit(end):
                figures = next(measuring, None)
            if figures is None:
                break
            for name, value in figures.items():
                runs.setdefault(name, []).append(value)
                self._results.add(self._model.name, name, runs[name])
                unit = UNITS[name.partition("_")[0]]
                taken = time.monotonic() - began
                print(f"{self._model.name:9} {name:22} {value:10.6g} {unit:13} {taken:6.1f} s", flush=True)

    @contextlib.contextmanager
    def _going_on(self, left: Sequence[str], *passed_on: type[Exception]) -> Iterator[None]:
        """Say what kept the cases ``left`` from being measured, and go on."""
        try:
            yield
        except passed_on:
            raise
        except Exception as error:
            names = [f"{self._model.name} {case}" for case in left]
            in_time = time.monotonic() < self._end
            if isinstance(error, Skipped) or (isinstance(error, OutOfTime) and not in_time):
                print(f"{', '.join(names)}: skipped, {error}", flush=True)
            else:
                traceback.print_exc()
                self._failed += names


@contextlib.contextmanager
def time_limit(end: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in what runs here when ``end``, of the monotonic clock, has come or comes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime("out of time")

    rest = end - time.monotonic()
    if rest <= 0:
        raise OutOfTime("out of time")
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, rest)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.h200",
        description="Measure the figures of docs/benchmarks.md, section One H200, through engine and worker processes.",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        type=_model,
        default=[Model.named(name) for name in MODELS],
        metavar="MODEL",
        help=f"{' and '.join(MODELS)} (default), another shape that comes with Headrace, or a config.json",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--repeat", type=int, default=2, help="runs of a case, of which the best counts (default: 2)")
    parser.add_argument(
        "--max-seconds", type=float, default=270.0, help="for each model; what comes later is left out (default: 270)"
    )
    parser.add_argument("--out", type=Path, default=table.RESULTS, help="the file of figures (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the file's figures that are not measured now")
    parser.add_argument("--commit", default="", help="what is measured, where git does not know")
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _model(name: str) -> Model:
    try:
        return Model.named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
