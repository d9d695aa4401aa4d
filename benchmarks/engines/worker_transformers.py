"""Worker: Hugging Face transformers, ``generate``."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
import worker_common


class Engine:
    """One loaded model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Complete prompts of one length greedily, all at once."""
        (length,) = {len(prompt) for prompt in prompts}
        start_s = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        token_ids = out[:, length:].tolist()
        return {"elapsed_s": time.perf_counter() - start_s, "token_ids": token_ids}


def start(options: argparse.Namespace) -> worker_common.Started:
    """Load the model."""
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    # Without an end token nothing ends early, and nothing is masked to keep it from ending.
    model.generation_config.eos_token_id = None
    facts = worker_common.facts(
        {"attention": model.config._attn_implementation}, transformers=transformers.__version__
    )
    return facts, {"generate": Engine(model).generate}


if __name__ == "__main__":
    worker_common.main(__doc__, start)
