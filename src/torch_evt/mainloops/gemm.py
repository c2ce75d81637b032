"""gemm: dense and batched products with fp32 accumulators.

Provider on sm_90 and sm_100: quack on CuTe DSL (fp16, bf16); on sm_80 and up: Triton (fp32 as TF32
or IEEE, odd alignments); on the CPU the reference alone.
"""

from __future__ import annotations

import torch

from torch_evt.mainloops.record import MainLoop

aten = torch.ops.aten
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})

GEMM = MainLoop(
    name="gemm",
    anchors=frozenset(
        {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
    ),
    operand_dtypes={"cuda": _FLOATS, "cpu": _FLOATS},
    store_dtypes=_FLOATS | {torch.bool},
    load_dtypes=_FLOATS | _INTEGERS,
    max_tile_loads=4,
    max_stores=4,
    max_reductions=4,
    reductions=frozenset(
        {("rows", "sum"), ("columns", "sum"), ("rows", "max"), ("columns", "max")}
    ),
    transposed_store=True,
    load_us_factor=1.0,
)
