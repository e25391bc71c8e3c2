"""Keeps Python's garbage collector away from the runtime's lock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collects garbage now, and none until the block ends.

    TensorRT-RTX 1.7.1 calls our log while it holds a lock. If the collector runs in there and
    finds an old builder in a cycle (a traceback is one), that builder's end waits for the same
    lock: the process stands still for ever. May go when builders end without that lock.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
