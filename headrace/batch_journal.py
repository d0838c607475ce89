"""The output files of a batch as its memory: what they hold is done, what they lack is still to do.

Lines are appended whole, each with one ``write``. A process that is killed leaves complete lines and at most one torn
one, which the next run removes; ``sync`` puts them beyond the reach of a power cut as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import stat
import sys
from collections.abc import Iterator

import msgspec

from headrace.batch_format import RESULT_START, Result, decode_result

STANDARD = "-"
"""Standard input or standard output, as a file's name."""


class BatchFileError(Exception):
    """A file that cannot be used; the text says which, why and what to do. Nothing of it was changed."""


class Past:
    """What earlier runs have done."""

    def __init__(self) -> None:
        self.succeeded: set[str] = set()
        """custom_ids."""
        self.failed: set[str] = set()
        """custom_ids that have a result, but no success."""
        self.refused: set[int] = set()
        """Numbers of the input's lines."""

    def has(self, custom_id: str) -> bool:
        """Whether there is a result of it."""
        return custom_id in self.succeeded or custom_id in self.failed

    def add(self, result: Result) -> None:
        """Count a result; a success outweighs failures of the same custom_id."""
        if result.error is not None and result.error.line is not None:
            self.refused.add(result.error.line)
        elif result.custom_id is not None:
            if result.ok:
                self.succeeded.add(result.custom_id)
                self.failed.discard(result.custom_id)
            elif result.custom_id not in self.succeeded:
                self.failed.add(result.custom_id)


class Journal:
    """The output file and, if there is one, the error file, which takes all results but successes.

    Args:
        output: path of the file, which is made or added to; ``-`` or a device: written to, never read.
        errors: likewise; None: the output file takes all results.
        retry_failed: remove failures and refusals of earlier runs first, so that they count as not done.

    Raises:
        BatchFileError: a file cannot be opened, is in use by another run, or holds something else.
    """

    def __init__(self, output: str, errors: str | None, retry_failed: bool) -> None:
        self.past = Past()
        with contextlib.ExitStack() as stack:
            self._output = stack.enter_context(ResultFile(output, self.past, retry_failed))
            self._errors = self._output
            if errors is not None:
                self._errors = stack.enter_context(ResultFile(errors, self.past, retry_failed))
            self._stack = stack.pop_all()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        """Sync and close the files."""
        self._stack.close()

    def add(self, result: Result) -> None:
        """Append a result to the file that takes it. Raises ``OSError``."""
        (self._output if result.ok else self._errors).append(result.encode())

    def sync(self) -> None:
        """Have the disk hold what was added. Blocks; may be called in another thread. Raises ``OSError``."""
        for file in {self._output, self._errors}:
            file.sync()


class ResultFile:
    """One file of results, locked while it is open. See ``Journal``."""

    def __init__(self, name: str, past: Past, retry_failed: bool) -> None:
        self._dirty = False
        path = pathlib.Path(name)
        try:
            self._regular = name != STANDARD and (path.is_file() or not path.exists())
            if name == STANDARD:
                self._fd = os.dup(sys.stdout.fileno())
            elif not self._regular:
                self._fd = os.open(path, os.O_WRONLY)
            else:
                self._fd = _open_locked(path.resolve())
        except OSError as error:
            raise BatchFileError(f"cannot write {name}: {error.strerror}") from error
        if self._regular:
            try:
                self._recall(path.resolve(), past, retry_failed)
            except BaseException:
                os.close(self._fd)
                raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def append(self, line: bytes) -> None:
        """Add a line at the end. Raises ``OSError``; the line may then be torn."""
        self._dirty = True
        _write(self._fd, line)

    def sync(self) -> None:
        """See ``Journal.sync``."""
        if self._regular and self._dirty:
            self._dirty = False
            os.fsync(self._fd)

    def _recall(self, path: pathlib.Path, past: Past, retry_failed: bool) -> None:
        """Count the lines that are there, repair the last one, and drop failures if they are to be retried."""
        failures = False
        for result in self._results(path):
            if result.ok or not retry_failed:
                past.add(result)
            else:
                failures = True
        if failures:
            self._drop_failures(path)

    def _results(self, path: pathlib.Path) -> Iterator[Result]:
        """All results. A torn line at the end is cut off; one that lacks no more than its newline gets it."""
        end, line = 0, b"\n"
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield decode_result(line)
                except msgspec.MsgspecError as error:
                    if not _is_torn(line):
                        raise BatchFileError(
                            f"{path}, line {number} is no result of a batch ({error}); "
                            "move the file away or choose another"
                        ) from error
                    os.ftruncate(self._fd, end)
                    return
                end += len(line)
        if not line.endswith(b"\n"):
            self.append(b"\n")

    def _drop_failures(self, path: pathlib.Path) -> None:
        """Replace the file by one without failures; whenever we are killed, the path names a whole file."""
        new_path = path.with_name(f".{path.name}.new")
        new = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _lock(new)
            os.fchmod(new, stat.S_IMODE(os.fstat(self._fd).st_mode))
            with path.open("rb") as lines:
                for line in lines:
                    if decode_result(line).ok:
                        _write(new, line)
            os.fsync(new)
            new_path.replace(path)
        except BaseException:
            os.close(new)
            new_path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = new
        _sync_folder(path)


def _open_locked(path: pathlib.Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(fd)
            # Another run may have replaced the file between our two calls.
            if os.path.samestat(os.fstat(fd), path.stat()):
                _sync_folder(path)
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise BatchFileError(f"{path} is being written by another headrace run-batch") from error
        except FileNotFoundError:
            pass
        os.close(fd)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # A file system without locks.
        pass


def _is_torn(line: bytes) -> bool:
    """Whether a line can be the beginning of a result. After a power cut, its end may be zeros."""
    start = line.rstrip(b"\0")[: len(RESULT_START)]
    return not line.endswith(b"\n") and RESULT_START.startswith(start)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_folder(path: pathlib.Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
