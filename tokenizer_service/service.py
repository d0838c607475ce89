"""The process: sockets, Hello, beats; requests themselves are the work of ``Requests``.

    gateways ──► Listener ──► Relay ──► Engines ──► engines
             ◄── text delta ◄── Requests.grew ◄── token delta

Everything runs on one event loop; only texts are encoded in threads, and chats rendered in a process of their own.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable

from shared.config import Settings
from shared.errors import StartupError
from shared.heartbeat import Heartbeat
from shared.hop import Relay, RunningClock, Timers
from shared.lifecycle import install_signal_handlers
from shared.links import DEFAULT_ENGINE_ENDPOINT, DEFAULT_TOKENIZER_ENDPOINT, curve_keys_of, process_name
from shared.logging import get_logger
from shared.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION, Hello, Load, Message, ModelCard, PrefixCacheReset
from shared.transport import Connector, Listener, Pump, Received, new_boot
from tokenizer_service.calls import Calls
from tokenizer_service.encoder import Encoder
from tokenizer_service.engine_calls import EngineCalls
from tokenizer_service.engines import REFRESH_S, Engines, protocol_refusal
from tokenizer_service.generation_config import SamplingDefaults
from tokenizer_service.model import Model, load_model
from tokenizer_service.requests import Requests
from tokenizer_service.template_runner import TemplateRunner

TICK_S = 0.1
MOST_EARLY = 1000
"""Messages of gateways that are kept until the model is loaded; what is dropped of more comes again with the beats."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Core:
    """What there is once the model is loaded."""

    card: ModelCard
    encoder: Encoder
    requests: Requests
    relay: Relay
    calls: Calls
    engine_calls: EngineCalls
    engines: Engines


