"""`freeze_gc`: keeps Python's garbage collector out of the way of a loaded model.

A full collection walks every object that PyTorch and a model are made of: 0.1 s, now and then, in which no step is launched, so
that the GPU waits. What lives as long as the model is frozen (`gc.freeze`, as vLLM does); what comes later is collected as ever.
"""

import gc
import threading
import weakref

_lock = threading.RLock()  # an owner may be collected within `freeze_gc`
_held = 0


def freeze_gc(owner: object) -> weakref.finalize:
    """Freeze all there is until `owner` is collected or the result is called, whichever comes first.

    When an owner lets go, the rest is thawed and collected, since it may lie in cycles, and frozen again if others hold it.
    """
    global _held
    with _lock:
        _held += 1
        gc.collect()
        gc.freeze()
    release = weakref.finalize(owner, _release)
    release.atexit = False  # a process that ends needs no collection
    return release


def _release() -> None:
    global _held
    with _lock:
        _held -= 1
        gc.unfreeze()
        gc.collect()
        if _held:
            gc.freeze()
