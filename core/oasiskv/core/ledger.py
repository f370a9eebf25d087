"""The scheduler's side of every request: when it becomes sparse, what it gives back, which host blocks it owns.

`engine.vllm.manager` asks it inside vLLM's scheduler; what it decides travels to the workers as `StepCommands`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

from oasiskv.core.commands import Admission, Prefix, StepCommands
from oasiskv.core.handover import HandoverLayout
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.layout import SparseLayout
from oasiskv.core.rooms import Rooms
from oasiskv.core.switch_rule import Reason, SwitchRule

STORE_BATCH = 8
"""Blocks of a dense, decoding request that are written through together: each write costs launches in every layer."""

ROOM_BUDGETS = 2
"""Budgets of host blocks with which a request from staging begins: its KV heads choose much the same blocks."""

RESERVED_BLOCKS = 3
"""Engine blocks kept free per request where requests stay dense: a switch gives blocks back in a later step."""

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What is known of a request before it is admitted, and again after a preemption."""

    longest: int
    stage: str | None
    prefix: Prefix | None
    admission: Admission | None


@dataclass(slots=True)
class _Request:
    prefill_tokens: int
    """Tokens to compute before the first decode step."""
    uses_host: bool
    num_blocks: int = 0
    """Entries of its block table."""
    first_host_block: int = 0
    """Blocks before this one came from staging; their copies lie in the request's room."""
    num_host_blocks: int = 0
    """Host blocks for the others."""
    num_announced: int = 0
    """Of these, those that the workers know of."""
    num_final: int = 0
    """Complete blocks as of this step's processed tokens."""
    num_ordered: int = 0
    """Complete blocks as of the last step it ran in; not every step that allocates for a request runs it."""
    num_stored: int = 0
    """Blocks the workers were told to write through."""
    num_processed: int = 0
    """Tokens whose K and V are final when this step begins."""
    num_sealed: int = 0
    is_sparse: bool = False
    """Whether the workers were told that it is sparse."""
    num_freed: int = 0
    """Block table entries below this one were gone through for freeing."""
    stage: str | None = None
    """Lease that the workers must be told to stage its KV under."""
    hands_over: bool = False
    """Whether it switches as soon as it can, since another process goes on with it from there."""
    admission: Admission | None = None
    """What the workers must be told so that it begins with KV from staging."""
    prefix: Prefix | None = None
    """What the workers must be told so that its first blocks come from staging."""
    is_arriving: bool = False
    """Whether it was not run yet since the workers were told."""


