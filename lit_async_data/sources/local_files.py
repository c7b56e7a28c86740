"""Local files: paths and addresses, descriptors, patterns of names, retries, lists of bad samples, the cache folder.

CPython runs signal handlers between Python instructions, also between ``os.open`` and the assignment of its result: an
interrupt (Ctrl-C) there leaks the descriptor. So C code calls ``os.open`` and stores the result. A file object closes
its descriptor when it is freed.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import glob
import hashlib
import io
import json
import logging
import os
import re
import reprlib
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import ChangedError, ConfigError, MissingError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import refuse_flags
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.table.formats import named, printable_path

ADVICE = {
    errno.EMFILE: "this process may open no more files: raise its limit (ulimit -n), or read fewer files at once",
    errno.ENFILE: "this machine may open no more files: close other programs, or raise fs.file-max",
}


def advice_on(error: BaseException | None) -> str | None:
    """What to do if the system had no descriptor left; None for another error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in ADVICE:
            return f"{os.strerror(error.errno)}; {ADVICE[error.errno]}"
        error = error.__cause__
    return None


def file_state(path: str) -> tuple[int, int, int]:
    """Inode, bytes and time of a file."""
    with opening_errors(path):
        status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def changed_error(path: str) -> ChangedError:
    what = "changed since the source was built; build the source again"
    return ChangedError(f"{printable_path(path)}: {what}", file=named(path))


def raise_if_none_left(error: OSError) -> None:
    """For ``onerror`` of ``os.walk``: unreadable folders are skipped, but not for want of descriptors."""
    if error.errno in ADVICE:
        raise error


# Beginnings of addresses, such as s3://bucket/x.h5, also with a slash too few or turned, and of Windows paths.
_ADDRESS = re.compile(r"(\w+::)*[A-Za-z][A-Za-z0-9+.\-]+:(//|[/\\])|data:")
_WINDOWS = re.compile(r"[A-Za-z]:[/\\]|\\\\")


def is_address(path: str) -> bool:
    found = _ADDRESS.match(path)
    return found is not None and found[0].endswith("//") and not path.startswith("file://")


def expanded(path: str, root: str = "") -> str:
    """A path with ``~`` and ``$NAME`` expanded, unless a file has that very name; the path of a ``file://`` address."""
    if path.startswith(("file:///", "file://localhost/")):
        return urllib.parse.unquote(path.removeprefix("file://").removeprefix("localhost"))
    return path if os.path.lexists(os.path.join(root, path)) else os.path.expandvars(os.path.expanduser(path))


def not_local(path: str) -> str:
    """Why a path cannot name a file of this machine; empty if it can."""
    if os.name != "nt" and _WINDOWS.match(path):
        return "a path of Windows; give the path that leads there on this system, such as /mnt/c/…, or paths below root"
    if path.startswith("file:") and not os.path.lexists(path):
        return "no address of a file; write file:///… with the absolute path, or the path alone"
    if found := _ADDRESS.match(path):
        both = found[0].endswith("//")
        cure = "give a path of this machine" if both else "write s3://… with both slashes, as text and no pathlib.Path"
        return f"an address, not a path; {cure}"
    return ""


def local_path(given: str | os.PathLike[str]) -> str:
    """The absolute path; an address is a `MissingError` that says how to fetch it."""
    path = expanded(os.fspath(given))
    if why := not_local(path) or "no path: it holds a NUL" * ("\0" in path):
        raise MissingError(f"{path!r}: {why}" if "\0" in path else f"{path}: {why}", file=path)
    return os.path.abspath(path)


