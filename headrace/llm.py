"""``LLM``: a model in processes of one's own, called from Python instead of over HTTP."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from headrace.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from headrace.offline.batch import Batch, Progress
from headrace.offline.errors import InvalidRequest
from headrace.offline.jobs import Job
from headrace.offline.keywords import settings_of
from headrace.offline.metrics import Metric, metrics_of
from headrace.offline.prompts import Prompt, Prompts, chat_prompts, params_list, priorities_list, read_prompts
from headrace.offline.session import Session
from headrace.offline.streams import AsyncStream, SyncStream
from headrace.offline.tokenizer import LLMTokenizer
from headrace.outputs import RequestOutput
from headrace.sampling_params import RequestOutputKind, SamplingParams
from shared.config import Settings
from shared.messages import ModelCard

_WHOLE = ("top_k", "max_tokens", "min_tokens", "n", "seed")


class LLM:
    """A model that answers from Python: real tokenizer, engine and worker processes, no HTTP.

    A script written for vLLM runs after its import is changed to ``from headrace import LLM, SamplingParams``. The
    processes are started here and end with ``close``, at the end of a ``with`` block, when the object is no longer
    referenced, and when this process ends in any way. One that dies is started again, and running requests go on.

    All methods may be called from any thread, also several at once, and also where an event loop runs.

    Args:
        model: ``demo``, a folder with a config.json, a .gguf file, or a model id of the Hugging Face hub.
        skip_tokenizer_init: start no tokenizer; prompts are token ids then, and texts are empty.
        dtype: ``auto``, ``bfloat16``, ``float32``; or a torch dtype.
        max_model_len: longest prompt + output in tokens; None: the model's own.
        swap_space: GiB of host memory for the KV blocks of preempted requests; None: 0.
        target_itl_ms: as the flag; off unless given, since a batch has no reader. None: the server's default.
        keywords: every other field of ``shared.config.Settings`` that is about the model, the scheduler, the worker
            or the log (``log_level`` is ``warning`` here unless given), and vLLM's keywords that have no such field,
            if their value asks for nothing that is not there.

    Raises:
        TypeError: an unknown keyword, with the nearest one that is known.
        ValueError: a value that is out of range or not supported.
        StartupError: the model is not there, or a process cannot start, in its words.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        max_model_len: int | None = None,
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float | None = None,
        enforce_eager: bool = False,
        target_itl_ms: float | None = 0.0,
        **keywords: Any,
    ) -> None:
        keywords |= {
            "model": model,
            "tokenizer": tokenizer,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "swap_space": swap_space,
            "enforce_eager": enforce_eager,
            "target_itl_ms": target_itl_ms,
        }
        self._start(settings_of(keywords), skip_tokenizer_init, seed)

    @classmethod
    def from_settings(cls, settings: Settings, *, skip_tokenizer_init: bool = False) -> LLM:
        """An LLM with these settings; those of the HTTP API have no effect."""
        llm = cls.__new__(cls)
        llm._start(settings, skip_tokenizer_init, settings.seed)
        return llm

    def _start(self, settings: Settings, skip_tokenizer_init: bool, seed: int | None) -> None:
        self._session = Session(settings, with_tokenizer=not skip_tokenizer_init, seed=seed)
        self._finalizer = weakref.finalize(self, self._session.close)

    # -- whole answers -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns when all are done, in their order.

        Args:
            prompts: one prompt or a list of them, any number. A prompt is a text, a list of token ids,
                ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            sampling_params: for all, or one for each; None: ``get_default_sampling_params()``.
            use_tqdm: draw a progress bar on standard error; or a callable that makes one, such as ``tqdm``.
            priority: one for each prompt, lower is earlier.

        Raises:
            ValueError: names the prompt or field that is wrong. What can be checked here is checked before any
                prompt is started. A prompt that turns out too long later does not end the others: the error is raised
                when they are done, and its ``outputs`` holds their outputs.
            RequestFailed: likewise, for a request that the processes could not serve (a ``RuntimeError``).
        """
        _refuse_lora(lora_request)
        return self._run(read_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        lora_request: None = None,
        chat_template: None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them; otherwise as ``generate``.

        Args:
            messages: dicts with ``role`` and ``content``.
            add_generation_prompt: end the prompt where the assistant's turn begins.
            continue_final_message: go on with the last message instead; needs ``add_generation_prompt=False``.
            tools: what the template is told about tools.
            chat_template_kwargs: variables of the template, such as ``enable_thinking``.
        """
        _refuse_lora(lora_request)
        found = chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
        )
        return self._run(found, sampling_params, use_tqdm, None)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most probable answers to prompts with ``params.beam_width`` beams each; errors as ``generate``.

        Args:
            concurrency_limit: prompts that are searched at the same time; None: as many as the engine has room for.
        """
        _refuse_lora(lora_request)
        found = read_prompts(prompts)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequest(f"concurrency_limit must be at least 1, got {concurrency_limit}", "concurrency_limit")
        own = params.sampling_params()
        wire = params.to_shared(own, self.card.vocab_size)
        size = concurrency_limit or max(len(found), 1)
        outputs: list[RequestOutput] = []
        for start in range(0, len(found), size):
            part = enumerate(found[start : start + size])
            jobs = [self._session.job(prompt, own, wire, index=index) for index, prompt in part]
            outputs += Batch(jobs).run(self._session, use_tqdm)
        results = [beam_search_output(output, params) for output in outputs]
        if self._session.with_tokenizer:
            tokenizer = self.get_tokenizer()
            for sequence in [sequence for result in results for sequence in result.sequences]:
                sequence.text = tokenizer.decode(sequence.tokens)
        return results

    # -- answers as they grow ----------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> SyncStream:
        """Complete one prompt and iterate over its growing output.

        Each ``RequestOutput`` holds everything so far (``outputs[0].text``), and in ``outputs[0].delta`` what is new;
        with ``output_kind=RequestOutputKind.DELTA`` only what is new. A slow reader gets fewer, larger steps. The
        request starts now, not at the first ``next``. ``close()``, or the end of the iterator's life, aborts it.

        Raises:
            ValueError: now, for what can be checked here; later, as ``generate``.
        """
        return SyncStream(self, self._session, self._job(read_prompts(prompt), sampling_params, request_id, priority))

    def generate_async(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncStream:
        """``stream`` for ``async for``, in any event loop, which is never blocked; several may run at once.

        Leaving the loop early leaves the request running until the iterator is closed (``aclose``) or collected.
        """
        return AsyncStream(self, self._session, self._job(read_prompts(prompt), sampling_params, request_id, priority))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> SyncStream:
        """``stream`` for one conversation; ``options`` are those of ``chat``."""
        return SyncStream(
            self, self._session, self._job(chat_prompts(messages, **options), sampling_params, request_id, priority)
        )

    def chat_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncStream:
        """``generate_async`` for one conversation; ``options`` are those of ``chat``."""
        return AsyncStream(
            self, self._session, self._job(chat_prompts(messages, **options), sampling_params, request_id, priority)
        )

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End running requests; each ends with an output whose ``finish_reason`` is ``abort``. Unknown ids: nothing."""
        self._session.abort_ids([request_id] if isinstance(request_id, str) else request_id)

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """What the engine serves: digest, ``vocab_size``, ``max_model_len``."""
        return self._session.card

    @property
    def settings(self) -> Settings:
        """What the processes were started with."""
        return self._session.settings

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own (generation_config.json), over vLLM's defaults."""
        params = SamplingParams()
        for name, value in self.card.sampling_defaults:
            setattr(params, name, int(value) if name in _WHOLE else value)
        return params

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer, with ``encode``, ``decode`` and ``apply_chat_template``.

        Raises:
            ValueError: there is none (``skip_tokenizer_init``).
        """
        return LLMTokenizer(self._session)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the model's BOS unless ``add_special_tokens`` is false."""
        return self.get_tokenizer().encode(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.get_tokenizer().decode(token_ids)

    def get_metrics(self) -> list[Metric]:
        """The counters, gauges and histograms of all processes: what ``/metrics`` shows, without HTTP.

        Waits for figures of the engine that are newer than the last token that was received: a second, at most two.
        """
        return metrics_of(self._session)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs and end the processes; returns when they have ended. Calling it again does nothing."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how they are asked ------------------------------------------------------------------------------------------

    def _run(
        self, prompts: Sequence[Prompt], sampling_params: Any, use_tqdm: Progress, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        params = params_list(sampling_params, len(prompts), self.get_default_sampling_params())
        priorities = priorities_list(priority, len(prompts))
        vocab_size = self.card.vocab_size
        wires = {id(each): each.to_shared(vocab_size) for each in {id(each): each for each in params}.values()}
        jobs = [
            self._session.job(prompt, own, wires[id(own)], index=index, priority=urgency)
            for index, (prompt, own, urgency) in enumerate(zip(prompts, params, priorities, strict=True))
        ]
        return Batch(jobs).run(self._session, use_tqdm) if jobs else []

    def _job(
        self, prompts: Sequence[Prompt], params: SamplingParams | None, request_id: str | None, priority: int
    ) -> Job:
        if len(prompts) != 1:
            raise InvalidRequest(f"one prompt is wanted, not {len(prompts)}", "prompt")
        own = params_list(params, 1, self.get_default_sampling_params())[0]
        if own.num_choices > own.n and own.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidRequest("best_of cannot be streamed: which choices are best is known at the end", "best_of")
        urgency = priorities_list([priority], 1)[0]
        wire = own.to_shared(self.card.vocab_size)
        return self._session.job(prompts[0], own, wire, priority=urgency, request_id=request_id)


def _refuse_lora(lora_request: Any) -> None:
    if lora_request is not None:
        raise InvalidRequest("lora_request is not supported", "lora_request")
