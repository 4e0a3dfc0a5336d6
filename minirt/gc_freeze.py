"""`freeze_gc`: keeps Python's garbage collector away from a loaded model.

A full collection walks every object of PyTorch and of the model. It takes 0.1 s, during which the host launches no step and the
GPU idles. So objects that live as long as the model are frozen (`gc.freeze`, as in vLLM). Later objects are collected as usual,
but not several times in each step: a step of 256 sequences makes some thousands of objects, and drops them again.
"""

import gc
import threading
import weakref

_lock = threading.RLock()  # reentrant: the collection in `freeze_gc` may finalize an owner, which calls `_release`
_held = 0
_OBJECTS = 20_000  # new objects before a collection, while a model is loaded; Python's default is 700 or 2,000
_before: int | None = None  # the number of objects that was replaced


def freeze_gc(owner: object) -> weakref.finalize:
    """Freeze all existing objects until `owner` is collected or the returned finalizer is called.

    The release unfreezes all objects and collects, because the owner's objects may form reference cycles. If other owners
    remain, the surviving objects are frozen again.
    """
    global _held, _before
    with _lock:
        _held += 1
        if gc.isenabled():  # not in a load whose process has only imported modules before (`head_start`)
            gc.collect()
        gc.freeze()
        objects, *others = gc.get_threshold()
        if 0 < objects < _OBJECTS:  # 0: the program has switched it off
            _before = objects
            gc.set_threshold(_OBJECTS, *others)
    release = weakref.finalize(owner, _release)
    release.atexit = False  # an exiting process needs no collection
    return release


def _release() -> None:
    global _held, _before
    with _lock:
        _held -= 1
        gc.unfreeze()
        gc.collect()
        if _held:
            gc.freeze()
            return
        objects, *others = gc.get_threshold()
        if _before is not None and objects == _OBJECTS:  # else the program has set another one since
            gc.set_threshold(_before, *others)
        _before = None
