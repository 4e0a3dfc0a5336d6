"""Limits of the sampler's kernels, for code that imports no Triton and no torch."""

MOST_ENTRIES = 4096  # of a slot's biases, of its forbidden tokens, and of the tokens before the last ones of bad words
MAX_TOP = 20  # the most tokens that the kernels of log-probabilities list for each row
