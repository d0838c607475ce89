#!/usr/bin/env bash
# Kills and stops processes of real deployments at random moments under load, and compares every answer with the
# undisturbed one (docs/testing.md). Uses the .venv of "make test". About 3 s a run on 2 cores.
#
#   scripts/chaos.sh [RUNS] [SEED]   default: 300 runs, seeds 0, 1, …
#
# JOBS=1              deployments at a time (default: one per core)
# WORK=/some/folder   where runs.jsonl, summary.json and logs go; called again with the same one it goes on where it was
#                     (default: a new folder, kept if a run failed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kept=${WORK:-}
WORK=${WORK:-$(mktemp -d)}
if PYTHONPATH=$PWD .venv/bin/python -m tests.chaos.many_runs "${1:-300}" "${2:-0}" --jobs "${JOBS:-$(nproc)}" --work "$WORK"; then
    [ -n "$kept" ] || rm -rf "$WORK"
else
    echo "logs are in $WORK" >&2
    exit 1
fi