# Files that users give by mistake: first bytes, description, and advice.
_MISTAKEN = {
    rb"version https://git-lfs": "a pointer of Git LFS; fetch the file by git lfs pull",
    rb"(?i)\s*<(!doctype html|html)": "a web page, as a failed download leaves; fetch the file again",
    rb"\s*(<\?xml[^>]*>\s*)?<Error>": "the error of a store, as a failed download leaves; fetch the file again",
    rb"PK\x03\x04": "a ZIP archive, as .npz files and spreadsheets are; store arrays as .npy, and tables as CSV",
    rb"\x1f\x8b": "compressed by gzip; unpack it, or name a table .csv.gz; nibabel reads .nii.gz, in a DatasetSource",
    rb"(?s).{128}DICM": "DICOM; convert it to PNG of 16 bits or .npy, or read it by pydicom in a DatasetSource",
    rb"(?s).{344}n[+i]1\0": "NIfTI; convert it to HDF5 or .npy, or read it by nibabel in a DatasetSource",
    rb"(?s)RIFF.{4}WAVE": "a WAV recording; write all into HDF5 once, or read it by soundfile in a DatasetSource",
    rb"(?s).{4}ftyp(hei|hev|mif|msf|avi)": "a HEIC or AVIF image; convert it to JPEG or PNG, as pillow-heif does",
    rb"%PDF": "a PDF; convert its pages to images",
    rb"(?i)\s*(<\?xml[^>]*>\s*)?<svg": "an SVG drawing; convert it to PNG",
    rb"\x89HDF\r\n": "an HDF5 file; read it by HDF5Source, or in a table by kind: hdf5",
    rb"\x93NUMPY": "a .npy array; name it in a table for ManifestSource, by kind: npy",
    rb"PAR1": "a Parquet table; give it to ManifestSource",
}
SEPARATORS = "; folders are separated by / here"  # after the path of a missing file that has backslashes
HEAD_BYTES = 400  # that `mistaken` needs


def mistaken(head: bytes) -> str:
    """Description and advice for a file that was given by mistake, by its first bytes; empty for other files."""
    return next((what for pattern, what in _MISTAKEN.items() if re.match(pattern, head)), "")


@contextlib.contextmanager
def opening_errors(path: str, verb: str = "opened") -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise MissingError(f"{printable_path(path)}: cannot be {verb}: {error.strerror}", file=named(path)) from error
    except (OSError, SourceError) as error:
        if (advice := advice_on(error)) is None:
            raise
        raise SourceError(f"{printable_path(path)}: cannot be {verb}: {advice}", file=named(path)) from error


# File systems that store times in seconds cannot tell two changes within this time apart.
RECENT_NS = 2 * 10**9


def open_into(opened: list[int], path: str, flags: int) -> None:
    """Append the descriptor to a list, which the caller closes."""
    opened.extend(map(os.open, (path,), (flags,)))


def opening(path: str, flags: int = 0) -> io.FileIO:
    def opener(path: str, more: int) -> int:
        (descriptor,) = map(os.open, (path,), (flags | more,))
        return descriptor

    return open(path, "rb", buffering=0, opener=opener)


