"""Where weights come from: safetensors, GGUF, the embedded model, the cache of converted ones."""
