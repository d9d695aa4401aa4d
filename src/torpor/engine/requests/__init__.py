"""What callers ask and what they are answered: prompts, requests, completions, outputs."""
