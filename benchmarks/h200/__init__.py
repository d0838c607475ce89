"""Every figure of docs/benchmarks.md, section "One H200": ``benchmarks/h200.sh``, or ``python -m benchmarks.h200``."""
