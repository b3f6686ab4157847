"""How far loading is: on a terminal one line that moves, elsewhere a line of the log every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from transformers.utils.logging import set_tqdm_hook

logger = logging.getLogger(__name__)

FIRST_AFTER_S = 2.0
"""Loading that takes no longer says nothing."""
LOG_EVERY_S = 5.0
REDRAW_EVERY_S = 0.2

Item = TypeVar("Item")


class LoadingProgress:
    """Reports the stages of loading one model, each a walk over its parts."""

    def __init__(
        self,
        model: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream`: where a line may move, if it is a terminal; None: stderr."""
        self._model = model
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._next_at = self._began + FIRST_AFTER_S
        self._has_said = False

    @classmethod
    def silent(cls) -> LoadingProgress:
        """Return one that reports nothing: for the ranks above 0, and for models that are not served."""
        progress = cls("")
        progress._next_at = float("inf")
        return progress

    def track(self, stage: str, items: Collection[Item]) -> Iterator[Item]:
        """Go through `items`, which are alike in work, and report how many of them are done."""
        for done, item in enumerate(items):
            self._report(stage, done / len(items))
            yield item

    @contextmanager
    def of_transformers(self, stage: str) -> Iterator[None]:
        """Report the weights that transformers loads meanwhile on this thread. Its hook is the whole process's."""

        def hook(factory: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if keywords.get("desc") == "Loading weights":
                return self.track(stage, args[0])
            return factory(*args, **keywords)

        before = set_tqdm_hook(hook)
        try:
            yield
        finally:
            set_tqdm_hook(before)

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Take the line away; if anything was said, log how long it took."""
        if not self._has_said:
            return
        self._draw("")
        if failure is None:
            logger.info("loaded %s in %.1f s", self._model, self._clock() - self._began)

    def _report(self, stage: str, share: float) -> None:
        now = self._clock()
        if now < self._next_at:
            return
        self._has_said = True
        text = f"loading {self._model}: {stage}, {share:.0%}, {now - self._began:.0f} s"
        if self._stream.isatty():
            self._draw(text)
            self._next_at = now + REDRAW_EVERY_S
        else:
            logger.info(text)
            self._next_at = now + LOG_EVERY_S

    def _draw(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
