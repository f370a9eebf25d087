"""What runs on a GPU alone, compiled without one: the conversions are the hardware's, and accesses are wide."""

import json
import os
import subprocess
import sys

import pytest

# Runs where Triton's interpreter is off, which is decided for a whole process.
PROGRAM = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oasiskv.kernels.complete import kernel as complete
from oasiskv.kernels.fp8 import kernel as fp8
from oasiskv.kernels.fp8.reference import LEAST_EXPONENT, top_exponent
from oasiskv.kernels.rows import Counter, Row
from oasiskv.kernels.transfer import kernel as transfer

HEADS, BLOCK, DIM = 8, 16, 128
unit = {"H": HEADS, "B": BLOCK, "D": DIM, "DIM": DIM}
part = {"PART": HEADS * BLOCK * 2 * DIM + 128}
row = {"COLUMNS": len(Row), "REQUEST": Row.REQUEST}
found = {}
for cache, dtype in (("*bf16", torch.bfloat16), ("*fp16", torch.float16)):
    scale = {"LEAST": LEAST_EXPONENT, "TOP": top_exponent(dtype), "NATIVE": True}
    ring = {"C": 6, "WORDS": 0, "SPAN": 1, "LANES": 256, "DEPTH": 3, "FP8": True, "NATIVE": True}
    counted = {"COUNTERS": len(Counter), "WASTED": Counter.WASTED, "EVICTED": Counter.EVICTED, "FRESH": 1}
    block = {"NUM_COMPLETE": Row.NUM_COMPLETE, "STEP": Row.STEP, "FINISHED": Row.FINISHED_BLOCK, "FP8": True}
    slots = {"K": 128, "SLOTS": 128, "PER_PAGE": 16, "MID": False}
    for kernel, scales, constants in (
        (fp8._round_blocks, None, unit | scale),
        (transfer._transfer, "*i64", unit | part | ring | row),
        (transfer._store_fp8, "*fp32", unit | part | scale | {"BATCH": 4, "PROGRAMS": 4}),
        (complete._complete, "*fp32", unit | part | scale | row | counted | block | slots),
    ):
        names = kernel.arg_names
        types = {"kv_cache": cache, "units": "*u8", "scales": scales, "found": "*i64", "counters": "*i64"}
        pointers = ("plan", "rows", "host_table", "slot_ids", "page_ids", "resident", "stamp", "block_ids", "host_ids")
        types |= dict.fromkeys(pointers, "*i32") | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("kv_cache", "units")}
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "i32") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=aligned,
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        found[kernel.__name__ + cache] = compiled.asm["ptx"]
print(json.dumps(found))
"""

NARROWS, WIDENS = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
WIDE_STORE, WIDE_RING = "st.global.v4.b32", "cp.async.cg.shared.global"


@pytest.mark.timeout(300)
def test_the_kernels_convert_in_hardware_and_access_sixteen_bytes_at_a_time() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        "_round_blocks": {NARROWS, WIDENS, WIDE_STORE},
        "_transfer": {WIDENS, WIDE_STORE, WIDE_RING},
        "_store_fp8": {NARROWS, WIDE_STORE},
        "_complete": {NARROWS, WIDENS, WIDE_STORE},
    }
    assert len(found) == 2 * len(expected)
    for name, code in found.items():
        wanted = expected[name.partition("*")[0]]
        assert {text for text in (NARROWS, WIDENS, WIDE_STORE, WIDE_RING) if text in code} == wanted, name
