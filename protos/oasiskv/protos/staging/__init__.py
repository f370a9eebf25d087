"""The contract of the staging tier."""
