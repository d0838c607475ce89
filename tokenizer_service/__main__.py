"""``python -m tokenizer_service``"""

from __future__ import annotations

import asyncio
import os

import uvloop

from shared.config import TOKENIZER, Settings
from shared.lifecycle import run_service


def main(settings: Settings) -> None:
    # Texts are encoded one by one in threads of our own; a second pool inside the library would only fight with them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizer_service.service import serve

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


if __name__ == "__main__":
    run_service(TOKENIZER, main, "Turns text into token ids and token ids into text.")
