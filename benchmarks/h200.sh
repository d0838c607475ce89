#!/usr/bin/env bash
# Every figure of docs/benchmarks.md, section "One H200": measured through the real processes, written to
# benchmarks/results/h200.json, and the table in the page made anew. Arguments are those of "python -m benchmarks.h200".
#
# PYTHON=…   an interpreter that has Headrace's dependencies (default: that of .venv, else python3)
# COMMIT=…   what is measured, where there is no git
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then found=.venv/bin/python; else found=python3; fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-$found}" -m benchmarks.h200 --commit "${COMMIT:-}" "$@"
