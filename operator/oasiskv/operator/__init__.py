"""The Kubernetes operator: an OasisKVService in, its objects out; docs/design/0007-operator.md says how and why."""
