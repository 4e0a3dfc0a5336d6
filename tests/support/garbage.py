"""Python's garbage collector beside models that tests load: it does not walk the tests.

Each model that is loaded or closed collects all objects (`minirt.gc_freeze`). In a process that has collected all tests
these are 900,000, and take half a second. So what there is before the first test is frozen for good. A model then freezes and
releases nothing more: what is collected when it goes is the same.
"""

import gc
import sys
from types import SimpleNamespace

from minirt import gc_freeze


def freeze_tests() -> None:
    if "transformers" in sys.modules:
        sys.modules["transformers"].LlamaForCausalLM  # noqa: B018 (its first use imports many modules)
    gc.collect()
    gc.freeze()
    gc_freeze.gc = SimpleNamespace(
        collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None, get_threshold=gc.get_threshold,
        set_threshold=gc.set_threshold, isenabled=gc.isenabled,
    )  # fmt: skip
