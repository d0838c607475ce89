"""The process that ``headrace bench startup`` starts again and again: an engine, one request, the end.

Takes one JSON object: ``settings``, ``skip_tokenizer_init`` and ``prompt`` (token ids). Says on standard output when it
reaches a phase, as a JSON object ``{"phase": name}`` a line.
"""

from __future__ import annotations

import json
import sys

from headrace.llm import LLM
from headrace.sampling_params import SamplingParams
from shared.config import Settings
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_OK, watch_parent

PROCESS_UP, READY, FIRST_TOKEN, STOPPED = "process_up", "ready", "first_token", "stopped"


def main(task: str) -> int:
    """Run it; returns an exit code."""
    watch_parent()
    asked = json.loads(task)
    _say(phase=PROCESS_UP)
    try:
        llm = LLM.from_settings(Settings(**asked["settings"]), skip_tokenizer_init=asked["skip_tokenizer_init"])
    except StartupError as error:
        _say(reason=str(error))
        return EXIT_CONFIG
    with llm:
        _say(phase=READY)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, detokenize=False)
        for _ in llm.stream({"prompt_token_ids": asked["prompt"]}, params):
            _say(phase=FIRST_TOKEN)
    _say(phase=STOPPED)
    return EXIT_OK


def _say(**what: str) -> None:
    """In one write, since the processes of the engine write their logs to the same place."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
