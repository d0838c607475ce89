#!/usr/bin/env bash
# The tests that take minutes: thousands of runs of the recovery protocol under faults, and token ids against llama.cpp.
# They use the .venv of "make test", and install llama.cpp's Python package into it for the comparison.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make venv
.venv/bin/python -m pip install --quiet -c constraints.txt 'xllamacpp==2026.10.11549' ${PIP_ARGS:-}
exec .venv/bin/python -m pytest -m slow --timeout 3600 "$@"
