"""The contract of the prefill service."""
