"""Every kernel compiles for a GPU with the Triton that is installed, without one; 3.6 and 3.9 are supported."""

import json
import os
import subprocess
import sys

import pytest

# Runs where Triton's interpreter is off, which is decided for a whole process. What would be launched is compiled.
PROGRAM = """
import json
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from oasiskv.core.host_memory import fp8_part_bytes
from oasiskv.kernels.complete import kernel as complete
from oasiskv.kernels.flags import Clock, Flags
from oasiskv.kernels.formats import FP8, wide_dtypes
from oasiskv.kernels.fp8 import kernel as fp8
from oasiskv.kernels.misses import Mailbox
from oasiskv.kernels.misses import kernel as misses
from oasiskv.kernels.plan import kernel as plan
from oasiskv.kernels.predict import kernel as predict
from oasiskv.kernels.publish import kernel as publish
from oasiskv.kernels.rows import Counter, Given, Row, Waited
from oasiskv.kernels.select import kernel as select
from oasiskv.kernels.summarize import kernel as summarize
from oasiskv.kernels.testing import Shape, counters
from oasiskv.kernels.transfer import kernel as transfer

target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)
found = []


def compile_it(self, *args, grid, warmup, **kwargs):
    if "NATIVE" in kwargs:
        kwargs["NATIVE"] = True
    bound, specialization, options = create_function_from_signature(self.signature, self.params, backend)(
        *args, **kwargs
    )
    options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(self, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    found.append((self.fn.__name__, label, compiled.metadata.shared, compiled.asm["ptx"]))


def ids(*size):
    return torch.zeros(size, dtype=torch.int32)


JITFunction.run = compile_it
n, layers, slots, budget = 4, 2, 8, 128
rows, blocks, scores = ids(n, len(Row)), ids(n, 8, budget), torch.zeros(n, 8, budget)
state, plans = (ids(slots, 8, budget), ids(slots, 8, budget)), ids(n, 8, 6, 2)
tables = ids(slots, budget), ids(slots, 64), ids(slots, 99)


def compile_all(dtype, kind, is_fp8, reductions):
    global label
    shape = Shape(num_kv_heads=8, group=4, head_dim=128, budget=budget, dtype=dtype, kind=kind, has_fp8_rows=is_fp8)
    label = f"{kind} {'fp8' if is_fp8 else 'auto'} {dtype}"
    cache, query = torch.zeros(8, *shape.unit, dtype=dtype), torch.zeros(slots, 32, 128, dtype=wide_dtypes(dtype)[-1])
    units = torch.zeros(4, layers, *shape.unit, dtype=dtype)
    if is_fp8:
        units = torch.zeros(4, layers, fp8_part_bytes(8, 16, 128), dtype=torch.uint8)
    summarize.summarize(cache, ids(n), cache, ids(n), 0, shape.layout)
    alpha = 0.0 if kind == "mid" else 0.25
    for reduction in reductions:
        predict.predict(query, rows, cache, tables[1], blocks, scores, shape.layout, alpha, reduction, 0.1, 1)
    if kind == "mid":
        return
    complete.complete(cache, rows, *state, *tables[:2], counters(shape), shape.layout, 1, rounds=is_fp8)
    complete.keep(cache, units, 1, rows, state[0], tables[0], tables[2])
    transfer.transfer(units, 1, cache, plans, rows, tables[2], tables[0])
    transfer.store(cache, ids(n), units, 1, ids(n))
    if is_fp8:
        fp8.round_blocks(cache, ids(n))
        return
    select.select(blocks, scores, rows, *state, plans, counters(shape))
    publish.publish(query.to(dtype), ids(n), ids(n), rows, query, rows)


compile_all(torch.bfloat16, "minmax", False, ["max", "softmax"])
compile_all(torch.bfloat16, "minmax", True, ["max"])
compile_all(torch.float16, "minmax", True, ["max"])
compile_all(torch.bfloat16, "mid", True, ["max"])
compile_all(FP8, "minmax", False, ["max"])
compile_all(FP8, "mid", False, ["max"])
plan.plan(
    ids(len(Given), n), ids(n + 1), ids(n), ids(n, 70), ids(slots), ids(slots, 5), ids(n), ids(n), ids(n), rows,
    ids(n, 140), ids(n), budget, 31, 16, 1, 6,
)
# Without CUDA nothing can be pinned.
zeros = torch.zeros
torch.zeros = lambda *size, pin_memory=False, **kwargs: zeros(*size, **kwargs)
label, waited = "order", zeros(layers, len(Waited), dtype=torch.int64)
Flags(torch.device("cpu"), layers, 30.0).await_done(1, zeros(layers, 8, len(Counter), dtype=torch.int64))
Clock(waited)
cache, resident = zeros(8, 8, 16, 256, dtype=torch.bfloat16), ids(layers, slots, 8, budget)
box = Mailbox.of(ids(layers, slots, 8, 6, 2), resident, cache)
misses.ask(
    plans, rows, tables[2], resident[1], tables[0], cache, box.asked, box.answered, box.num_rows, box.sizes,
    box.rows[1], box.plan[1], box.resident[1], box.updates[1], box.bounced[1], box.units[1], box.counts, box.failed,
    box.told, 1, 30.0,
)
print(json.dumps([triton.__version__, found]))
"""

KERNELS = {
    "_ask", "_complete", "_keep", "_plan", "_predict", "_publish", "_round_blocks", "_select", "_store", "_store_fp8",
    "_summarize", "_transfer", "add_busy", "add_wait", "await_count", "await_done", "note", "raise_count",
}  # fmt: skip
HOPPER_SHARED_BYTES = 227 * 1024
NARROWS, WIDENS = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
WIDE_STORE, WIDE_RING, PRODUCT = "st.global.v4.b32", "cp.async.cg.shared.global", "wgmma.mma_async"
FP8 = {
    "_round_blocks": {WIDE_STORE},
    "_transfer": {WIDENS, WIDE_STORE, WIDE_RING},
    "_store_fp8": {NARROWS, WIDE_STORE},
    "_complete": {WIDE_STORE},
    "_keep": {WIDE_STORE},
    "_summarize": set(),
    "_predict": {WIDENS, PRODUCT},
}
"""What the fp8 variants convert with, and how they reach memory."""


@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_the_gpu_and_fp8_is_converted_in_hardware_and_accessed_widely() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout)
    print(f"{len(found)} kernels compiled with Triton {version}")
    assert {name for name, *_ in found} == KERNELS
    assert all(shared <= HOPPER_SHARED_BYTES for _, _, shared, _ in found)
    fp8 = [(name, label, code) for name, label, _, code in found if name in FP8 and "fp8" in label]
    assert {name for name, *_ in fp8} == FP8.keys()
    for name, label, code in fp8:
        assert {text for text in FP8[name] if text in code} == FP8[name], (name, label)
        # What goes on with the numbers that it narrowed counts on bits.
        assert name not in ("_round_blocks", "_complete", "_keep", "_summarize") or not {NARROWS, WIDENS} & set(
            code.split()
        )
    # Rows of summaries come by asynchronous copies, so that programs wait for several at once.
    assert all("cp.async" in code for name, _, _, code in found if name == "_predict")
