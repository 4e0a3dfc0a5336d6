"""From logits to tokens: filters, random numbers and the draw."""
