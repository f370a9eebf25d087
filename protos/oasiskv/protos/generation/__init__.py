"""What the contracts of services that generate text have in common."""
