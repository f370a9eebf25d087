"""Version 1; `decode.proto` is the source, `make protos` writes the rest."""
