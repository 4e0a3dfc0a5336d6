"""Mixtures of experts: the router's choice, tokens sorted by expert, products by expert, and their sum."""
