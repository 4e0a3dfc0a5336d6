"""`raises`: a call is refused, in these words."""

from collections.abc import Callable
from typing import Any

import pytest

from minirt.errors import InputError


def raises(words: str, call: Callable[..., object], /, *arguments: Any, error: Any = InputError, **options: Any) -> None:
    with pytest.raises(error, match=words):
        call(*arguments, **options)
