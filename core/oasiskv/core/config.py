"""The settings of the lookahead backend, checked once; `engine.vllm.settings` reads them from vLLM's configuration."""

import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, Self, get_args

from oasiskv.core.errors import ConfigError, UnsupportedError

BINARY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"": 1, **BINARY_UNITS, **DECIMAL_UNITS}


def parse_bytes(value: int | str, field: str) -> int:
    """Read a number of bytes, such as `1073741824` or `"1.5GiB"`.

    Raises:
        ConfigError: it is not a positive number of bytes; the message starts with `field`.
    """
    is_whole_or_text = isinstance(value, int | str) and not isinstance(value, bool)
    match = re.fullmatch(r"\s*([0-9]{1,30})(\.[0-9]{1,30})?\s*([A-Za-z]*)\s*", str(value) if is_whole_or_text else "")
    # A part of a byte is a unit that was forgotten.
    if match is None or match[3] not in UNITS or (match[2] and not match[3]):
        raise ConfigError(f"{field}: expected bytes such as 1073741824 or '1.5GiB', got {value!r}")
    num_bytes = int(Fraction(match[1] + (match[2] or "")) * UNITS[match[3]])
    if num_bytes <= 0:
        raise ConfigError(f"{field}: expected more than 0 bytes, got {value!r}")
    return num_bytes


Prediction = Literal["lookahead", "previous", "on-demand", "resident"]
"""`lookahead`: the draft token's query for the next step, or the normal token's own where no draft is usable.
`previous`: always the normal token's own, which is the previous token's to the step that uses it.
`on-demand`: the normal token's own for the same step: each layer waits for its transfer before it attends.
`resident`: nothing is ever fetched; what was chosen at the switch stays, but for blocks that become complete."""


CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""Values of vLLM's `--kv-cache-dtype` that can be served: the model's own numbers, or (the same by two names) fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """Everything a user can set on the backend."""

    budget_blocks: int = 128
    """Resident blocks of a request per layer and KV head (K). 128 blocks of 16 tokens are 2,048 tokens."""

    fetch_ratio: float = 0.05
    """Share of the budget that a KV head may fetch per step; the paper's value."""

    min_cap: int = 4
    """Least number of blocks that a KV head may fetch per step: a small budget suffers from a cap of 1 or 2."""

    cap: Literal["auto"] | int | None = None
    """Blocks that a KV head may fetch per step: a number; or "auto", as many as the host link carries beside each step,
    from min_cap to max_cap; or None, fetch_ratio of the budget and min_cap at least."""

    max_cap: int = 32
    """Most blocks that a KV head may fetch per step where cap is "auto"; the more it allows, the longer a transfer
    looks for what it fetches."""

    cap_log: str | None = None
    """Folder for the log of an "auto" cap, a file per worker process, which `oasiskv cap replay` reads."""

    score_alpha: float = 0.25
    """Weight of a block's half width in its score: 1 is an upper bound of every product with its keys, but ranks
    worse."""

    prediction: Prediction = "lookahead"
    """Whose query chooses the working set, and when; all but lookahead are there to be compared with."""

    summary: Literal["minmax", "mid"] = "minmax"
    """Rows kept per block: the largest and least key (any score_alpha), or their midpoint alone (score_alpha 0, half
    the memory)."""

    summary_dtype: Literal["auto", "fp8"] = "auto"
    """Type of those rows: that of the engine's KV cache, or fp8, half of 16-bit rows in memory and to read; the least
    and the largest key are rounded outward, so that a bound stays a bound."""

    group_reduction: Literal["max", "sum", "softmax"] = "max"
    """How the scores of the query heads that share a KV head combine."""

    sink_blocks: int = 1
    """First blocks of a request that are always resident."""

    host_pool_bytes: int = 4 * 2**30
    """Host memory for KV, in bytes per worker process; accepts text such as "16GiB"."""

    host_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the units in host memory: that of the engine's KV cache, or fp8 with a scale each for a unit's K and V,
    which halves host memory and the bytes of the link. What is resident of a sparse request is then rounded to fp8 too;
    a dense request stays exact."""

    host_backing: Literal["private", "shared"] = "private"
    """Private pinned memory, or shared memory that another process may map."""

    host_limit_bytes: int | None = None
    """Host memory the processes of this engine may take together; None takes the limit of the control group."""

    switch: Literal["auto", "early", "late"] = "auto"
    """When requests become sparse: as early as they can, as late as the engine's pool allows, or (auto) late and also
    when steps take less time so; without measured times for the device, early."""

    chunks: Literal["engine", "auto"] = "engine"
    """Prompt tokens that a step computes beside sparse decodes: as many as vLLM is set to (engine), or (auto) as many
    as fit the time that layers wait for the host link, 512 at least. Prompts then take longer, and hold decodes up
    less."""

    drafting: Literal["always", "when-sparse"] = "always"
    """Whether an EAGLE-3 drafter runs in every step, or (model runner V2) only while some request is sparse; in the
    other steps it then keeps its KV up to date and drafts nothing."""

    signal: Literal["auto", "joined", "flags"] = "auto"
    """How captured steps on a GPU are ordered against the background: joined at the end of each step, by flags in
    device memory per layer, or whichever is faster for the number of requests."""

    handover_mode: Literal["dense", "full", "partial", "capped"] = "capped"
    """What a request that begins with KV from staging brings to this host: all blocks before its first step (full), or
    its first set, and then the blocks that are selected: all of them (partial), or no more a step than the cap
    (capped). Partial lifts the cap for every request of this engine. Dense is there to be compared with: all blocks
    go to the engine's memory, and no request of this engine ever becomes sparse."""

    debug_verify: bool = False
    """Compare every resident unit with its host unit before each attention, bit for bit. Slow; for tests."""

    debug_hold_layers: int | None = None
    """Hold every transfer back until this many more layers have run, or its reader waits. None never
    holds. For tests."""

    debug_cap_replay: str | None = None
    """Log whose caps an "auto" cap takes again, step by step, the last one after its end. For tests."""

    debug_poison: bool = False
    """Overwrite a slot with huge values from its selection until its transfer, so that a reader in between shows.
    For tests."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a field is out of its range; the message starts with its name.
        """
        object.__setattr__(self, "host_pool_bytes", parse_bytes(self.host_pool_bytes, "host_pool_bytes"))
        if self.host_limit_bytes is not None:
            object.__setattr__(self, "host_limit_bytes", parse_bytes(self.host_limit_bytes, "host_limit_bytes"))
        self._check_int("budget_blocks", 1)
        self._check_int("min_cap", 1)
        self._check_int("max_cap", 1)
        self._check_int("sink_blocks", 0)
        if self.debug_hold_layers is not None:
            self._check_int("debug_hold_layers", 0)
        for name in ("fetch_ratio", "score_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name}: expected a number from 0 to 1, got {value!r}")
        for name, allowed in (
            ("prediction", get_args(Prediction)),
            ("summary", ("minmax", "mid")),
            ("summary_dtype", ("auto", "fp8")),
            ("group_reduction", ("max", "sum", "softmax")),
            ("host_dtype", ("auto", "fp8")),
            ("host_backing", ("private", "shared")),
            ("switch", ("auto", "early", "late")),
            ("chunks", ("engine", "auto")),
            ("drafting", ("always", "when-sparse")),
            ("signal", ("auto", "joined", "flags")),
            ("handover_mode", ("dense", "full", "partial", "capped")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("debug_verify", "debug_poison"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        self._check_cap()
        if self.sink_blocks >= self.budget_blocks:
            if self.sink_blocks == 1:  # the default, which nobody asked for
                raise ConfigError(f"budget_blocks: expected more than sink_blocks (1), got {self.budget_blocks}")
            raise ConfigError(
                f"sink_blocks: expected fewer than budget_blocks ({self.budget_blocks}), got {self.sink_blocks}"
            )
        if self.summary == "mid" and self.score_alpha != 0:
            raise ConfigError(f"score_alpha: expected 0 with summary 'mid', got {self.score_alpha}")

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")

    def _check_cap(self) -> None:
        is_number = isinstance(self.cap, int) and not isinstance(self.cap, bool)
        if not (self.cap is None or self.cap == "auto" or (is_number and int(self.cap) >= 1)):
            raise ConfigError(f"cap: expected 'auto', an integer of at least 1 or None, got {self.cap!r}")
        if self.cap is not None and self.handover_mode == "partial":
            raise ConfigError(f"cap: expected None with handover_mode 'partial', which lifts it, got {self.cap!r}")
        for name in ("cap_log", "debug_cap_replay"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}: expected a path or None, got {value!r}")
            if value is not None and self.cap != "auto":
                raise ConfigError(f"{name}: expected None unless cap is 'auto', got {value!r}")
        if self.cap == "auto" and self.prediction in ("on-demand", "resident"):
            raise ConfigError(f"cap: expected a number or None with prediction {self.prediction!r}, got 'auto'")

    def check_cache_dtype(self, kv_cache_dtype: str) -> bool:
        """Check vLLM's `--kv-cache-dtype` beside these settings, and say whether the engine's cache is fp8.

        Raises:
            UnsupportedError: there is no such cache here, or a setting would make fp8 of what is fp8 already.
        """
        if kv_cache_dtype not in CACHE_DTYPES:
            raise UnsupportedError(
                f"--kv-cache-dtype: expected one of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype}; "
                "or serve without OasisKV"
            )
        is_fp8 = kv_cache_dtype != "auto"
        for name, held in (("host_dtype", "units are the cache's bytes"), ("summary_dtype", "rows are fp8 as it is")):
            if is_fp8 and getattr(self, name) != "auto":
                raise UnsupportedError(
                    f"{name}: expected auto with --kv-cache-dtype {kv_cache_dtype}, whose {held}, "
                    f"got {getattr(self, name)}"
                )
        return is_fp8

    @property
    def first_cap(self) -> int:
        """Blocks that a KV head may fetch per step, at first if that changes."""
        if self.prediction == "resident":
            return 0
        if self.handover_mode == "partial":
            return self.budget_blocks
        if isinstance(self.cap, int):
            return min(self.cap, self.budget_blocks)
        cap = min(max(self.min_cap, int(self.fetch_ratio * self.budget_blocks)), self.budget_blocks)
        return cap if self.cap is None else min(cap, self.max_cap)

    @property
    def least_cap(self) -> int:
        """The least that the cap may become."""
        return min(self.min_cap, self.first_cap) if self.cap == "auto" else self.first_cap

    @property
    def most_cap(self) -> int:
        """The most that the cap may become."""
        return min(self.max_cap, self.budget_blocks) if self.cap == "auto" else self.first_cap

    def within(self, max_blocks: int) -> Self:
        """Return the same with a budget of at most `max_blocks`, those of the longest request.

        A larger budget means dense all the same, and shall take no memory for blocks that never come.
        """
        budget_blocks = min(self.budget_blocks, max_blocks)
        return replace(self, budget_blocks=budget_blocks, sink_blocks=min(self.sink_blocks, budget_blocks - 1))

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Self:
        """Build from a mapping of field names.

        Raises:
            ConfigError: an unknown name (the known ones are listed) or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for name in mapping:
            if name not in known:
                raise ConfigError(f"{name}: unknown setting; known are {', '.join(known)}")
        return cls(**mapping)
