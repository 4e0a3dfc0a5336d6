"""The last stage of a step: its tokens, for the sequences and for callers."""
