"""The JSON file of a run, with vLLM's keys."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.metrics import RequestRecord
from shared.errors import StartupError


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The keys of ``--save-detailed``, a list over all requests each; times in s, ``start_times`` since the first."""
    began = min((record.sent for record in records), default=0.0)
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record.error else record.output_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "latencies": [record.e2el_s for record in records],
        "start_times": [record.sent - began for record in records],
        "queue_times": [record.queued_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def save_result(
    args: argparse.Namespace, model_id: str, tokenizer_id: str, num_prompts: int, result: Mapping[str, Any]
) -> None:
    """Write ``result`` and the run's circumstances to the file that the flags name, and say where it is.

    Raises ``StartupError`` when it cannot be written.
    """
    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    whole = {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id,
        "num_prompts": num_prompts,
        **args.metadata,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **result,
    }
    path = os.path.join(args.result_dir or "", args.result_filename or _file_name(args, model_id, date))
    try:
        if folder := os.path.dirname(path):
            os.makedirs(folder, exist_ok=True)
        with open(path, "a" if args.append_result else "w", encoding="utf-8") as file:
            if file.tell():
                file.write("\n")
            json.dump(whole, file)
    except OSError as error:
        raise StartupError(f"the result cannot be written to {path}: {error}") from error
    print(f"The result is in {path}", file=sys.stderr)


def _file_name(args: argparse.Namespace, model_id: str, date: str) -> str:
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    base = model_id.rstrip("/").split("/")[-1]
    return f"{args.label or args.backend}-{args.request_rate}qps{limit}-{base}-{date}.json"
