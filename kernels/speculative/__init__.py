"""Drafts for speculative decoding, proposed on the device from the table of slots."""
