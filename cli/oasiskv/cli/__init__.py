"""The `oasiskv` command."""
