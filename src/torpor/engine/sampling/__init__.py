"""From logits to a token: masks, penalties, filters, noise, log probabilities, grammars."""
