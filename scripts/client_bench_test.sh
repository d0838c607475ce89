#!/usr/bin/env bash
# "vllm bench serve" of the vLLM package (PyPI), unchanged, and "headrace bench serve" measure the same server in turn;
# their figures must agree within 5 %. About 5 minutes on 2 cores that nothing else uses, 4 GB of disk (the package is
# 340 MB to download); offline once the environment is made.
#
#   scripts/client_bench_test.sh                          with the .venv of "make test"
#   scripts/client_bench_test.sh --rounds 5               more rounds; --help tells the other flags
#   scripts/client_bench_test.sh -- --max-num-seqs 4      with more flags of "headrace serve"
#
# WORK=/some/folder   where to work (default: a new folder, removed at the end); holds vLLM's environment
# PYTHON=python3.12   the interpreter of that environment (default: python3)
# PIP_ARGS=…          further arguments of "pip install", such as another index
# JSON=FILE           where to write the results of all rounds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
vllm=$WORK/vllm/bin/vllm
if [ ! -e "$WORK/vllm/.complete" ]; then
    "${PYTHON:-python3}" -m venv "$WORK/vllm"
    # The client alone: without vLLM's kernels and their many gigabytes, but with what its command line imports.
    # shellcheck disable=SC2086
    "$WORK/vllm/bin/python" -m pip install -q ${PIP_ARGS:-} torch==2.13.0 'transformers>=5.16.1,<5.21' \
        aiohttp blake3 cachetools cbor2 cloudpickle einops 'fastapi>=0.133,<0.137' 'llguidance>=1.7,<1.8' msgspec openai \
        orjson oss-harmony pandas partial-json-parser pillow prometheus_client protobuf psutil py-cpuinfo pybase64 \
        pydantic pyyaml pyzmq regex requests setproctitle tqdm uvicorn uvloop watchfiles xgrammar==0.2.8
    # shellcheck disable=SC2086
    "$WORK/vllm/bin/python" -m pip install -q ${PIP_ARGS:-} --no-deps vllm==0.33.0
    touch "$WORK/vllm/.complete"
fi
.venv/bin/python tests/peers/client_bench.py --vllm "$vllm" --work "$WORK" ${JSON:+--json "$JSON"} "$@"