def changed_recently(*times_ns: int) -> bool:
    """Whether a file with these times may change again without a new time."""
    return abs(time.time_ns() - max(times_ns)) < RECENT_NS


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards and no file has that very name."""
    return glob.has_magic(path) and not os.path.exists(path)


def ends_of(unit: str) -> list[str]:
    """The names of a file or group: its path and every end of the path; of a file, also without the suffix."""
    _, *parts = f"/{unit.strip('/')}".split("/")
    names = [f"/{unit.strip('/')}", *("/".join(parts[first:]) for first in range(len(parts)))]
    return [*(os.path.splitext(each)[0] for each in names if os.path.isabs(unit)), *names]


def natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts scan2 before scan10."""
    return [(piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in re.split(r"(\d+)", path)]


def has_word(name: str, pattern: str, *, whole: bool = False) -> bool:
    """Whether the last component of a name, or any, has a word of a pattern; ``testImages_1`` has test, images, 1."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name if whole else name.rpartition("/")[2])
    return any(re.fullmatch(pattern, word.lower()) for word in found)


def files_matching(pattern: str) -> list[str]:
    """In natural order, without folders; hidden names only where the pattern writes the dot."""
    with opening_errors(pattern, "listed"):
        try:
            os.scandir(folder_of(pattern) or ".").close()  # ``glob`` treats folders that it cannot read as empty
        except OSError as error:
            raise_if_none_left(error)
    found = set(glob.glob(pattern, recursive=True))
    files = sorted((path for path in found if not os.path.isdir(path)), key=natural)
    if not files:
        what = f"matches folders only; for the files in them write {pattern}/*" if found else "matches no file"
        raise MissingError(f"{pattern}: {what}; check the pattern{SEPARATORS * (chr(92) in pattern)}", file=pattern)
    return files


def folder_of(pattern: str) -> str:
    """The folder in front of the first wildcard."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


# Errors of a file server that fails over, and answers again after a while.
TRANSIENT = (errno.EIO, errno.ESTALE)
PAUSE_S = 0.1
# libhdf5 writes the number into its message; h5py sets it as an attribute only on errors of opening a file.
_ERRNO = re.compile(r"\berrno = (\d+)")

_T = TypeVar("_T")


def errno_of(error: BaseException) -> int | None:
    """The system's error number behind an error; None if the system did not cause it."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _ERRNO.search(str(error))
    return int(found[1]) if found and int(found[1]) else None


def retry_once(read: Callable[[], _T]) -> _T:
    """Call a function, and once more after a pause if it fails with a `TRANSIENT` error."""
    try:
        return read()
    except OSError as error:
        if errno_of(error) not in TRANSIENT:
            raise
    time.sleep(PAUSE_S)
    return read()


COLUMNS = ("source", "file", "dataset", "row", "id", "path", "cause")
# jsonargparse makes text of a list, if it may be a path.
Exclude = Sequence[int] | str | os.PathLike[str] | Indices | npt.NDArray[np.bool_]


def bad_sample(source: Source, sample: int, error: BaseException) -> dict[str, str | int | None]:
    """A line of a list of bad samples; ``sample`` is a number as `Source.locate` takes it."""
    place: Any = source.locate([sample])[0]
    name, path = getattr(place, "id", None), getattr(place, "path", None)
    name, cause = int(sample) if name is None else name, " ".join(str(error).split())
    return dict(zip(COLUMNS, (source.name, place.file, place.group, place.row, name, path, cause), strict=True))


class StoredSamples(NamedTuple):
    """Consecutive samples of a source. If each is a group or dataset, ``names`` replace the ``*`` in ``group``."""

    file: str
    group: str
    rows: int
    row_of: Indices
    names: npt.NDArray[np.bytes_] | None = None


def kept_samples(
    exclude: Exclude, parts: Sequence[StoredSamples], name: str, paths_of: Callable[[int], Sequence[str]] = lambda _: ()
) -> npt.NDArray[np.bool_]:
    starts = np.cumsum([0, *(len(part.row_of) for part in parts)])
    kept = np.ones(int(starts[-1]), np.bool_)
    if isinstance(exclude, str | os.PathLike):
        absent = []
        for number, path_of in _listed(exclude, parts, name).items():
            file, _, rows, row_of, _ = parts[number]
            absent += [f"row {row} of {file}" for row in path_of if not 0 <= row < rows]
            for place in np.flatnonzero(np.isin(row_of, list(path_of))).tolist():
                sample, row = int(starts[number]) + place, int(row_of[place])
                names = list(map(os.path.basename, paths_of(sample) if path_of[row] else ()))
                if names and os.path.basename(path_of[row]) not in names:
                    absent.append(f"{path_of[row]} in row {row} of {file}")
                kept[sample] = False
        if absent:
            raise _error(f"{name} has no {few(absent)}; if it has changed, check it again for a new list")
    else:
        numbers = np.asarray(exclude)
        if numbers.dtype == np.bool_ and numbers.shape == kept.shape:
            numbers = np.flatnonzero(numbers)
        elif numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            what = f"{reprlib.repr(exclude)} is neither the path of a list nor a list of sample numbers"
            raise _error(f"{what}, nor a mask of {len(kept)}")
        else:
            refuse_flags(numbers, len(kept), "it", "exclude")
        if wrong := numbers[(numbers < 0) | (numbers >= len(kept))].tolist():
            raise _error(f"without it, {name} has samples 0 to {len(kept) - 1}, not {few(wrong)}")
        kept[numbers.astype(np.int64)] = False
    if not kept.any():
        raise _error(f"leaves out all samples of {name}")
    return kept


def _listed(exclude: str | os.PathLike[str], parts: Sequence[StoredSamples], name: str) -> dict[int, dict[int, str]]:
    """For each part, the path of each listed row."""
    given = local_path(exclude)
    lines = [line for path in (files_matching(given) if is_pattern(given) else [given]) for line in _lines_of(path)]
    same = _same_files({file for file, *_ in lines}, {part.file for part in parts})
    places: dict[tuple[str, str], tuple[int, int | None]] = {}
    for number, part in enumerate(parts):
        places[part.file, part.group.strip("/")] = number, None
        for row, group in enumerate(() if part.names is None else part.names.tolist()):
            places[part.file, part.group.replace("*", group.decode(errors="surrogateescape"))] = number, row
    found: dict[int, dict[int, str]] = {}
    for file, group, row, path in lines:
        if (place := places.get((same.get(file, ""), group.strip("/")))) is not None:
            found.setdefault(place[0], {})[row if place[1] is None else place[1]] = path
    if lines and not found:
        raise _error(f"{given} names no sample of {name}, but of {lines[0][0]}; is it the list of another source?")
    return found


def _lines_of(path: str) -> list[tuple[str, str, int, str]]:
    """File, group, row and path in each line."""
    found: list[tuple[str, str, int, str]] = []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines: Iterable[Any] = map(json.loads, file)
            if not path.endswith(".jsonl"):
                header = dict.fromkeys(next(csv.reader(file), ()))
                lines = csv.DictReader(file, [*header]) if header.keys() >= {*COLUMNS[1:4], "path"} else [header]
            found.extend((str(at["file"]), str(at["dataset"]), int(at["row"]), at["path"] or "") for at in lines)
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, csv.Error) as error:
        why = f"after {len(found)} lines: {type(error).__name__}: {error}"
        raise _error(f"{path} is no list of bad samples ({why}); inspect --check-all writes one") from error
    return found


def _same_files(listed: Collection[str], files: Collection[str]) -> dict[str, str]:
    """The file of the source for each listed path. A moved file is found by its name, if no other file has it."""
    real = {os.path.realpath(file): file for file in files}
    same = {each: real[path] for each in listed if (path := os.path.realpath(each)) in real}
    gone = [each for each in listed if not os.path.exists(each)]
    named, counts = {os.path.basename(file): file for file in files}, Counter(map(os.path.basename, (*files, *gone)))
    near = {each: named[name] for each in gone if (name := os.path.basename(each)) in named}
    if twin := next((each for each in near if counts[os.path.basename(each)] > 2), None):
        raise _error(f"{twin} does not exist, and several files have its name; correct the paths in the list")
    return near | same


def _error(message: str) -> ConfigError:
    return ConfigError(message, "exclude")


_log = logging.getLogger(__name__)


def short_digest(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class CacheFolder:
    """Kept files: a head that names the data, a body, and the CRC-32 of both, so that writing needs no fsync.

    Messages call them ``what``, and the folder by its option.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str, option: str = "cache_dir") -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"{folder!r} is not a folder; give its path, or None", option)
        path = local_path(folder)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            found = os.stat(path)
        except OSError as error:
            text = f"{path} cannot be made: {error.strerror}; give another folder"
            raise ConfigError(text, option, file=path) from error
        if (owner := found.st_uid) != system.user_id():  # the owner decides which values are read
            text = f"{path} belongs to user {owner}, and you are {system.user_id()}; give a folder of yours"
            raise ConfigError(text, option, file=path)
        if os.name == "posix" and found.st_mode & 0o022:
            text = f"others may write to {path}; forbid it (chmod go-w), or give another folder"
            raise ConfigError(text, option, file=path)
        self.path, self._what = path, what

    def load(self, of: str, name: str, head: bytes) -> bytes | None:
        """The body of the file with this head; None if there is none."""
        path = os.path.join(self.path, name)
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
        """Keep a file. Several processes may do so at once; a failure is logged, not raised."""
        import secrets

        path, data = os.path.join(self.path, name), head + body
        new = f"{path}.{secrets.token_hex(8)}"
        try:
            with open(new, "xb", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(data + zlib.crc32(data).to_bytes(4, "little"))
            os.replace(new, path)
        except OSError as error:
            _log.warning("%s: its %s cannot be kept in %s: %s", of, self._what, path, str(error))
        finally:
            try:  # noqa: SIM105  # an interrupt can come when `suppress` is called, before anything is removed
                os.unlink(new)
            except OSError:
                pass
