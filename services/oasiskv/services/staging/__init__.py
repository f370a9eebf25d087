"""The staging tier: `servicer` translates, `service` decides, `memory` holds the bytes, `core.leases` the rules."""
