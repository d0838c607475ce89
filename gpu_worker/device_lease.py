"""One GPU for one worker: workers that see the same GPUs, in containers too, never share one.

A lease is a lock (``flock``) on a file named by the GPU's UUID in a folder that all of them see. The kernel gives it
back when the process ends, however it ends. Imports no torch: CUDA may be opened only when the GPU is chosen.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from gpu_worker.nvml import installed_gpus
from shared.config import Settings
from shared.errors import StartupError
from shared.links import process_name
from shared.logging import get_logger

VISIBLE = "CUDA_VISIBLE_DEVICES"
NUMBERED = re.compile(r"cuda:(\d+)")
OWNER_BYTES = 100

log = get_logger()


class DeviceLease:
    """The right to use the first of ``uuids`` that nobody else has; without ``uuids`` there is nothing to wait for.

    Args:
        device: what to compute with once the lease is held: ``auto``, ``cpu`` or ``cuda``.
        uuids: GPUs to choose from, in the order of preference.
        folder: where the locks are; made when it is missing. None: a private one of this user, below /tmp.
        owner: is written into the lock, for others to say who holds it.
        environ: gets CUDA_VISIBLE_DEVICES, with the GPU alone: it is then the current device of every thread.
    """

    def __init__(
        self,
        device: str,
        uuids: Sequence[str] = (),
        *,
        folder: str | None = None,
        owner: str = "",
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        self.device = device
        self.uuid: str | None = None
        """Of the GPU that is held."""
        self._uuids, self._owner, self._environ = uuids, owner, environ
        self._folder = _usable_folder(folder) if uuids else Path()
        self._lock: int | None = None
        self._holders: dict[str, str] = {}
        """Who has each GPU; replaced as a whole, since other threads read it."""

    @property
    def held(self) -> bool:
        """Whether the device may be used."""
        return not self._uuids or self._lock is not None

    @property
    def status(self) -> str:
        """What is waited for, in words."""
        holders = ", ".join(f"{uuid} is held by {owner or 'another worker'}" for uuid, owner in self._holders.items())
        return f"waiting for a free GPU: {holders}"

    def take(self) -> bool:
        """Take a GPU if one is free and none is held yet; whether the device may be used. Does not wait.

        Raises:
            StartupError: a lock cannot be opened.
        """
        if self.held:
            return True
        holders: dict[str, str] = {}
        for uuid in self._uuids:
            lock = self._open(uuid)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holders[uuid] = _readable(os.pread(lock, OWNER_BYTES, 0))
                os.close(lock)
                continue
            os.ftruncate(lock, 0)
            os.pwrite(lock, self._owner.encode()[:OWNER_BYTES], 0)
            self._lock, self.uuid = lock, uuid
            self._environ[VISIBLE] = uuid
            log.info("leased a GPU", uuid=uuid, of=len(self._uuids))
            return True
        self._holders = holders
        return False

    def give_back(self) -> None:
        """Let another worker have the GPU, which this process does not use after all."""
        if self._lock is not None:
            os.close(self._lock)
        self._uuids, self._lock, self.uuid = (), None, None

    def _open(self, uuid: str) -> int:
        path = self._folder / uuid.replace("/", "_")
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
        except OSError as error:
            raise StartupError(f"--device-lease-dir: the lock {path} cannot be opened: {error.strerror}") from error


def device_lease(
    settings: Settings,
    *,
    installed: Callable[[], Sequence[str]] = installed_gpus,
    environ: MutableMapping[str, str] = os.environ,
) -> DeviceLease:
    """What a worker with these settings has to take before it opens a GPU; nothing to wait for where it needs none.

    ``--device cuda:N`` stands for the GPU of that number among the visible ones, counted as nvidia-smi does. A machine
    whose driver cannot list its GPUs is used without a lease.

    Raises:
        StartupError: there is no GPU of that number, or the folder cannot be used.
    """
    device, numbered = settings.device, NUMBERED.fullmatch(settings.device)
    if not (device == "cuda" or numbered or (device == "auto" and importlib.util.find_spec("triton"))):
        return DeviceLease(device)
    gpus = installed()
    uuids = visible_gpus(gpus, environ)
    if numbered:
        device, number = "cuda", int(numbered[1])
        if not gpus:
            environ[VISIBLE] = _nth(environ.get(VISIBLE), number)
        elif number >= len(uuids):
            raise StartupError(f"--device {settings.device}: there are {len(uuids)} visible GPUs, counted from 0")
        uuids = uuids[number : number + 1]
    return DeviceLease(device, uuids, folder=settings.device_lease_dir, owner=process_name(settings), environ=environ)


def visible_gpus(installed: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Those of ``installed`` that CUDA_VISIBLE_DEVICES leaves, in its order: numbers, or UUIDs that may be abbreviated.

    As CUDA reads it, the list ends before the first entry that stands for no GPU. Numbers are those of nvidia-smi.
    """
    chosen = environ.get(VISIBLE)
    if chosen is None or not installed:
        return list(installed)
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdecimal():
            found = installed[int(entry)] if int(entry) < len(installed) else None
        else:
            found = next((uuid for uuid in installed if entry and uuid.startswith(entry)), None)
            if found is None and entry.startswith("MIG-"):
                found = entry
        if found is None or found in visible:
            break
        visible.append(found)
    return visible


def _nth(visible: str | None, number: int) -> str:
    """Entry ``number`` of CUDA_VISIBLE_DEVICES, which without it are the numbers themselves."""
    if visible is None:
        return str(number)
    entries = visible.split(",")
    return entries[number] if number < len(entries) else ""


def _usable_folder(given: str | None) -> Path:
    """The folder of locks; one that nobody chose must be this user's alone, since anybody may make names in /tmp."""
    path = Path(given) if given else Path(f"/tmp/headrace-leases-{os.geteuid()}")
    try:
        path.mkdir(mode=0o777 if given else 0o700, parents=True, exist_ok=True)
        found = path.stat() if given else path.lstat()
    except OSError as error:
        raise StartupError(f"--device-lease-dir {path}: {error.strerror}") from error
    private = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    if not given and not private:
        raise StartupError(f"{path} is not a folder that only this user writes to; give another: --device-lease-dir")
    return path


def _readable(owner: bytes) -> str:
    return "".join(character for character in owner.decode("ascii", "ignore") if character.isprintable())
