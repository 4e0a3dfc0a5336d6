"""Structured output: grammars that a request's text must follow, compiled by `llguidance` to masks of tokens."""
