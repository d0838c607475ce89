"""``headrace serve``: the processes of one machine, joined by ``ipc`` sockets in a private folder."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import pathlib
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence

from headrace.client import base_url, readiness
from headrace.run_dir import RunDir
from headrace.supervisor import Program, RestartPolicy, Supervisor, python_argv
from shared.config import ENGINE, ENV_PREFIX, GATEWAY, SERVICES, TOKENIZER, WORKER, Settings, parse_settings
from shared.endpoints import ipc_path
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, watch_parent
from shared.logging import get_logger, setup_logging
from shared.model_source import BUILT_IN, ModelSource, resolve_model

LINK_SETTINGS = (
    "tokenizer_endpoint",
    "engine_endpoint",
    "worker_endpoint",
    "listen",
    "listen_workers",
    "curve_dir",
    "name",
)
"""Settings of single services that the launcher chooses itself."""
GRACE_S = {GATEWAY: 10.0, TOKENIZER: 5.0, ENGINE: 5.0, WORKER: 10.0}
"""Time from SIGTERM to SIGKILL; the gateway gets ``shutdown_timeout`` on top, for running requests to finish."""
READY_PROBE_S = 0.1
API_KEY_VARIABLE = ENV_PREFIX + "API_KEY"


def serve(argv: Sequence[str]) -> int:
    """``headrace serve MODEL [flags]``: run until a signal and return an exit code of ``shared.lifecycle``."""
    settings = parse_settings(
        None,
        argv,
        description="Serve a model over the OpenAI API. Each flag is also an environment variable: HEADRACE_<FLAG>.",
        positional_model=True,
    )
    log = setup_logging("headrace", settings.log_level, settings.log_format)
    watch_parent()
    try:
        return Launcher(settings).run()
    except StartupError as error:
        log.error(str(error))
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class Launcher:
    """Starts and supervises the processes that serve ``settings.model``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._log = get_logger()

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP, or until a process cannot be kept running; return the exit code.

        Raises ``StartupError`` before anything is started: a flag that is not the launcher's, a port in use, a model
        that is not there, a run directory that cannot be used.
        """
        _refuse_link_settings(self._settings)
        settings = dataclasses.replace(self._settings, port=claim_port(self._settings.host, self._settings.port))
        self._log.info(f"looking for the model {settings.model}")
        source = resolve_model(settings.model, settings.revision)
        run_dir = RunDir(settings.run_dir)
        try:
            return asyncio.run(self._supervise(settings, programs(settings, source, run_dir), run_dir))
        finally:
            run_dir.close()

    async def _supervise(self, settings: Settings, to_run: Sequence[Program], run_dir: RunDir) -> int:
        supervisor = Supervisor(to_run, RestartPolicy.of(settings), run_dir=run_dir)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup means: not even then.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, supervisor, signum)
        self._log.info(f"starting {', '.join(program.name for program in to_run)}")
        announcement = asyncio.create_task(self._announce(settings))
        try:
            return await supervisor.run()
        finally:
            announcement.cancel()

    def _on_signal(self, supervisor: Supervisor, signum: signal.Signals) -> None:
        if not supervisor.stopping:
            self._log.info(f"stopping ({signum.name}); a second signal stops at once")
        supervisor.stop(signum)

    async def _announce(self, settings: Settings) -> None:
        url, began = base_url(settings.host, settings.port), time.monotonic()
        while not (await asyncio.to_thread(readiness, url)).ready:
            await asyncio.sleep(READY_PROBE_S)
        name = settings.served_model_name[0] if settings.served_model_name else settings.model
        seconds = round(time.monotonic() - began, 1)
        self._log.info(f"ready after {seconds} s: {name} at {url}/v1")


def programs(
    settings: Settings, source: ModelSource, run_dir: RunDir, services: Collection[str] = SERVICES
) -> list[Program]:
    """The processes to run, in the order in which they are stopped.

    Args:
        run_dir: for sockets, ``tokenizer-0``, …, ``engine`` and ``worker``, and for heartbeat files.
        services: those to run.
    """
    keys, ipc = settings.api_key, run_dir.ipc
    tokenizers = [f"tokenizer-{i}" for i in range(settings.tokenizers)]
    settings = dataclasses.replace(
        settings,
        model=_model_argument(source),
        revision=None,
        served_model_name=settings.served_model_name or [source.name],
        tokenizer_endpoint=[ipc(name) for name in tokenizers],
        engine_endpoint=[ipc("engine")],
        worker_endpoint=ipc("worker"),
        listen_workers=ipc("worker"),
        api_key=[],
    )
    # The settings travel as flags; a variable left in the environment would win over a flag that is left out because it
    # has its default value. Keys travel in the environment, because everybody can read a command line.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    secrets = {API_KEY_VARIABLE: ",".join(keys)} if keys else {}
    to_run = [
        (GATEWAY, [settings], environ | secrets),
        (TOKENIZER, [dataclasses.replace(settings, listen=ipc(name)) for name in tokenizers], environ),
        (ENGINE, [dataclasses.replace(settings, listen=ipc("engine"))], environ),
        (WORKER, _workers(settings), environ),
    ]
    found = []
    for service, replicas, variables in to_run:
        for i, own in enumerate(replicas if service in services else ()):
            label = service if len(replicas) == 1 else f"{service}/{i}"
            found.append(_program(service, own, variables, label, run_dir))
    return found


def claim_port(host: str, port: int) -> int:
    """Check that the API can listen on ``port`` of ``host`` (0: choose a free one) and return the port.

    Raises ``StartupError`` when another program has it, or the address is not one of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}") from error
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address[0], port, *address[2:]))
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise StartupError(
                        f"port {port} of {host} is in use by another program; stop it, or choose another with --port"
                    ) from error
                raise StartupError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
            port = probe.getsockname()[1]
    return port


def _refuse_link_settings(settings: Settings) -> None:
    for name in LINK_SETTINGS:
        if getattr(settings, name):
            flag = name.replace("_", "-")
            raise StartupError(
                f"--{flag} (or {ENV_PREFIX}{name.upper()}) is chosen by headrace serve itself; "
                "it is for services that are started one by one"
            )
    for key in settings.api_key:
        if "," in key:
            raise StartupError("an API key may not contain a comma")


def _workers(settings: Settings) -> list[Settings]:
    """One for each replica. Their names outlive their processes: the engine knows at once which of them is back."""
    return [dataclasses.replace(settings, name=f"worker-{i}") for i in range(settings.data_parallel_size)]


def _program(service: str, settings: Settings, environ: Mapping[str, str], label: str, run_dir: RunDir) -> Program:
    grace_s = GRACE_S[service] + (settings.shutdown_timeout if service == GATEWAY else 0.0)
    argv = python_argv(service, *settings.to_argv(service))
    listens = {TOKENIZER: [settings.listen], ENGINE: [settings.listen, settings.listen_workers]}
    sockets = tuple(pathlib.Path(ipc_path(endpoint)) for endpoint in listens.get(service, []) if endpoint)
    return Program(label, argv, environ, grace_s, run_dir.heartbeat(label), sockets)


def _model_argument(source: ModelSource) -> str:
    """The model as the services get it: files on this machine, so that a hub model is looked up once."""
    if source.name == BUILT_IN or source.kind == "folder":
        return BUILT_IN if source.name == BUILT_IN else str(source.path)
    # As given, not resolved: a link into a cache may point to a file without the ending.
    return str(pathlib.Path(source.name).expanduser().absolute())