class RequestLedger:
    """Owner of all requests' sparse state on the scheduler's side.

    In every step of the scheduler, `advance` and `grow` come first, request by request, and `take_commands` last. A
    block table entry is given back one step after the workers last needed it: in the step that frees it, another
    request may already be given the block.

    Args:
        layout: Which blocks a sparse request holds.
        block_size: Tokens per block.
        host: The host blocks.
        rule: When requests become sparse.
        brings_all: Whether a request from staging needs room for all its KV at once; else for twice its budget.
    """

    def __init__(
        self,
        layout: SparseLayout,
        block_size: int,
        host: HostBlockManager,
        rule: SwitchRule,
        *,
        brings_all: bool = False,
    ) -> None:
        """Start without requests."""
        self._layout = layout
        self._block_size = block_size
        self._host = host
        self._rule = rule
        budget = layout.budget_blocks
        self.rooms = Rooms(host, None if brings_all else ROOM_BUDGETS * budget, budget // 16)
        """Host blocks for what requests fetch."""
        self._shortage = 0
        self._num_switched: Counter[Reason] = Counter()
        self._requests: dict[str, _Request] = {}
        self._expected: dict[str, _Expected] = {}

    def expect(
        self,
        request_id: str,
        max_tokens: int,
        *,
        stage: str | None = None,
        prefix: Prefix | None = None,
        admission: Admission | None = None,
    ) -> None:
        """Note how long a request can become; one that can never become sparse gets no host blocks.

        Args:
            request_id: The request.
            max_tokens: Tokens it can have at most.
            stage: Lease that its KV is staged under, for a process that goes on with it.
            prefix: Blocks in staging that it need not compute; those of `stage` begin with them too.
            admission: The KV in staging that it begins with. If that is too little to be sparse, it is not used.
        """
        self._expected[request_id] = _Expected(longest=max_tokens, stage=stage, prefix=prefix, admission=admission)

    def forget(self, request_id: str) -> None:
        """Drop what `expect` noted; the request ended."""
        self._expected.pop(request_id, None)

    def num_staged_tokens(self, request_id: str) -> int:
        """Return with how many tokens from staging a request that has no blocks can begin; 0 if it cannot.

        A request that was preempted cannot, but for a prefix of its prompt: what it generated is not in staging, and is
        computed with its prompt.
        """
        expected = self._expected.get(request_id)
        if expected is None:
            return 0
        if expected.prefix is not None:
            return expected.prefix.num_blocks * self._block_size
        if expected.admission is None:
            return 0
        num_tokens = expected.admission.num_tokens
        return num_tokens if self._layout.may_switch(num_tokens // self._block_size) else 0

    def admit(self, request_id: str, num_tokens: int, num_staged_tokens: int = 0) -> None:
        """Note how many tokens a request that has no blocks must compute before it decodes.

        Args:
            request_id: The request.
            num_tokens: All of them.
            num_staged_tokens: Those of them that it begins with; 0, or what the function of this name said.
        """
        expected = self._expected.get(request_id)
        can_switch = expected is None or self._layout.may_switch(expected.longest // self._block_size)
        request = self._requests[request_id] = _Request(prefill_tokens=num_tokens, uses_host=can_switch)
        if expected is None:
            return
        if num_staged_tokens and expected.prefix is None:
            request.uses_host, request.is_sparse = True, True
            request.admission = expected.admission
            self._note(request, num_staged_tokens)
            request.first_host_block = request.num_final
            # What came from staging is not all here: it is neither written through nor found by its content.
            request.num_ordered = request.num_stored = request.num_sealed = request.num_freed = request.num_final
            return
        if num_staged_tokens:
            request.prefix = expected.prefix
        if can_switch:
            request.stage = expected.stage
            request.hands_over = expected.stage is not None

    def first_entries(self, request_id: str) -> list[int]:
        """Return the block table entries that a request needs for its tokens from staging, ascending."""
        admission = self._requests[request_id].admission
        assert admission is not None
        places = HandoverLayout.of(admission.num_tokens, self._block_size, self._layout)
        slots, pages = range(self._layout.budget_blocks), self._layout.page_positions(places.num_complete)
        return [*slots, *pages, *([places.active] if places.has_active else [])]

    def begins_staged(self, request_id: str) -> bool:
        """Say whether an admitted request begins with tokens from staging and the workers were not told of it yet."""
        request = self._requests.get(request_id)
        return request is not None and request.admission is not None

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Say whether host memory has room for this many tokens of the request."""
        request = self._requests[request_id]
        num_missing = self._num_missing(request_id, num_tokens)
        return not request.uses_host or self.rooms.can_yield(num_missing, to_new=self._has_none(request_id))

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Give the request host blocks for this many tokens.

        Raises:
            PoolExhaustedError: host memory has too few; none is taken.
        """
        request, num_blocks = self._requests[request_id], self._num_blocks(num_tokens)
        if request.uses_host:
            self.rooms.make_free(self._num_missing(request_id, num_tokens), to_new=self._has_none(request_id))
            if self._needs_room(request_id):
                self.rooms.open(request_id, request.first_host_block)
            self._host.extend(request_id, num_blocks - request.first_host_block)
            request.num_host_blocks = len(self._host.table(request_id))
        request.num_blocks = max(request.num_blocks, num_blocks)

    def seat(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Note the block table of a request that begins with tokens from staging."""
        request = self._requests[request_id]
        if request.prefix is not None:
            request.prefix = replace(request.prefix, block_ids=tuple(block_ids[: request.prefix.num_blocks]))
        if request.admission is not None:
            request.admission = replace(request.admission, block_ids=tuple(block_ids))

    @property
    def num_arriving(self) -> int:
        """Requests that have blocks for their KV from staging, and did not run yet."""
        return sum(request.is_arriving or self._will_arrive(request) for request in self._requests.values())

    def note_shortage(self, num_blocks: int) -> None:
        """Note that a request could not be given engine blocks in this step, for want of so many."""
        self._shortage = max(self._shortage, num_blocks)

    def reserved_blocks(self) -> int:
        """Return the engine blocks that requests which have some will need soon: none if they switch early.

        They are those of prompts not yet computed to their end, and a few of every request for its next steps.
        """
        if self._rule.is_early:
            return 0
        holders = [request for request in self._requests.values() if request.num_blocks]
        missing = (max(0, self._num_blocks(request.prefill_tokens) - request.num_blocks) for request in holders)
        return RESERVED_BLOCKS * len(holders) + sum(missing)

    def advance(self, request_id: str, num_processed: int) -> range:
        """Note the tokens a request has processed for good; return the block table entries it may give back now.

        The entries of summary pages lie in that range: ask `is_page`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return range(0)
        self._note(request, num_processed)
        if not request.is_sparse:
            return range(0)
        first = max(request.num_freed, self._layout.budget_blocks)
        request.num_freed = max(first, request.num_ordered)
        return range(first, request.num_freed)

    def is_page(self, request_id: str, position: int) -> bool:
        """Say whether a sparse request keeps this block table entry as a summary page."""
        num_final = self._requests[request_id].num_final
        layout = self._layout
        pages = (position - layout.budget_blocks, position // layout.rows_per_page)
        return any(0 <= page < layout.num_pages(num_final) and layout.page_position(page) == position for page in pages)

    def take_commands(
        self,
        num_computed: Mapping[str, int],
        released: set[str],
        num_free: int,
        num_scheduled: Mapping[str, int] = NOTHING,
    ) -> StepCommands:
        """Return the orders of this step and count them as given.

        Args:
            num_computed: Requests that run in this step, with the tokens computed before it, those of steps in flight
                included: the prompt's among them are final as soon as they are scheduled.
            released: Requests that finished or were preempted since the last step.
            num_free: Engine blocks that are free after this step's allocations.
            num_scheduled: Tokens that requests compute in this step; those of others are not streamed.
        """
        host_blocks: dict[str, list[int]] = {}
        store: dict[str, tuple[int, int]] = {}
        stage: dict[str, str] = {}
        stream: dict[str, tuple[int, int]] = {}
        admit, load = self._take_arrivals()
        running = {name: self._requests[name] for name in sorted(num_computed.keys() & self._requests.keys())}
        for request_id, request in running.items():
            if request.uses_host:
                self._note(request, min(num_computed[request_id], request.prefill_tokens))
        switch = self._choose(running, num_free)
        for request_id, request in running.items():
            request.is_arriving = False
            if not request.uses_host:
                continue
            if request.num_host_blocks > request.num_announced:
                host_blocks[request_id] = list(self._host.table(request_id)[request.num_announced :])
                request.num_announced = request.num_host_blocks
            request.num_ordered = request.num_final
            if request.stage is not None:
                stage[request_id], request.stage = request.stage, None
            if not request.is_sparse and self._is_store_due(request, is_switched=request_id in switch):
                store[request_id] = (request.num_stored, request.num_final)
                request.num_stored = request.num_final
            request.is_sparse |= request_id in switch
            if request.hands_over:
                num_tokens = num_computed[request_id] + num_scheduled.get(request_id, 0)
                end = min(num_tokens, request.prefill_tokens) // self._block_size
                if end > request.num_final:
                    stream[request_id] = (request.num_final, end)
        self._num_switched.update(switch.values())
        return StepCommands(
            released=tuple(sorted(released)),
            admit=admit,
            load=load,
            room=self.rooms.take_changes(admit.keys()),
            host_blocks=host_blocks,
            stage=stage,
            store=store,
            switch={request_id: running[request_id].num_final for request_id in switch},
            stream=stream,
        )

    @property
    def num_host_blocks_held(self) -> int:
        """Host blocks that requests hold."""
        return self._host.num_blocks - self._host.num_free

    def take_num_switched(self) -> Counter[Reason]:
        """Return how many requests were switched for each reason since the last call."""
        counted, self._num_switched = self._num_switched, Counter()
        return counted

    def num_dense_decodes(self, scheduled: Set[str]) -> int:
        """Count the requests of this step that decode with everything resident."""
        requests = (self._requests[request_id] for request_id in scheduled & self._requests.keys())
        return sum(not request.is_sparse and request.num_processed >= request.prefill_tokens for request in requests)

    def seal(self, request_id: str, block_keys: Sequence[bytes]) -> None:
        """Make host blocks findable by the content keys of the request's first blocks, as far as workers wrote them."""
        request = self._requests.get(request_id)
        if request is None or not request.uses_host:
            return
        end = min(request.num_ordered if request.is_sparse else request.num_stored, len(block_keys))
        for block_index in range(request.num_sealed, end):
            self._host.seal(request_id, block_index - request.first_host_block, block_keys[block_index])
        request.num_sealed = max(request.num_sealed, end)

    def is_sparse(self, request_id: str) -> bool:
        """Say whether the workers were told that the request is sparse."""
        request = self._requests.get(request_id)
        return request is not None and request.is_sparse

    def release(self, request_id: str) -> None:
        """Take back everything of a request that finished or was preempted."""
        if self._requests.pop(request_id, None) is not None:
            self._host.release(request_id)
            self.rooms.close(request_id)
        if (expected := self._expected.get(request_id)) is not None:
            self._expected[request_id] = replace(expected, admission=None)

    def _take_arrivals(self) -> tuple[dict[str, Admission], dict[str, Prefix]]:
        """Return what workers must be told of requests that were given blocks for their KV from staging."""
        admit, load = {}, {}
        for request_id, request in self._requests.items():
            if not self._will_arrive(request):
                continue
            request.is_arriving = True
            if request.admission is not None:
                admit[request_id], request.admission = request.admission, None
            if request.prefix is not None:
                load[request_id], request.prefix = request.prefix, None
        return admit, load

    def _will_arrive(self, request: _Request) -> bool:
        """Say whether workers were not told yet of a request that was given blocks for its KV from staging."""
        return request.num_blocks > 0 and (request.admission is not None or request.prefix is not None)

    def _has_none(self, request_id: str) -> bool:
        """Say whether a request has no host blocks at all."""
        return request_id not in self.rooms and not self._host.table(request_id)

    def _needs_room(self, request_id: str) -> bool:
        """Say whether a request begins with tokens from staging and has no room yet."""
        return self.begins_staged(request_id) and request_id not in self.rooms

    def _num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return the host blocks that a request lacks for this many tokens."""
        request = self._requests[request_id]
        num_own = self._num_blocks(num_tokens) - request.first_host_block - len(self._host.table(request_id))
        num_first = self.rooms.num_first(request.first_host_block) if self._needs_room(request_id) else 0
        return max(0, num_own) + num_first

    def _note(self, request: _Request, num_final_tokens: int) -> None:
        request.num_processed = max(request.num_processed, num_final_tokens)
        request.num_final = request.num_processed // self._block_size

    def _choose(self, running: Mapping[str, _Request], num_free: int) -> dict[str, Reason]:
        """Choose the requests that switch in this step."""
        shortage, self._shortage = max(self._shortage, self.reserved_blocks() - num_free), 0
        dense = {name: request.num_final for name, request in running.items() if self._may_switch(request)}
        if not dense:
            return {}
        chosen: dict[str, Reason] = {name: "handover" for name in dense if running[name].hands_over}
        dense = {name: num_final for name, num_final in dense.items() if name not in chosen}
        if not dense:
            return chosen
        sparse = [request for request in self._requests.values() if request.is_sparse]
        # Those that switched lately have not given back anything yet.
        coming = sum(self._num_freed_by(request) for request in sparse if request.num_freed == 0)
        waiting = [
            request.num_blocks
            for name, request in running.items()
            if name not in dense and name not in chosen and not request.is_sparse
        ]
        return chosen | self._rule.choose(
            dense,
            waiting,
            [request.num_final for request in running.values() if request.is_sparse],
            shortage - coming,
            {name: self._num_freed_by(running[name]) for name in dense},
        )

    def _may_switch(self, request: _Request) -> bool:
        is_decoding = request.num_processed >= request.prefill_tokens
        may = request.uses_host and not request.is_sparse and is_decoding
        return may and self._layout.may_switch(request.num_final)

    def _is_store_due(self, request: _Request, *, is_switched: bool) -> bool:
        num_pending = request.num_final - request.num_stored
        is_decoding = request.num_processed >= request.prefill_tokens
        is_prompt = request.num_stored * self._block_size < request.prefill_tokens
        return num_pending > 0 and (is_switched or is_prompt or not is_decoding or num_pending >= STORE_BATCH)

    def _num_freed_by(self, request: _Request) -> int:
        """Return the engine blocks that a switch of the request gives back."""
        layout = self._layout
        return max(0, request.num_final - layout.budget_blocks - layout.num_pages(request.num_final))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
