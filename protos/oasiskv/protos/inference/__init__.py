"""The Open Inference Protocol."""
