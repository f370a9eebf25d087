"""Version 1; `prefill.proto` is the source, `make protos` writes the rest."""
