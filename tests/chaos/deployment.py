"""A deployment on this machine whose processes may be killed: each is a module of its own, started again when it ends.

``headrace serve`` gives up after a few restarts, as it should; here a process may die hundreds of times, and there are
several of a kind.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shared.config import ENGINE, ENV_PREFIX, GATEWAY, TOKENIZER, WORKER
from shared.lifecycle import PARENT_VARIABLE

ROOT = pathlib.Path(__file__).parents[2]
RESTART_S = 0.1
"""Between the end of a process and its next start, as in ``headrace serve``."""
POLL_S = 0.02
STOP_ORDER = (GATEWAY, WORKER, TOKENIZER, ENGINE)
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "headrace:gateway_requests_active",
)
"""What must be zero when nobody asks for anything."""

Via = Callable[[str, str], str]
"""(service that listens, its endpoint) → the endpoint that others connect to."""


@dataclass(eq=False)
class Service:
    """One process of the deployment, through all its lives."""

    name: str
    """Kind and number: ``api_gateway/0``."""
    argv: list[str]
    log: pathlib.Path
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    killed: set[int] = field(default_factory=set)
    """Process ids that we killed."""
    sessions: set[int] = field(default_factory=set)
    """Session ids of lives that have ended and whose children were not yet seen to be gone."""
    starts: int = 0
    dismissed: bool = False
    """It was told to stop, and is not started again."""

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environ, start_new_session=True
            )
        self.starts += 1


class Deployment:
    """``gateways`` × ``tokenizers`` × one engine × ``workers``, joined by ``ipc`` sockets in a folder of its own.

    Args:
        folder: gets one log per service.
        tokenizers: that the gateways know, whether they run or not.
        waiting: services that do not run before ``begin``.
        flags: of the engine.
        beat_s, lease_s: of all links.
        via: puts something between a listener and those that connect to it.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        model: str,
        *,
        gateways: int = 1,
        tokenizers: int = 1,
        workers: int = 1,
        waiting: Sequence[str] = (),
        flags: Sequence[str] = (),
        beat_s: float = 1.0,
        lease_s: float = 20.0,
        via: Via = lambda service, endpoint: endpoint,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.sockets = pathlib.Path(tempfile.mkdtemp(prefix="headrace-chaos-"))  # short: ipc paths end at 107 bytes
        self.unexpected: list[str] = []
        """Processes that ended though nobody killed them."""
        self._common = [f"--model={model}", f"--beat-s={beat_s}"]
        self._beat_s = beat_s
        self._lease = f"--lease-s={lease_s}"
        self._stopping = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._waiting = set(waiting)
        listening = [self._ipc(f"t{i}") for i in range(tokenizers)]
        engine, worker = self._ipc("e"), self._ipc("w")
        self.ports = [quiet_port() for _ in range(gateways)]
        self.services: dict[str, Service] = {}
        for i, port in enumerate(self.ports):
            seen = [f"--tokenizer-endpoint={via(TOKENIZER, endpoint)}" for endpoint in listening]
            self._add(f"{GATEWAY}/{i}", f"--port={port}", self._lease, *seen)
        for i, endpoint in enumerate(listening):
            seen = [f"--engine-endpoint={via(ENGINE, engine)}"]
            self._add(f"{TOKENIZER}/{i}", f"--listen={endpoint}", self._lease, *seen)
        self._add(f"{ENGINE}/0", f"--listen={engine}", f"--listen-workers={worker}", self._lease, *flags)
        for i in range(workers):
            self._add(f"{WORKER}/{i}", f"--worker-endpoint={via(WORKER, worker)}", "--threads=1")

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.sockets}/{name}"

    def _add(self, name: str, *argv: str) -> None:
        kind = name.partition("/")[0]
        environ = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        environ |= {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": environ.get("PYTHONPATH") or str(ROOT)}
        command = [sys.executable, "-P", "-m", kind, *self._common, f"--name={name.replace('/', '-')}", *argv]
        self.services[name] = Service(name, command, self.folder / f"{name.replace('/', '-')}.log", environ)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self, ready_s: float = 120) -> None:
        for service in self.running():
            service.start()
        self._keeper.start()
        self.wait_ready(ready_s)

    def running(self) -> list[Service]:
        """Services that are meant to run."""
        return [s for s in self.services.values() if s.name not in self._waiting and not s.dismissed]

    def begin(self, name: str) -> None:
        """Start a service that was waiting."""
        with self._lock:
            self.services[name].start()
            self._waiting.discard(name)

    def dismiss(self, name: str) -> None:
        """SIGTERM, once; what ends then is not started again."""
        with self._lock:
            self.services[name].dismissed = True
        self.signal(name, signal.SIGTERM)

    def status(self, name: str, seconds: float) -> int | None:
        """How a service that was dismissed ended; None: it has not, after that time."""
        service = self.services[name]
        assert service.process is not None
        service.sessions.add(service.pid)
        try:
            return service.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> list[str]:
        """End everything in order; what was wrong about it, in words."""
        with self._lock:
            self._stopping = True
        wrong = list(self.unexpected)
        # A worker leaves an engine that lives: it has to be dismissed.
        for service in sorted(self.services.values(), key=lambda service: STOP_ORDER.index(service.kind)):
            process = service.process
            if process is None or (service.dismissed and process.poll() is not None):
                continue
            self.signal(service.name, signal.SIGCONT)
            process.terminate()
            try:
                code: int | None = process.wait(30)
            except subprocess.TimeoutExpired:
                code = None
            # -SIGTERM: it had just been started again, and Python was not there yet.
            if code not in (0, -signal.SIGTERM) and process.pid not in service.killed:
                wrong.append(f"{service.name} ended with {code} after SIGTERM")
            service.sessions.add(process.pid)
        wrong += self.left_behind(5)
        for session in [session for service in self.services.values() for session in service.sessions]:
            for pid in session_members(session):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for service in self.services.values():
            if service.process is not None:
                service.process.wait()
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        shutil.rmtree(self.sockets, ignore_errors=True)
        return wrong

    def _keep(self) -> None:
        while not self._stopping:
            time.sleep(POLL_S)
            for service in self.running():
                if service.process is not None and service.process.poll() is not None:
                    self._start_again(service)
        # A process dies with the thread that started it (PR_SET_PDEATHSIG), so this one outlives those that it started.
        self._over.wait()

    def _start_again(self, service: Service) -> None:
        time.sleep(RESTART_S)
        with self._lock:
            if self._stopping or service.dismissed:
                return
            assert service.process is not None
            if service.pid not in service.killed:
                self.unexpected.append(f"{service.name} ended with {service.process.returncode}")
            service.sessions.add(service.pid)
            service.start()

    # -- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> int:
        """SIGKILL; returns the process id that it hit."""
        service = self.services[name]
        with self._lock:
            pid = service.pid
            service.killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def signal(self, name: str, signum: signal.Signals, pid: int | None = None) -> int:
        """Send a signal to this life of a service (default: the present one); returns its process id."""
        pid = pid or self.services[name].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        return pid

    def names(self, kind: str) -> list[str]:
        return [service.name for service in self.running() if service.kind == kind]

    def busiest(self, kind: str, seconds: float = 0.3) -> str:
        """The process of a kind that used most CPU time during the next moment."""
        names = self.names(kind)
        before = {name: cpu_ticks(self.services[name].pid) for name in names}
        time.sleep(seconds)
        return max(names, key=lambda name: cpu_ticks(self.services[name].pid) - before[name])

    # -- what it says ------------------------------------------------------------------------------------------------

    def gateways(self) -> list[int]:
        """Numbers of those that are meant to run."""
        return [int(name.rpartition("/")[2]) for name in self.names(GATEWAY)]

    def url(self, gateway: int) -> str:
        return f"http://127.0.0.1:{self.ports[gateway]}"

    def get(self, gateway: int, path: str, timeout: float = 5) -> str:
        with urllib.request.urlopen(self.url(gateway) + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def wait_ready(self, seconds: float = 60) -> None:
        """Until every gateway is ready, or a process ended by itself.

        Raises:
            TimeoutError: one is not; names it.
        """
        end = time.monotonic() + seconds
        for gateway in self.gateways():
            while True:
                try:
                    self.get(gateway, "/ready")
                    break
                except OSError as error:
                    if time.monotonic() > end or self.unexpected:
                        words = f"gateway {gateway} is not ready after {seconds:g} s: {error}"
                        raise TimeoutError(f"{words} {self.unexpected}") from error
                    if isinstance(error, urllib.error.HTTPError):
                        error.close()
                    time.sleep(0.05)

    def samples(self, name: str, label: str = "") -> dict[str, float]:
        """Samples of a metric at the first gateway that runs, by the value of a label."""
        found: dict[str, float] = {}
        for line in self.get(self.gateways()[0], "/metrics").splitlines():
            if line.startswith((name + "{", name + " ")):
                key = line.partition(f'{label}="')[2].partition('"')[0] if label else ""
                found[key] = found.get(key, 0.0) + float(line.rpartition(" ")[2])
        return found

    def busy(self, seconds: float) -> str:
        """Wait until all gauges of all gateways stay zero for three beats; what is not after that time, in words."""
        end = time.monotonic() + seconds
        quiet = 0
        while quiet < 4:
            words = self._not_idle()
            quiet = 0 if words else quiet + 1
            if words and time.monotonic() > end:
                return words
            time.sleep(self._beat_s)
        return ""

    def _not_idle(self) -> str:
        words = []
        for gateway in self.gateways():
            try:
                page = self.get(gateway, "/metrics").splitlines()
            except OSError as error:
                return f"metrics of gateway {gateway} cannot be read: {error}"
            for name in GAUGES:
                lines = [line for line in page if line.startswith((name + "{", name + " "))]
                words += [line for line in lines if float(line.rpartition(" ")[2])]
                if not lines:
                    # Just started: it has not heard of the engine yet.
                    words.append(f"gateway {gateway} does not know {name}")
        return ", ".join(words)

    def descriptors(self) -> dict[str, int]:
        """Open file descriptors of each service."""
        return {service.name: len(open_files(service.pid)) for service in self.running()}

    def leaked(self, baseline: dict[str, int], seconds: float) -> str:
        """Wait until no service has more file descriptors than in ``baseline``; which have, in words."""

        def more() -> str:
            now = self.descriptors()
            return ", ".join(f"{name}: {now[name]} > {baseline[name]}" for name in now if now[name] > baseline[name])

        return until_empty(more, seconds)

    def left_behind(self, seconds: float) -> list[str]:
        """Wait until all children of processes that have ended are gone; those that are not."""

        def remaining() -> str:
            words = []
            for service in self.services.values():
                for session in list(service.sessions):
                    members = session_members(session)
                    words += [f"{service.name}: {command_of(pid)}" for pid in members]
                    if not members:
                        service.sessions.discard(session)
            return ", ".join(words)

        words = until_empty(remaining, seconds)
        return [f"processes are left behind: {words}"] if words else []


@contextlib.contextmanager
def deployed(deployment: Deployment) -> Iterator[Deployment]:
    """Start it, and stop it at the end, which must go in order."""
    try:
        deployment.start()
        yield deployment
    except BaseException:
        deployment.stop()
        raise
    if wrong := deployment.stop():
        raise AssertionError(f"the deployment did not stop in order: {wrong}")


def until_empty(words: Callable[[], str], seconds: float) -> str:
    """Ask until the answer is empty; the last answer after that time."""
    end = time.monotonic() + seconds
    while (found := words()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def quiet_port() -> int:
    """A free port that the system gives to no connection by itself, or it might be taken while its gateway restarts."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(first // 2, 1024), first) or range(1024, 1 << 16)
    while True:
        port = random.choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def cpu_ticks(pid: int) -> int:
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return str(pid)


def session_members(session: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found
