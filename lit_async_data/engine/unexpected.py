"""`Unexpected`: suppresses errors of optional work, and logs the first one that indicates a bug."""

from __future__ import annotations

import logging
import threading
import traceback
import types

from lit_async_data.errors import SourceError

PREPARING = "preparing batches that come later failed; they are read all the same"
COALESCING = "reading several batches together failed, and each of them alone did not"


class Unexpected:
    """Suppresses errors of the ``with`` block, and logs the first unexpected one with its traceback.

    For optional work, such as reading ahead: if the data are bad, the required read raises the error later.
    """

    def __init__(self, log: logging.Logger, what: str, expected: type[Exception] = SourceError) -> None:
        self._log = log
        self._what = what
        self._expected = expected
        self._unlogged = [True]  # empty once an error was logged

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.log_error(error)
        return True

    def log_error(self, error: Exception) -> None:
        """Logs an error that was caught. Costs less than a ``with`` block."""
        # At interpreter exit, modules and files that a daemon thread uses are closed before the thread ends.
        if not isinstance(error, self._expected) and threading.main_thread().is_alive():
            self.log("".join(traceback.format_exception(error)))

    def log(self, trace: str) -> None:
        """Logs an error the first time only, by the text of its traceback, which keeps no frames alive."""
        try:
            # In one step: 1. Two threads see that nothing was logged. 2. Both log. See
            # test_of_two_threads_with_an_unexpected_error_one_logs_it.
            self._unlogged.pop()
        except IndexError:
            return
        self._log.warning(
            "%s. This is a bug, of lit_async_data or of the source; please report:\n%s", self._what, trace
        )
