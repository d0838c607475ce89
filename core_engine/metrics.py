"""The engine's counters, gauges and histograms under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from core_engine.pressure import Wait
from core_engine.request import Request, Sequence
from shared.messages import FinishReason
from shared.metrics import Registry, Sample

if TYPE_CHECKING:
    from core_engine.replica import Replica

SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
RATIOS = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


class EngineMetrics:
    """Cumulative since the start of the process."""

    def __init__(self, max_model_len: int) -> None:
        registry = self._registry = Registry()
        lengths = _one_two_five(max_model_len)
        self._running = registry.gauge("vllm:num_requests_running")
        self._waiting = registry.gauge("vllm:num_requests_waiting")
        self._waiting_for = registry.gauges("headrace:num_requests_waiting_by_reason", "reason")
        self.waiting_for: Wait | None = None
        """What those that wait wait for, as it was found last."""
        self._usage = registry.gauge("vllm:kv_cache_usage_perc")
        self._cache_config = registry.gauges(
            "vllm:cache_config_info", "block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization"
        )
        self.cache_queries = registry.counter("vllm:prefix_cache_queries")
        self.cache_hits = registry.counter("vllm:prefix_cache_hits")
        self.preemptions = registry.counter("vllm:num_preemptions")
        self.priority_preemptions = registry.counter("headrace:priority_preemptions")
        """Those of ``preemptions`` by which a request of a higher priority got its place."""
        self.prompt_tokens = registry.counter("vllm:prompt_tokens")
        self.cached_prompt_tokens = registry.counter("vllm:prompt_tokens_cached")
        self.generated_tokens = registry.counter("vllm:generation_tokens")
        self._success = registry.counters("vllm:request_success", "finished_reason")
        for reason in FinishReason:
            self._success.labels(reason.name.lower())
        self._rejections = registry.counters("vllm:admission_rejections", "reason")
        for bound in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.labels(bound)
        self._step_tokens = registry.histogram("vllm:iteration_tokens_total", STEP_TOKENS)
        self._prompt = registry.histogram("vllm:request_prompt_tokens", lengths)
        self._generation = registry.histogram("vllm:request_generation_tokens", lengths)
        self._max_tokens = registry.histogram("vllm:request_params_max_tokens", lengths)
        self._choices = registry.histogram("vllm:request_params_n", CHOICES)
        self._num_preemptions = registry.histogram("vllm:request_num_preemptions", PREEMPTIONS)
        self._queue = registry.histogram("vllm:request_queue_time_seconds", SECONDS)
        self._prefill = registry.histogram("vllm:request_prefill_time_seconds", SECONDS)
        self._decode = registry.histogram("vllm:request_decode_time_seconds", SECONDS)
        self._inference = registry.histogram("vllm:request_inference_time_seconds", SECONDS)
        self._compute = registry.counter("headrace:step_compute_seconds")
        self._idle = registry.counter("headrace:step_idle_seconds")
        self.overrun_rows = registry.counter("headrace:overrun_rows")
        """Rows that were computed for sequences which had ended meanwhile."""
        self.chunk_limit = registry.gauge("headrace:prefill_chunk_limit_tokens")
        """Most prefill tokens that the last step with decode rows could take within ``--target-itl-ms``."""
        self._time_ratio = registry.histogram("headrace:step_time_measured_to_predicted_ratio", RATIOS)
        self.epochs = registry.counter("headrace:epochs")
        self.suspects = registry.gauge("headrace:suspects")
        self.convicted = registry.counter("headrace:requests_convicted")
        self.forks = registry.counter("headrace:forks")
        """Choices that began with the prompt that another choice of the request had just computed."""
        self.swaps = registry.counter("headrace:swapped_preemptions")
        """Those of ``preemptions`` whose KV blocks were kept in host memory."""
        self.blocks_to_host = registry.counter("headrace:kv_blocks_to_host")
        self.blocks_to_device = registry.counter("headrace:kv_blocks_to_device")
        self.host_queries = registry.counter("vllm:external_prefix_cache_queries")
        """Tokens that were looked for in host memory, as the device does not cache them."""
        self.host_hits = registry.counter("vllm:external_prefix_cache_hits")
        self.stale_messages = registry.gauge("headrace:stale_messages")
        """Messages of an old epoch that were dropped."""
        self.malformed_messages = registry.gauge("headrace:malformed_messages")

    def scheduled(self, sequence: Sequence, num_loaded: int | None) -> None:
        """A sequence got its first slot. What it finds in the cache after a preemption is no hit.

        Args:
            num_loaded: of its cached tokens, those that came from host memory; None: there is no such cache.
        """
        assert sequence.cached_tokens is not None
        num_on_device = max(sequence.cached_tokens - (num_loaded or 0), 0)
        self.cache_queries.inc(len(sequence.tokens))
        self.cache_hits.inc(num_on_device)
        if num_loaded is not None:
            self.host_queries.inc(len(sequence.tokens) - num_on_device)
            self.host_hits.inc(num_loaded)
        self.prompt_tokens.inc(sequence.prompt_len)
        self.cached_prompt_tokens.inc(sequence.cached_tokens)

    def computed(self, compute_s: float, idle_s: float) -> None:
        """A step took so long on the device, which had nothing to do before it although requests were decoding."""
        self._compute.inc(compute_s)
        self._idle.inc(idle_s)

    def stepped(self, num_tokens: int, num_generated: int, num_discarded: int) -> None:
        """A step was settled: tokens that it computed, tokens that it added to outputs, rows that came to nothing."""
        self._step_tokens.observe(num_tokens)
        self.generated_tokens.inc(num_generated)
        self.overrun_rows.inc(num_discarded)

    def timed(self, predicted_s: float, measured_s: float) -> None:
        """A step whose prefills were cut to a predicted time was settled."""
        if measured_s > 0.0:
            self._time_ratio.observe(measured_s / predicted_s)

    def refused(self) -> None:
        """A request was refused, for whatever reason."""
        self._success.labels("error").inc()

    def queue_full(self, bound: str) -> None:
        """A request was refused by this setting."""
        self._rejections.labels(bound).inc()

    def finished(self, request: Request) -> None:
        """Every choice of a request has ended. Of one that was begun again the last sequence counts."""
        params, sequences = request.params, list({each.choice: each for each in request.sequences}.values())
        reasons = {sequence.finish_reason for sequence in sequences}
        for reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP):
            if reason in reasons:
                self._success.labels(reason.name.lower()).inc()
                break
        self._prompt.observe(len(request.prompt))
        self._generation.observe(sum(sequence.num_generated for sequence in sequences))
        self._choices.observe(params.n)
        self._num_preemptions.observe(sum(sequence.num_preemptions for sequence in sequences))
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._observe_times(request)

    def _observe_times(self, request: Request) -> None:
        scheduled = [s.scheduled_at for s in request.sequences if s.scheduled_at is not None]
        first = [s.first_token_at for s in request.sequences if s.first_token_at is not None]
        ended = [s.ended_at for s in request.sequences if s.ended_at is not None]
        if not scheduled or not ended:
            return
        self._queue.observe(min(scheduled) - request.arrived_at)
        self._inference.observe(max(ended) - min(scheduled))
        if first:
            self._prefill.observe(min(first) - min(scheduled))
            self._decode.observe(max(ended) - min(first))

    def cache_configured(self, **labels: object) -> None:
        """The KV cache of a worker that is ready."""
        values = [str(labels[name]) for name in ("block_size", "num_blocks", "prefix_caching", "memory_utilization")]
        self._cache_config.labels(*values).set(1)

    def samples(self, replicas: SequenceOf[Replica], num_waiting: int) -> list[Sample]:
        """All of them, as a scrape shows them."""
        self._running.set(sum(replica.num_running for replica in replicas))
        self._waiting.set(num_waiting)
        for wait in Wait:
            self._waiting_for.labels(wait.value).set(num_waiting if wait is (self.waiting_for or Wait.STEP) else 0)
        self._usage.set(kv_usage(replicas))
        return self._registry.samples() + [sample for replica in replicas for sample in _samples_of(replica)]


def _samples_of(replica: Replica) -> list[Sample]:
    """Counted since its worker became ready; they are gone with it."""
    values = {
        "headrace:replica_requests_running": replica.num_running,
        "headrace:replica_kv_cache_usage_perc": replica.kv.pool.usage,
        "headrace:replica_kv_blocks_held": replica.kv.pool.num_held,
        "headrace:replica_kv_blocks_logical": sum(map(len, replica.tables())),
        "headrace:replica_leaving": float(replica.leaving),
        "headrace:replica_prefix_cache_queries_total": replica.cache_queries,
        "headrace:replica_prefix_cache_hits_total": replica.cache_hits,
        "headrace:replica_steps_total": replica.num_steps,
        "headrace:replica_compute_seconds_total": replica.compute_s,
    }
    if replica.kv.host is not None:
        pool = replica.kv.host.pool
        values |= {
            "headrace:replica_host_kv_blocks": pool.num_blocks,
            "headrace:replica_host_kv_blocks_held": pool.num_held,
            "headrace:replica_host_kv_blocks_cached": pool.num_kept,
            "headrace:replica_host_kv_blocks_swapped": pool.num_swapped,
        }
    return [(name, {"replica": replica.name}, float(value)) for name, value in values.items()]


def kv_usage(replicas: SequenceOf[Replica]) -> float:
    """Share of all KV blocks that sequences hold, 0 to 1."""
    return sum(replica.kv.pool.usage for replica in replicas) / len(replicas) if replicas else 0.0


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to ``most``."""
    bounds = [float(factor * 10**power) for power in range(10) for factor in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most] or [1.0]
