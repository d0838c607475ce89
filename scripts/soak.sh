#!/usr/bin/env bash
# Thousands of requests of every kind while processes are killed; fails if an answer is wrong, something is left behind
# or memory grows (docs/testing.md). Uses the .venv of "make test". 20,000 take up to 12 minutes on 2 cores; with fewer,
# caches are still filling while memory is watched.
#
#   scripts/soak.sh [REQUESTS]   default: 20000
#
# WORK=/some/folder   where soak.json and logs go (default: a new folder, kept if the run failed)
# SEED=7              of the requests and faults (default: 0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kept=${WORK:-}
WORK=${WORK:-$(mktemp -d)}
if PYTHONPATH=$PWD .venv/bin/python -m tests.chaos.soak \
    --requests "${1:-20000}" --seed "${SEED:-0}" --work "$WORK" --json "$WORK/soak.json"; then
    [ -n "$kept" ] || rm -rf "$WORK"
else
    echo "logs are in $WORK" >&2
    exit 1
fi
