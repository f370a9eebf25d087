"""The names by which vLLM and OasisKV find one another, for those who do not import vLLM."""

VLLM_VERSION = "0.32.0"
"""The one release whose interfaces the plugin was written for and is tested with."""

CONNECTOR = "OasisKVConnector"
WORKERS = {"cpu": "oasiskv.engine.vllm.cpu.Worker", "cuda": "oasiskv.engine.vllm.cuda.Worker"}
"""The worker class of each build of vLLM."""

HANDOVER = "handover"
"""Beside the settings in `kv_connector_extra_config`: true where the background is to be made such that requests may be
handed over. On a CPU it always is."""

HANDOVER_DEVICES = ("cpu", "cuda")
"""Devices whose engines hand requests over; `Runtime.attach` refuses the others."""
