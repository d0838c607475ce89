#!/usr/bin/env bash
# lm-eval (PyPI) asks a Headrace server for the log-likelihoods of 200 items, one by one, again with a warm prefix cache, in
# concurrent batches and as text; its own "hf" model computes the same with transformers. They must agree within 0.01 nats
# and in every accuracy. About 15 minutes on 2 cores, 2 GB of disk; offline once the environment is made.
#
#   scripts/lm_eval_test.sh                    with the .venv of "make test"
#   scripts/lm_eval_test.sh -- --block-size 8  with more flags of "headrace serve"
#
# WORK=/some/folder   where to work (default: a new folder, removed at the end); holds lm-eval's own environment
# PYTHON=python3.12   the interpreter of that environment (default: python3)
# PIP_ARGS=…          further arguments of "pip install", such as another index
# JSON=FILE           where to write scores and differences
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
lm_eval=$WORK/venv/bin/lm-eval
if [ ! -x "$lm_eval" ]; then
    "${PYTHON:-python3}" -m venv "$WORK/venv"
    # shellcheck disable=SC2086
    "$WORK/venv/bin/python" -m pip install -q ${PIP_ARGS:-} 'lm_eval[api]==0.4.13' torch==2.13.0 \
        'transformers>=5.17,<6' gguf accelerate
fi
.venv/bin/python tests/peers/lm_eval_check.py --lm-eval "$lm_eval" --work "$WORK" ${JSON:+--json "$JSON"} "$@"
