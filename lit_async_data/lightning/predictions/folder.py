"""`ResultFolder`: the folder of the predictions, which appears at once when all of them are written."""

from __future__ import annotations

import os
import re

from lit_async_data import system
from lit_async_data.errors import AsyncDataError, ConfigError

# Files that a run may leave in its temporary folder.
OWN_FILE = re.compile(r"predictions(_\d+)?(\.part-\d+)?\.(parquet|h5)")


class ResultFolder:
    """A folder for results, and the temporary folder ``PATH.partial`` beside it that is renamed to it at the end.

    Args:
        path: The folder. It may exist if it is empty.

    Attributes:
        path: The folder, as given, with ``~`` expanded.
        partial: The temporary folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as base:
        ...     folder = ResultFolder(base + "/results")
        ...     folder.begin()
        ...     with open(folder.file("predictions.h5"), "w") as file:
        ...         _ = file.write("results")
        ...     folder.publish()
        ...     os.listdir(base), os.listdir(folder.path)
        (['results'], ['predictions.h5'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.expanduser(os.fspath(path)).rstrip("/") or "/"
        self.partial = f"{self.path}.partial"
        self._lock: int | None = None

    def file(self, name: str) -> str:
        """The path of a file in the temporary folder."""
        return os.path.join(self.partial, name)

    def check_free(self) -> None:
        """Check that there is no result yet.

        Raises:
            ConfigError: There is something at the path, or a file system is mounted there.
        """
        if os.path.ismount(self.path):
            raise ConfigError(
                f"path: {self.path} is a mount point, which a finished folder cannot replace; give PredictionWriter a "
                "path inside it",
                file=self.path,
            )
        empty = os.path.isdir(self.path) and not os.path.islink(self.path) and not os.listdir(self.path)
        if os.path.lexists(self.path) and not empty:
            raise ConfigError(
                f"path: {self.path} exists, and predictions are never overwritten; move or delete it, or give "
                "PredictionWriter another path",
                file=self.path,
            )

    def begin(self) -> None:
        """Make the temporary folder, without what a run that ended early has left in it.

        Raises:
            ConfigError: The folder cannot be made, another run is writing there, or somebody else's files lie there.
        """
        try:
            os.makedirs(self.partial, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"path: the folder {self.partial} cannot be made: {error.strerror}; give PredictionWriter a path in a "
                "folder that you may write to",
                file=self.partial,
            ) from error
        try:
            self._lock = system.lock_folder(self.partial)
        except BlockingIOError:
            raise ConfigError(
                f"path: another run is writing to {self.partial}; wait for its end, or give PredictionWriter another "
                "path",
                file=self.partial,
            ) from None
        names = os.listdir(self.partial)
        for name in names:
            if not OWN_FILE.fullmatch(name):
                self.release()
                raise ConfigError(
                    f"path: {self.file(name)} is not of PredictionWriter, which needs this folder for itself; move the "
                    "file, or give another path",
                    file=self.file(name),
                )
        for name in names:
            os.unlink(self.file(name))

    def publish(self) -> None:
        """Rename the temporary folder, with what it holds, to the result.

        Raises:
            OSError: The files cannot be written to the disk.
            AsyncDataError: Meanwhile there is something at the path.
        """
        for name in os.listdir(self.partial):
            system.write_through(self.file(name))
        system.write_through(self.partial)
        try:
            os.rename(self.partial, self.path)
        except OSError as error:
            raise AsyncDataError(
                f"{self.path}: {error.strerror}; the predictions are complete and lie in {self.partial}: rename that "
                "folder before you predict again, or it will be cleared",
                file=self.partial,
            ) from error
        system.write_through(os.path.dirname(os.path.abspath(self.path)))
        self.release()

    def release(self) -> None:
        """Let other runs write there. A second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
