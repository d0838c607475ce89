"""Run by test_hopper_prefill.py without the interpreter: the kernel compiled for a GPU that is not there.

Arguments: head_dim, block_size, and 1 if contexts may be in pieces. Prints what the program is made of as JSON.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from gpu_worker.kernels.hopper_prefill import LAYOUT, REGISTERS, STAGES, _hopper_prefill_kernel

KV_HEADS, GROUP = 8, 4

head_dim, block_size, has_pieces = map(int, sys.argv[1:])
constants = {
    "KV_HEADS": KV_HEADS,
    "GROUP": GROUP,
    "HEAD_DIM": head_dim,
    "BLOCK_SIZE": block_size,
    "STAGES": STAGES[head_dim],
    "HAS_PIECES": bool(has_pieces),
}
types = {
    "query_ptr": "*bf16",
    "panels": f"tensordesc<bf16[{block_size}, 64],{LAYOUT.value!r}>",
    "output_ptr": "*bf16",
    "items_ptr": "*i32",
    "block_tables_ptr": "*i32",
    "values_ptr": "*fp32",
    "statistics_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "scale": "fp32",
    "query_stride": "i32",
    "output_stride": "i32",
    "table_stride": "i32",
}
aligned = {name for name, kind in types.items() if kind.startswith("*")} | {"query_stride", "output_stride"}
names = _hopper_prefill_kernel.arg_names
source = GluonASTSource(
    fn=_hopper_prefill_kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned - {"items_ptr"}},
)
options = {"num_warps": 4, "maxnreg": REGISTERS}
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = kernel.asm["ptx"]
found = {name: ptx.count(name) for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "bar.arrive")}
print(json.dumps({"shared": kernel.metadata.shared, **found}))
