"""The words and rules of the system in plain Python: blocks, errors, configuration. No torch, grpc, kopf or vllm."""
