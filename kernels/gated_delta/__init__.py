"""Gated DeltaNet: causal convolution, gated delta rule and gated norm, on a state for each sequence."""
