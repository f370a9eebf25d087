"""Processes that serve others over gRPC: `rpc` runs any of them, `clients` calls them, one folder each is a service."""
