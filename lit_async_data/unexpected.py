"""`Unexpected`: errors that must not stop what goes on, of which those that nobody foresaw are logged."""

from __future__ import annotations

import logging
import threading
import traceback
import types

from lit_async_data.errors import SourceError


class Unexpected:
    """Suppresses errors of the ``with`` block. The first that was not to be expected is logged, with its traceback.

    Args:
        log: Where to.
        what: What failed, and what follows from it, for the message.
        expected: Errors that are raised again elsewhere, and need no line here.

    Example:
        >>> ahead = Unexpected(logging.getLogger("example"), "reading ahead failed")
        >>> with ahead:
        ...     raise SourceError("the disk is gone")
    """

    def __init__(self, log: logging.Logger, what: str, expected: type[Exception] = SourceError) -> None:
        self._log = log
        self._what = what
        self._expected = expected
        self._logged = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        # At the interpreter's exit, what a daemon thread uses has been closed before the thread ends.
        if not isinstance(error, self._expected) and threading.main_thread().is_alive():
            self.log("".join(traceback.format_exception(error)))
        return True

    def log(self, trace: str) -> None:
        """Log an error once, given as the text of its traceback, which refers to no frame."""
        if not self._logged:
            self._logged = True
            self._log.warning(
                "%s. This is a bug, of lit_async_data or of the source; please report:\n%s", self._what, trace
            )
