"""The prefill service: prompts in, their KV in staging out; `docs/design/0004` says how and why."""
