"""Generation: the ``LLM`` face, runner, KV cache, sampler, tokenizer and chat template."""
