"""The contract of the decode service."""
