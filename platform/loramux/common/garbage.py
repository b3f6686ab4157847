"""Garbage collection of processes that hold many objects for as long as they live."""

import gc


def freeze_garbage() -> None:
    """Exclude all objects that live now from garbage collection.

    A full collection walks every object, and the modules and models of a process that has started are a million: the
    process would stop for up to 0.4 s. In a process that forks, a collection would also copy shared pages.
    """
    gc.collect()
    gc.freeze()
