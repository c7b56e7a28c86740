"""`CacheFolder`: files that save work the next time, in a folder of the user's.

A file holds a head in plain text, which names the data, a body, and the CRC-32 of both. It is used only if the same
head would be written now. A file that a crash or a full disk has cut short is detected when it is read, so writing
needs no fsync.
"""

from __future__ import annotations

import logging
import os
import zlib

from lit_async_data import system
from lit_async_data.errors import ConfigError

_log = logging.getLogger(__name__)


class CacheFolder:
    """Kept files in a folder, which is made if it does not exist. Messages call them ``what``."""

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"{folder!r} is not a folder; give its path, or None", "cache_dir")
        path = os.path.abspath(os.path.expanduser(folder))
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            found = os.stat(path)
        except OSError as error:
            text = f"{path} cannot be made: {error.strerror}; give another folder"
            raise ConfigError(text, "cache_dir", file=path) from error
        if (owner := found.st_uid) != system.user_id():  # whoever writes a file decides which values are read
            text = f"{path} belongs to user {owner}, and you are {system.user_id()}; give a folder of yours"
            raise ConfigError(text, "cache_dir", file=path)
        if os.name == "posix" and found.st_mode & 0o022:
            text = f"others may write to {path}; forbid it (chmod go-w), or give another folder"
            raise ConfigError(text, "cache_dir", file=path)
        self._path, self._what = path, what

    def load(self, of: str, name: str, head: bytes) -> bytes | None:
        """The body of a file with this head; None if there is none."""
        path = os.path.join(self._path, name)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            return None
        if not data.startswith(head) or data[-4:] != zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little"):
            _log.info("%s: the %s in %s is damaged or of another state; building it again", of, self._what, path)
            return None
        return data[len(head) : -4]

    def store(self, of: str, name: str, head: bytes, body: bytes) -> None:
        """Keep a file. Processes may do so at once, and failing to do so is no error."""
        import secrets

        path, data = os.path.join(self._path, name), head + body
        new = f"{path}.{secrets.token_hex(8)}"
        try:
            with open(new, "xb") as file:
                file.write(data + zlib.crc32(data).to_bytes(4, "little"))
            os.replace(new, path)
        except OSError as error:
            _log.warning("%s: its %s cannot be kept in %s: %s", of, self._what, path, str(error))
        finally:
            try:  # noqa: SIM105  # an interrupt can come when `suppress` is called, before anything is removed
                os.unlink(new)
            except OSError:
                pass
