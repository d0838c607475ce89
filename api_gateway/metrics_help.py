"""What each metric means, in the words of the metrics page. Counters are named without ``_total``."""

from __future__ import annotations

HELP = {
    "headrace:gateway_rejections": "Requests refused with 429 because the gateway was full.",
    "headrace:gateway_requests_active": "Requests for text that the gateway is serving.",
    "http_request_duration_seconds": "Time until an answer had gone, by route.",
    "http_requests": "HTTP requests by route, method and status; 499: the client hung up.",
    "vllm:e2e_request_latency_seconds": "Time from a request's arrival to its last token.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:gpu_cache_usage_perc": "Older name of vllm:kv_cache_usage_perc.",
    "vllm:inter_token_latency_seconds": "Time between two tokens of a choice.",
    "vllm:iteration_tokens_total": "Tokens in one step.",
    "vllm:kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
    "vllm:num_preemptions": "Preemptions.",
    "vllm:num_requests_running": "Requests in the running batch.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prompt_tokens_cached": "Prompt tokens that were not computed because they were cached.",
    "vllm:prompt_tokens": "Prompt tokens.",
    "vllm:request_decode_time_seconds": "Time a request spent in decode.",
    "vllm:request_generation_tokens": "Generated tokens of a request.",
    "vllm:request_inference_time_seconds": "Time a request spent running.",
    "vllm:request_prefill_time_seconds": "Time a request spent in prefill.",
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_queue_time_seconds": "Time a request waited to be scheduled.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:request_time_per_output_token_seconds": "Mean time per output token of a request after the first.",
    "vllm:time_to_first_token_seconds": "Time from a request's arrival to its first token.",
}
