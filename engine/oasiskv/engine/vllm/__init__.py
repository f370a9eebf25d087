"""How OasisKV plugs into an unmodified vLLM 0.32.0; the only package that imports it."""
