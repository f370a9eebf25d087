"""Version 1 of the staging contract; `staging.proto` is the source, `make protos` writes the rest."""
