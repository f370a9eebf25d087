"""The lookahead sparse backend: working sets, host pool, pipeline, counters. Only its package `vllm` knows vLLM."""
