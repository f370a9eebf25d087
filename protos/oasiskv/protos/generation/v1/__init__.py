"""Version 1; `generation.proto` is the source, `make protos` writes the rest."""
