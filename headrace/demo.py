"""``python -m headrace.demo``: serve the built-in model, ask one question over HTTP, print the answer and figures."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Sequence

from headrace.client import RequestFailed, stream_chat
from headrace.local_server import ServerFailed, local_server
from headrace.prompting import print_answer
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK
from shared.model_source import BUILT_IN

QUESTION = "Name the capital of France."
"""Asked like this the built-in model is sure of each token; one that it is not sure of differs between processors."""
MAX_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; arguments are passed on to ``headrace serve demo``. Returns an exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    say = functools.partial(print, flush=True)
    say("Starting the four processes of Headrace with the built-in model …")
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": MAX_TOKENS}
    try:
        with local_server(BUILT_IN, say, args) as url:
            say(f"\n> {QUESTION}")
            say(f"\n{print_answer(stream_chat(url, body))}")
    except StartupError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return error.code
    except RequestFailed as error:
        print(f"the question got no answer: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
