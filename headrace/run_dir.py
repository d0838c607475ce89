"""The private folder that holds the sockets and heartbeat files of one launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import tempfile

from shared.endpoints import MAX_IPC_PATH
from shared.errors import StartupError

PREFIX = "headrace-"
LOCK = "lock"


class RunDir:
    """A folder of mode 0700 that this process alone uses: a lock in it is held until ``close`` or the process ends.

    ``path`` None: a new folder under ``XDG_RUNTIME_DIR`` (else the temporary folder), removed by ``close``; folders
    that launchers left there when they were killed are removed on the way. A folder that the user named is kept, and
    only what was made in it is removed. Raises ``StartupError`` when the folder is not private, not ours, in use, or
    its path is too long for a socket.
    """

    def __init__(self, path: str | None = None) -> None:
        self._remove = path is None
        if path is None:
            root = _root()
            _remove_abandoned(root)
            self.path, self._lock_fd = _new_folder(root)
            return
        self.path = pathlib.Path(path).absolute()
        _make_private(self.path)
        lock = _lock(self.path)
        if lock is None:
            raise StartupError(f"--run-dir {self.path} is in use by another headrace serve; give another folder")
        self._lock_fd = lock

    def ipc(self, name: str) -> str:
        """The endpoint ``ipc://<folder>/<name>.sock``."""
        path = self.path / f"{name}.sock"
        length = len(os.fsencode(path))
        if length > MAX_IPC_PATH:
            raise StartupError(
                f"the socket path {path} has {length} bytes, and the system allows {MAX_IPC_PATH}; "
                "give a shorter folder with --run-dir"
            )
        return f"ipc://{path}"

    def heartbeat(self, name: str) -> pathlib.Path:
        """The heartbeat file of a process."""
        return self.path / f"{name.replace('/', '-')}.heartbeat"

    def restore(self) -> bool:
        """Make the folder and its lock again if somebody has removed them; whether that was so.

        Raises:
            StartupError: it cannot be made, or by now it is somebody else's.
        """
        if _is_there(self.path, self._lock_fd):
            return False
        _make_private(self.path)
        try:
            lock = _lock(self.path)
        except OSError as error:
            raise StartupError(f"--run-dir {self.path}: {error.strerror}") from error
        if lock is None:
            raise StartupError(f"--run-dir {self.path} was removed, and another headrace serve uses it now")
        os.close(self._lock_fd)
        self._lock_fd = lock
        return True

    def close(self) -> None:
        """Remove the sockets and the heartbeat files, and the folder if it was made here."""
        if self._remove:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for leftover in [*self.path.glob("*.sock"), *self.path.glob("*.heartbeat"), self.path / LOCK]:
                leftover.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _root() -> pathlib.Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # Room for "/headrace-xxxxxxxx/tokenizer-99.sock".
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and len(os.fsencode(runtime)) < MAX_IPC_PATH - 40:
        return pathlib.Path(runtime)
    temporary = tempfile.gettempdir()
    return pathlib.Path(temporary if len(os.fsencode(temporary)) < MAX_IPC_PATH - 40 else "/tmp")


def _make_private(path: pathlib.Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--run-dir {path}: {error.strerror}") from error
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartupError(
            f"--run-dir {path} must belong to you and be closed to others, because whoever opens its sockets can use "
            f"the engine: chmod 700 {path}"
        )


def _lock(path: pathlib.Path) -> int | None:
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_there(path: pathlib.Path, lock: int) -> bool:
    """Whether the lock file of a folder is the one that is held."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path / LOCK), os.fstat(lock))
    return False


def _new_folder(root: pathlib.Path) -> tuple[pathlib.Path, int]:
    """A folder and its lock. One that another launcher found unlocked, and took for abandoned, is given up."""
    while True:
        path = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        lock = _lock(path)
        if lock is None:
            continue
        if _is_there(path, lock):
            return path, lock
        os.close(lock)


def _remove_abandoned(root: pathlib.Path) -> None:
    for folder in root.glob(PREFIX + "*"):
        # No lock file: another launcher may be making the folder just now. Or the folder is another user's.
        if not os.path.exists(folder / LOCK):
            continue
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
