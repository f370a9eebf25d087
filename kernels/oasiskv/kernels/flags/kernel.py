"""How passes count, wait and take the time on a GPU: one warp each."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# Nothing is specialized by its value, so that one compilation serves all layers and none happens under capture.
PLAIN = ["layer", "timeout_ns", "num_heads"]


@triton.jit(do_not_specialize=PLAIN)
def raise_count(counts, layer, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """Raise a count by one behind everything before it on the stream."""
    tl.atomic_add(counts + layer * COLUMNS + COLUMN, 1, sem="release", scope="gpu")


@triton.jit
def spin(counts, failed, told, layer, timeout_ns, COLUMN: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr):
    """Spin until a count has reached the owner's next pass; return whether that took time, and how long."""
    count = counts + layer * COLUMNS + COLUMN
    # The foreground owns READY and waits for what it published; the background waits for one pass more than it did.
    goal = tl.load(counts + layer * COLUMNS + OWN) + (1 if OWN > 0 else 0)
    started = globaltimer()
    took = started - started
    seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
    given_up = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu")
    is_late = seen < goal
    while (seen < goal) & (given_up == 0):
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        took = globaltimer() - started
        if took > timeout_ns:
            tl.store(told, layer + 1)
            tl.atomic_xchg(failed, 1, sem="relaxed", scope="gpu")
        given_up = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu")
    return is_late, took


@triton.jit(do_not_specialize=PLAIN)
def await_count(
    counts, failed, told, layer, timeout_ns, COLUMN: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr
):
    """Hold the stream until a count is ahead of its owner's."""
    spin(counts, failed, told, layer, timeout_ns, COLUMN, OWN, COLUMNS)


@triton.jit(do_not_specialize=PLAIN)
def await_done(
    counts,
    failed,
    told,
    layer,
    timeout_ns,
    waited,
    fetched_before,
    counters,
    num_heads,
    COLUMN: tl.constexpr,
    OWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNTERS: tl.constexpr,
    FETCHED: tl.constexpr,
    WAITED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Hold the stream until a layer's last transfer is over, and note how long that took and for how many units."""
    is_late, took = spin(counts, failed, told, layer, timeout_ns, COLUMN, OWN, COLUMNS)
    head = tl.arange(0, SPAN)
    own = counters + layer * num_heads * COUNTERS
    fetched = tl.sum(tl.load(own + head * COUNTERS + FETCHED, mask=head < num_heads, other=0, volatile=True))
    before = tl.load(fetched_before + layer)
    tl.store(fetched_before + layer, fetched)
    if is_late:
        passes = waited + layer * WAITED
        tl.store(passes, tl.load(passes) + 1)
        tl.store(passes + 1, tl.load(passes + 1) + fetched - before)
        tl.store(passes + 2, tl.load(passes + 2) + took)


@triton.jit(do_not_specialize=["place"])
def note(began, place):
    """Note when the stream got here."""
    tl.store(began + place, globaltimer())


@triton.jit(do_not_specialize=["layer"])
def add_busy(began, layer, ended, waited, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the time since `note` to a column of a layer, less what was counted for others that ended meanwhile."""
    now = globaltimer()
    counted = tl.atomic_max(ended, now, sem="relaxed", scope="gpu")
    took = now - tl.maximum(tl.load(began + layer), counted)
    total = waited + layer * COLUMNS + COLUMN
    tl.store(total, tl.load(total) + tl.maximum(took, 0))


@triton.jit(do_not_specialize=["place", "layer", "least_ns"])
def add_wait(
    began, place, waited, layer, least_ns, PASSES: tl.constexpr, NANOSECONDS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Count the time since `note` as a wait if it is one."""
    took = globaltimer() - tl.load(began + place)
    if took >= least_ns:
        row = waited + layer * COLUMNS
        tl.store(row + PASSES, tl.load(row + PASSES) + 1)
        tl.store(row + NANOSECONDS, tl.load(row + NANOSECONDS) + took)
