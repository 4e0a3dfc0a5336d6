"""Text to token ids and back: tokenizer, detokenizer, stop strings."""
