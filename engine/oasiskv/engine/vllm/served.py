"""A vLLM engine inside a service: prompts in, tokens out, and the calls to its workers that handovers need."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from oasiskv.core import errors
from oasiskv.core.errors import ConfigError, EngineFailedError, InvalidRequestError, OasisError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.generation import Generated, Logprob, Sampling
from oasiskv.core.layout import SparseLayout
from oasiskv.core.service_config import EngineConfig
from oasiskv.engine.probe import join_digests
from oasiskv.engine.vllm import settings
from oasiskv.engine.vllm.names import CONNECTOR, HANDOVER, WORKERS

POLL_S = 0.005
"""Between two questions whether a handover's writes are over."""


def engine_arguments(config: EngineConfig, fingerprint: Fingerprint) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    transfer: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": asdict(config.lookahead),
    }
    own = {
        "model": config.model,
        "dtype": fingerprint.dtype,
        "block_size": fingerprint.block_size,
        "tensor_parallel_size": config.tp_size or fingerprint.tp_size,
        "worker_cls": WORKERS[device],
        "kv_transfer_config": transfer,
    }
    if device == "cuda":
        own["disable_cascade_attn"] = True
        transfer["kv_connector_extra_config"][HANDOVER] = True
    return own | dict(config.arguments)


class ServedEngine:
    """The engine; made by `start`, ended by `stop`. Its processes live as long as it does."""

    def __init__(self, llm: AsyncLLM, config: EngineConfig, fingerprint: Fingerprint) -> None:
        self.llm = llm
        self.layout: SparseLayout = settings.sparse_layout(
            config.lookahead, fingerprint.block_size, fingerprint.head_dim, fingerprint.dtype_bytes
        )
        """Which blocks a sparse request holds."""

    @classmethod
    async def start(
        cls, config: EngineConfig, fingerprint: Fingerprint, wrap: Callable[[Any], Any] | None = None
    ) -> Self:
        """Start the engine's processes, and compare its KV with the fingerprint.

        Args:
            config: What to run.
            fingerprint: What its KV must be.
            wrap: Called with vLLM's client of the engine's process; what it returns takes the client's place.

        Raises:
            ConfigError: An argument is one that vLLM does not know, or the KV is not that of the fingerprint.
            EngineFailedError: The engine did not start.
        """
        if fingerprint.tp_size % (config.tp_size or 1):
            raise ConfigError(
                f"engine.tp_size: expected a divisor of fingerprint.tp_size, which is {fingerprint.tp_size}, "
                f"got {config.tp_size}"
            )
        try:
            arguments = AsyncEngineArgs(**engine_arguments(config, fingerprint))
        except TypeError as cause:
            raise ConfigError(f"engine.arguments: {cause}") from cause
        try:
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        except Exception as cause:
            raise EngineFailedError(f"engine: {type(cause).__name__}: {cause}") from cause
        if wrap is not None:
            llm.engine_core = wrap(llm.engine_core)
        engine = cls(llm, config, fingerprint)
        try:
            for shape in await llm.collective_rpc("kv_shape"):
                if fingerprint.num_layers == (num_target_layers := shape.pop("num_target_layers")):
                    # The drafter's layers stay here: the other side has none, or another drafter.
                    shape["num_layers"] = num_target_layers
                for name, got in shape.items():
                    if (expected := getattr(fingerprint, name)) != got:
                        raise ConfigError(f"fingerprint.{name}: expected {got}, which the engine has, got {expected}")
        except BaseException:
            engine.stop()
            raise
        return engine

    @property
    def is_alive(self) -> bool:
        """Whether the engine's processes run."""
        return not self.llm.errored

    @property
    def num_requests(self) -> int:
        """Requests under way, those of every front."""
        return int(self.llm.output_processor.get_num_unfinished_requests())

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, its prompt included."""
        return int(self.llm.model_config.max_model_len)

    def stop(self) -> None:
        """End the engine's processes."""
        self.llm.shutdown()

    def tokenize(self, prompt: Sequence[int] | str | Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of token ids, a text, or messages of a chat.

        Raises:
            InvalidRequestError: There are no tokens, too many, one that the model lacks, or no chat template.
        """
        ids = self._ids_of(prompt)
        vocabulary = self.llm.model_config.get_vocab_size()
        if not 0 < len(ids) < self.max_tokens:
            raise InvalidRequestError(f"prompt: expected 1 to {self.max_tokens - 1} tokens, got {len(ids)}")
        if max(ids) >= vocabulary:
            raise InvalidRequestError(f"prompt: expected token ids below {vocabulary}, got {max(ids)}")
        return ids

    def _ids_of(self, prompt: Sequence[int] | str | Sequence[Mapping[str, str]]) -> list[int]:
        if not isinstance(prompt, str) and len(ids := [token for token in prompt if isinstance(token, int)]) == len(
            prompt
        ):
            return ids
        tokenizer = self.llm.get_tokenizer() if not self.llm.model_config.skip_tokenizer_init else None
        if tokenizer is None:
            raise InvalidRequestError("prompt: expected token ids, since this engine has no tokenizer")
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        try:
            return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))
        except Exception as cause:
            raise InvalidRequestError(f"messages: expected what the chat template takes, got {cause}") from cause

    async def generate(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stage: str | None = None,
        prefix: tuple[str, int] | None = None,
    ) -> AsyncIterator[Generated]:
        """Generate until the request ends; leaving the iteration early aborts it.

        Args:
            request_id: Unique among those under way.
            ids: The prompt.
            sampling: How.
            stage: Lease under which to stage the prompt's KV.
            prefix: Lease of complete blocks that need not be computed, and how many; those of `stage` begin with them.

        Raises:
            EngineFailedError: The engine's process ended.
        """
        params = sampling_params(sampling)
        if stage is not None:
            given = {"oasiskv_stage": stage} | ({} if prefix is None else {"oasiskv_prefix": list(prefix)})
            params.extra_args = {"kv_transfer_params": given}
        if self.llm.model_config.skip_tokenizer_init:
            params.detokenize = False
        outputs = self.llm.generate({"prompt_token_ids": list(ids)}, params, request_id)
        try:
            async for output in outputs:
                completion = output.outputs[0]
                yield Generated(
                    token_ids=list(completion.token_ids),
                    text=completion.text,
                    logprobs=[
                        _logprobs(*pair) for pair in zip(completion.token_ids, completion.logprobs or (), strict=False)
                    ],
                    finish_reason=completion.finish_reason,
                )
        except EngineDeadError as cause:
            raise EngineFailedError("engine: its process ended") from cause
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with the finish reason `abort`."""
        await self.llm.abort(request_id)

    async def attach_staging(self, maker: str, arguments: dict[str, Any], way: str = "") -> None:
        """Give the workers a way to staging; see `LookaheadWorker.attach_staging`.

        Raises:
            EngineFailedError: A worker could not.
        """
        try:
            await self.llm.collective_rpc("attach_staging", args=(maker, arguments, way))
        except Exception as cause:
            raise EngineFailedError(f"attach_staging: {cause}") from cause

    async def take_handover(self, lease: str) -> list[bytes]:
        """Return every rank's receipt of a request's KV, once all of it is in staging.

        Raises:
            OasisError: As `Runtime.take_handover`; what was staged is of no use then.
        """
        while True:
            states = await self.llm.collective_rpc("take_handover", args=(lease,))
            for state, message in states:
                if state not in ("staged", "under way"):
                    raise _error(state, message)
            if all(state == "staged" for state, _ in states):
                return [bytes.fromhex(receipt) for _, receipt in states]
            await asyncio.sleep(POLL_S)

    async def write_probe(self, lease: str) -> tuple[bytes, list[bytes]]:
        """Have the workers write random bytes to the one block of a lease.

        Returns:
            The digest of the bytes, and every rank's receipt.

        Raises:
            OasisError: It did not work; the block is of no use then.
        """
        parts = await self._probe(lease, writes=True)
        digest = join_digests(bytes.fromhex(digest) for digest, _ in parts)
        return digest, [bytes.fromhex(part) for _, part in parts]

    async def read_probe(self, lease: str) -> bytes:
        """Have the workers read the one block of a lease, and return the digest of its bytes.

        Raises:
            OasisError: It did not work.
        """
        return join_digests(bytes.fromhex(digest) for digest, _ in await self._probe(lease, writes=False))

    async def _probe(self, lease: str, *, writes: bool) -> list[tuple[str, str]]:
        while True:
            states = await self.llm.collective_rpc("probe_staging", args=(lease, writes))
            for state, *words in states:
                if state not in ("done", "under way"):
                    raise _error(state, words[0])
            if all(state == "done" for state, *_ in states):
                return [(digest, receipt) for _, digest, receipt in states]
            await asyncio.sleep(POLL_S)

    async def traffic(self) -> dict[str, int]:
        """Return the bytes of handovers since the start, summed over ranks."""
        ranks = await self.llm.collective_rpc("handover_bytes")
        return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Return vLLM's words for how to sample; tokens come as they are generated."""
    values = asdict(sampling)
    values["stop"], values["stop_token_ids"] = list(sampling.stop), list(sampling.stop_token_ids)
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **values)


def _logprobs(token_id: int, entries: Mapping[int, Any]) -> list[Logprob]:
    ranked = sorted(entries.items(), key=lambda item: (item[0] != token_id, item[1].rank))
    return [Logprob(token_id=token, logprob=entry.logprob, rank=entry.rank) for token, entry in ranked]


def _error(name: str, message: str) -> OasisError:
    cls = getattr(errors, name, EngineFailedError)
    assert issubclass(cls, OasisError)
    return cls(message)
