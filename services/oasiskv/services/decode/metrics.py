"""What the decode service shows at `/metrics`; names and labels are a part of its interface."""

from prometheus_client.metrics_core import Metric

from oasiskv.core.service_config import DecodeConfig
from oasiskv.services.decode.choice import REASONS
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.engine_metrics import counter, gauge, kv_bytes
from oasiskv.services.rpc.metrics import LoopCollector

OUTCOMES = ("handed_over", "finished", "recomputed", "lost")


class DecodeCollector(LoopCollector):
    """Reads a decode service."""

    def __init__(self, config: DecodeConfig, service: DecodeService, router: Router) -> None:
        """Be made in the event loop of the service."""
        super().__init__()
        self._config = config
        self._service = service
        self._router = router

    async def _read(self) -> list[Metric]:
        service, router, revision = self._service, self._router, self._config.revision
        peers = router.peers.all
        states = {
            "verified": sum(peer.is_usable for peer in peers),
            "unverified": sum(peer.is_ready and not peer.is_verified for peer in peers),
            "not_ready": sum(not peer.is_ready for peer in peers),
        }
        prefills = gauge("decode_prefills", "Prefill services known", states["verified"], state="verified")
        for state in ("unverified", "not_ready"):
            prefills.add_sample("oasiskv_decode_prefills", {"state": state}, states[state])
        return [
            gauge("decode_info", "This process", 1, revision=revision),
            gauge("decode_ready", "1 if requests are taken and KV comes through", service.is_ready),
            gauge("decode_draining", "1 if new requests are refused", service.is_draining),
            gauge("decode_inflight", "Requests under way, of all fronts", service.num_requests),
            gauge("decode_leases", "Requests that read KV in staging", router.num_leases),
            prefills,
            gauge(
                "decode_kv_path_verified",
                "1 if a probe block came through from some prefill service",
                states["verified"] > 0,
                revision=revision,
            ),
            *kv_bytes("decode", self._config.fingerprint.block_bytes),
            counter(
                "decode_handovers",
                "Long prompts by what came of them",
                "outcome",
                dict.fromkeys(OUTCOMES, 0) | router.outcomes,
            ),
            counter(
                "decode_prefill_choices",
                "Long prompts by why a prefill service was the first that was asked",
                "reason",
                {why: router.choices[why] for why in REASONS},
            ),
            counter("decode_prefill_errors", "Attempts at a prefill service that failed", "error", dict(router.errors)),
            counter("decode_kv_path_checks", "Probe blocks by what came of them", "result", dict(router.peers.checks)),
        ]
