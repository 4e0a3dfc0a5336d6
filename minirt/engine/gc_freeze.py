"""`freeze_gc`: keeps Python's garbage collector away from a loaded model.

A full collection walks every object of PyTorch and of the model. It takes 0.1 s, during which the host launches no step and the
GPU idles. So objects that live as long as the model are frozen (`gc.freeze`, as in vLLM). Later objects are collected as usual.
"""

import gc
import threading
import weakref

_lock = threading.RLock()  # reentrant: the collection in `freeze_gc` may finalize an owner, which calls `_release`
_held = 0


def freeze_gc(owner: object) -> weakref.finalize:
    """Freeze all existing objects until `owner` is collected or the returned finalizer is called.

    The release unfreezes all objects and collects, because the owner's objects may form reference cycles. If other owners
    remain, the surviving objects are frozen again.
    """
    global _held
    with _lock:
        _held += 1
        gc.collect()
        gc.freeze()
    release = weakref.finalize(owner, _release)
    release.atexit = False  # an exiting process needs no collection
    return release


def _release() -> None:
    global _held
    with _lock:
        _held -= 1
        gc.unfreeze()
        gc.collect()
        if _held:
            gc.freeze()
