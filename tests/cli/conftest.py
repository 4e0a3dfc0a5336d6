"""Fixtures of the tests of the command line."""

import pytest
from support.tiny import add_tokenizer


@pytest.fixture(scope="session")
def endless(hf_folder):
    """A model with so many positions that generation does not end during a test."""
    return add_tokenizer(hf_folder("Llama", max_position_embeddings=1 << 18))
