"""Speculative decoding: who proposes drafts, and its options. The engine verifies drafts with its sampler."""
