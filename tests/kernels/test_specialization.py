"""Triton compiles a kernel anew for numbers and addresses of another kind, which holds up the requests of a server."""

import json
import os
import subprocess
import sys

import pytest

# Runs where Triton's interpreter is off, which is decided for a whole process. No GPU: nothing is launched.
PROGRAM = """
import json
from collections import defaultdict
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.host_memory import fp8_part_bytes
from oasiskv.engine import switch
from oasiskv.kernels.complete import kernel as complete
from oasiskv.kernels.fp8 import kernel as fp8
from oasiskv.kernels.misses import Mailbox
from oasiskv.kernels.misses import kernel as misses
from oasiskv.kernels.plan import kernel as plan
from oasiskv.kernels.predict import kernel as predict
from oasiskv.kernels.publish import kernel as publish
from oasiskv.kernels.rows import Given, Row
from oasiskv.kernels.select import kernel as select
from oasiskv.kernels.summarize import kernel as summarize
from oasiskv.kernels.testing import Shape, counters
from oasiskv.kernels.transfer import kernel as transfer

backend = make_backend(GPUTarget("cuda", 90, 32))
seen = defaultdict(set)


def record(self, *args, grid, warmup, **kwargs):
    bind = create_function_from_signature(self.signature, self.params, backend)
    _, specialization, options = bind(*args, **kwargs)
    is_fp8 = kwargs.get("FP8", kwargs.get("ROUNDS", False))
    seen[self.fn.__name__ + " fp8" * is_fp8].add(str((specialization, sorted(options.items()))))


JITFunction.run = record
layers, budget, slots = 20, 8, 40
shape = Shape(num_kv_heads=3, group=3, budget=budget, num_layers=layers, dtype=torch.bfloat16)
cache, units = torch.zeros(64, *shape.unit), torch.zeros(70, layers, *shape.unit)
cache, units = cache.bfloat16(), units.bfloat16()
fp8_units = torch.zeros(70, layers, fp8_part_bytes(3, 16, 64), dtype=torch.uint8)


def ids(*size):
    return torch.zeros(size, dtype=torch.int32)


tables = ids(slots, budget), ids(slots, 5), ids(slots, 65)
resident, stamp = ids(layers, slots, 3, budget), ids(layers, slots, 3, budget)
chosen, blocks, scores = ids(slots, 3, 4, 2), ids(slots, 3, budget), torch.zeros(slots, 3, budget)
rows, query = ids(slots, len(Row)), torch.zeros(slots, 9, 64).bfloat16()
counts = torch.stack([counters(shape)] * layers)
box, absent = Mailbox.of(torch.stack([chosen] * layers), resident, cache), ids(layers, slots, 65)
for n in (1, 2, 3, 4, 15, 16, 17, 32):
    for first in range(5):
        for layer in (0, 1, 2, 3, 16):
            for pool in (units, fp8_units):
                transfer.store(cache, ids(64)[first : first + n], pool, layer, ids(64)[first // 2 :][:n])
        fp8.round_blocks(cache, ids(64)[first : first + n])
        summarize.summarize(cache, ids(64)[first : first + n], cache, ids(9)[first:], first, shape.layout)
    plan.plan(
        torch.zeros(len(Given), n, dtype=torch.int32), ids(n + 1), ids(n), ids(slots, 70)[:n], ids(slots), tables[1],
        ids(slots)[:n], ids(slots)[:n], ids(slots)[:n], rows[:n], ids(slots, 70)[:n], ids(slots)[:n],
        budget, 16, 16, n, n,
    )
    for layer in (0, 1, 2, 3, 16):
        here = resident[layer], stamp[layer]
        publish.publish(query, ids(slots)[:n], ids(slots)[:n], rows[:n], query, rows)
        for pool in (units, fp8_units):
            rounds = pool is fp8_units
            complete.complete(cache, rows[:n], *here, *tables[:2], counts[layer], shape.layout, 1, rounds=rounds)
            complete.keep(cache, pool, layer, rows[:n], here[0], tables[0], tables[2])
            transfer.transfer(pool, layer, cache, chosen[:n], rows[:n], tables[2], tables[0])
        predict.predict(query, rows[:n], cache, tables[1], blocks[:n], scores[:n], shape.layout, 0.25, "max", 0.1, 1)
        select.select(blocks[:n], scores[:n], rows[:n], *here, chosen, counts[layer])
        misses.ask(
            chosen[:n], rows[:n], absent[layer], resident[layer], tables[0], cache, box.asked, box.answered,
            box.num_rows, box.sizes, box.rows[layer], box.plan[layer], box.resident[layer], box.updates[layer],
            box.bounced[layer], box.units[layer], box.counts, box.failed, box.told, layer, 30.0,
        )


def fill(query, row, staging, pages, out, scores, **settings):
    predict.predict(query, row, staging, pages, out, scores, **settings)
    out[:] = torch.arange(budget)


switch.predict, switch.summarize = fill, summarize.summarize
config, staging = LookaheadConfig(budget_blocks=budget), torch.zeros(5, *shape.unit).bfloat16()
for n in (9, 12, 16, 17, 33, 60):
    switch.switch_layer(
        cache, torch.arange(n).int(), torch.tensor([[0, n, 0, -1, 0]]).int(), torch.arange(-(-n // 16)).int(),
        query[n % 5], staging, resident[0, 0],
        layout=shape.layout, config=config, scale=0.1,
    )
print(json.dumps({name: sorted(keys) for name, keys in seen.items()}))
"""


@pytest.mark.timeout(120)
def test_no_kernel_is_compiled_again_for_another_step_layer_or_request() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == 15
    assert {name: len(keys) for name, keys in seen.items()} == dict.fromkeys(seen, 1)