class TokenizerService:
    """One tokenizer process: binds at once, loads its model in ``run``, and returns from it after ``stop``.

    Raises:
        StartupError: the endpoint cannot be bound.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = process_name(settings)
        self._boot = new_boot()
        self._curve = curve_keys_of(settings)
        self._listener = Listener(settings.listen or DEFAULT_TOKENIZER_ENDPOINT, boot=self._boot, curve=self._curve)
        self._pump = Pump(self._listener, self._on_gateway)
        self._gateways: dict[str, float] = {}
        """Peer: when it last said Hello."""
        self._clock = RunningClock(time.monotonic)
        self._timers = Timers(settings.beat_s, max(settings.lease_s, settings.resume_window))
        self._stopping = asyncio.Event()
        self._flushing = False
        self._checked = False
        """Whether the chat templates can be used. Requests that live on need none, and do not wait for that."""
        self._was_ready = False
        self._log = get_logger()
        self._templates: TemplateRunner | None = None
        self._core: _Core | None = None
        self._early: collections.deque[Received] = collections.deque(maxlen=MOST_EARLY)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return self._listener.endpoint

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            StartupError: the model cannot be loaded, or ``--chat-template`` is broken.
        """
        self._pump.start()
        work = [self._tick_forever(), self._load_and_follow_engines(), self._stopping.wait()]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    # -- starting and ending -----------------------------------------------------------------------------------------

    async def _load_and_follow_engines(self) -> None:
        self._log.info("loading the tokenizer", model=self._settings.model)
        model = await asyncio.get_running_loop().run_in_executor(None, load_model, self._settings)
        templates = TemplateRunner(model.vocabulary.chat_templates, model.vocabulary.special_tokens)
        self._templates = templates
        self._core = self._assemble(model, templates)
        self._log.info("tokenizer loaded", endpoint=self.endpoint, vocabulary=model.card.vocab_size)
        self._announce_defaults(model.sampling_defaults)
        while self._early:
            self._on_gateway(self._early.popleft())
        await self._core.engines.refresh()
        await self._check_templates(templates)
        self._checked = True
        while True:
            self._announce()
            await asyncio.sleep(REFRESH_S)
            await self._core.engines.refresh()

    async def _check_templates(self, templates: TemplateRunner) -> None:
        for name, words in (await templates.start()).items():
            if self._settings.chat_template is not None:
                raise StartupError(f"--chat-template {self._settings.chat_template} is broken: {words}")
            self._log.warning(
                "the model's chat template is broken; chats will be refused: give one with --chat-template",
                template=name,
                reason=words,
            )

    def _announce_defaults(self, defaults: SamplingDefaults) -> None:
        if defaults.values:
            self._log.info(
                "default sampling parameters from generation_config: requests that leave these out get them; "
                "--generation-config vllm switches that off",
                origin=defaults.origin,
                **defaults.values,
            )

    def _assemble(self, model: Model, templates: TemplateRunner) -> _Core:
        card = model.card
        max_tokens = model.sampling_defaults.values.get("max_tokens")
        encoder = Encoder(
            model.vocabulary,
            templates,
            texts=model.logprob_text.texts,
            max_model_len=card.max_model_len,
            default_max_tokens=None if max_tokens is None else int(max_tokens),
        )
        requests = Requests(encoder, model.detokenizer, model.logprob_text, model.eos_ids)
        engines = Engines(
            self._settings.engine_endpoint or [DEFAULT_ENGINE_ENDPOINT],
            card,
            self._connect,
            self._on_engine,
            self._on_engine_connection,
            self._on_engines_changed,
            self._clock,
            self._timers,
        )
        relay = requests.relay = Relay(
            send_up=self._listener.send,
            send_down=engines.send,
            clock=self._clock,
            timers=self._timers,
            events=requests,
        )
        calls = Calls(encoder, model.detokenizer, self._listener.send)
        engine_calls = EngineCalls(self._listener.send, engines.send, lambda: engines.names)
        return _Core(card, encoder, requests, relay, calls, engine_calls, engines)

    def _connect(self, endpoint: str, on_connection: Callable[[bool], None]) -> Connector:
        identity = f"tokenizer/{self._name}/{self._boot:016x}"
        return Connector(endpoint, identity=identity, boot=self._boot, curve=self._curve, on_connection=on_connection)

    async def _close(self) -> None:
        self._pump.stop()
        self._listener.close()
        if self._core is not None:
            self._core.engines.close()
            self._core.encoder.close()
        if self._templates is not None:
            await self._templates.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _on_gateway(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Hello):
            self._gateways[received.peer] = self._clock()
            self._listener.send(received.peer, self._hello(protocol_refusal(message)))
        elif self._core is None:
            self._early.append(received)
        elif self._core.relay.receive_from_gateway(received.peer, received.boot, message):
            self._flush_soon()
        elif not any(calls.receive(received.peer, message) for calls in (self._core.calls, self._core.engine_calls)):
            self._log.warning("unexpected message", peer=received.peer, kind=type(message).__name__)

    def _on_engine(self, received: Received) -> None:
        assert self._core is not None
        message = received.message
        if self._core.relay.receive_from_engine(received.peer, received.boot, message):
            self._flush_soon()
        elif isinstance(message, Hello):
            self._core.engines.heard(received.peer, message)
        elif isinstance(message, Load):
            self._send_to_gateways(message)
        elif isinstance(message, PrefixCacheReset):
            self._core.engine_calls.on_answer(received.peer, message)

    def _on_engine_connection(self, name: str, connected: bool) -> None:
        assert self._core is not None
        if connected:
            self._core.engines.greet(self._hello)
            self._core.relay.parent.reached(name)
        else:
            self._core.relay.parent.lost(name)
        self._flush_soon()

    def _on_engines_changed(self) -> None:
        assert self._core is not None
        engines, parent = self._core.engines, self._core.relay.parent
        parent.set_children(engines.names)
        for name in engines.names:
            parent.set_usable(name, engines.is_usable(name))
        self._announce()
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Once for all messages that are there now: so each peer gets one delta for a step."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._core is not None:
            self._core.relay.flush()

    # -- time --------------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        heartbeat = Heartbeat()
        next_beat = 0.0
        while True:
            now, core = self._clock(), self._core
            heartbeat.beat()
            if core is not None:
                core.relay.tick()
                core.relay.flush()
                core.engines.greet(self._hello, only_new=now < next_beat)
            if now >= next_beat:
                next_beat = now + self._settings.beat_s
                self._beat(now)
            await asyncio.sleep(min(TICK_S, self._settings.beat_s / 5))

    def _beat(self, now: float) -> None:
        self._gateways = {peer: at for peer, at in self._gateways.items() if now - at < self._settings.lease_s}
        if self._core is not None:
            if self._was_ready != self._is_ready:
                self._on_engines_changed()
            self._send_to_gateways(self._load_message(self._core))

    @property
    def _is_ready(self) -> bool:
        return self._core is not None and self._checked and self._core.engines.ready

    def _announce(self) -> None:
        """Tell the gateways at once when readiness changes."""
        ready = self._is_ready
        if ready != self._was_ready:
            self._was_ready = ready
            self._log.info("ready" if ready else "not ready: no engine is")
            self._send_to_gateways(self._hello(None))

    def _send_to_gateways(self, message: Message) -> None:
        for peer in self._gateways:
            self._listener.send(peer, message)

    def _hello(self, refusal: str | None) -> Hello:
        core = self._core
        return Hello(
            role="tokenizer",
            name=self._name,
            oldest_protocol=OLDEST_PROTOCOL,
            protocol=PROTOCOL_VERSION,
            ready=self._is_ready,
            card=None if core is None else core.card,
            refusal=refusal,
            status=self._status,
        )

    @property
    def _status(self) -> str:
        """In words, while it is not ready."""
        if self._is_ready:
            return ""
        if self._core is None:
            return "loading the tokenizer"
        return "compiling the chat templates" if self._core.engines.ready else self._core.engines.status

    def _load_message(self, core: _Core) -> Load:
        counts = core.requests.counts
        metrics: dict[str, float] = {
            "headrace:tokenizer_requests_total": counts.requests,
            "headrace:tokenizer_refused_total": counts.refused,
            "headrace:tokenizer_prompt_tokens_total": counts.prompt_tokens,
            "headrace:tokenizer_output_tokens_total": counts.output_tokens,
            "headrace:tokenizer_malformed_messages_total": self._listener.malformed,
        }
        return Load(
            source=f"tokenizer/{self._name}",
            boot=self._boot,
            running=len(core.relay.parent.requests),
            waiting=core.requests.encoding,
            kv_usage=0.0,
            metrics=[(name, {}, float(value)) for name, value in metrics.items()],
        )


async def serve(settings: Settings) -> None:
    """Run a tokenizer until SIGTERM or SIGINT."""
    service = TokenizerService(settings)
    install_signal_handlers(service.stop, asyncio.get_running_loop())
    await service.run()
