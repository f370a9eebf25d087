"""The decode service: text out of prompts that prefill services computed; `docs/design/0004` says how and why."""
