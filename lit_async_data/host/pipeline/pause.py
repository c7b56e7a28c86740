"""`Pause`: a time in which workers begin nothing, which always ends."""

from __future__ import annotations

import time

from lit_async_data.threads import Gate


class Pause:
    """Lets workers wait until it is ended, or until its time is over. Thread-safe.

    Args:
        seconds: The longest that it lasts, so that a consumer who goes away stops no worker for ever.

    Example:
        >>> pause = Pause(60.0)
        >>> pause.over
        False
        >>> pause.end()
        >>> pause.wait()  # returns at once
        >>> pause.over
        True
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._ended = Gate()

    @property
    def over(self) -> bool:
        """Whether workers may go on."""
        return time.monotonic() >= self._until or self._ended.wait(0.0)

    def wait(self) -> None:
        """Wait until it is over."""
        self._ended.wait(max(self._until - time.monotonic(), 0.0))

    def end(self) -> None:
        """Let all workers go on. Idempotent."""
        self._ended.open()
