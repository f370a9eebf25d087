"""What the prefill service shows at `/metrics`; names and labels are a part of its interface."""

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from oasiskv.core.service_config import PrefillConfig
from oasiskv.services.engine_metrics import counter, gauge, kv_bytes
from oasiskv.services.prefill.service import PrefillService
from oasiskv.services.rpc.metrics import LoopCollector

OUTCOMES = ("handed_over", "finished")


class PrefillCollector(LoopCollector):
    """Reads a prefill service."""

    def __init__(self, config: PrefillConfig, service: PrefillService) -> None:
        """Be made in the event loop of the service."""
        super().__init__()
        self._config = config
        self._service = service

    async def _read(self) -> list[Metric]:
        service, counts = self._service, self._service.counts
        return [
            gauge("prefill_info", "This process", 1, revision=self._config.revision),
            gauge("prefill_ready", "1 if requests are taken and their KV has a way out", service.is_ready),
            gauge("prefill_draining", "1 if new requests are refused", service.is_draining),
            gauge("prefill_inflight", "Requests under way", service.num_requests),
            gauge("prefill_queued_tokens", "Prompt tokens that are not computed yet", service.num_waiting_tokens),
            *kv_bytes("prefill", self._config.fingerprint.block_bytes),
            counter(
                "prefill_handovers",
                "Prompts by what came of them",
                "outcome",
                dict.fromkeys(OUTCOMES, 0) | counts.outcomes,
            ),
            CounterMetricFamily("oasiskv_prefill_prompt_tokens", "Tokens of prompts", counts.num_prompt_tokens),
            CounterMetricFamily(
                "oasiskv_prefill_loaded_tokens", "Of these, found in staging and not computed", counts.num_loaded_tokens
            ),
        ]
