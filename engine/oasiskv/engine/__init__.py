"""The lookahead sparse backend: working sets, host pool, pipeline, counters. Only the package `vllm` inside knows vLLM."""
