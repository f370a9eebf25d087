"""Version 2; `inference.proto` is the source, `make protos` writes the rest."""
