"""`SharedFile`: a nameless file in memory that two processes map; `SharedSlots`: the slots in it.

A memfd or, without memfd (gVisor, macOS), a temporary file, in ``/dev/shm`` if there is one. Bytes of the latter are
written before they are used: touching a map without memory behind it ends the process (SIGBUS).

Such a file also takes a `ReaderSetup` to a reader process, with settings that libraries keep for a whole process.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine.pipeline.sample_reader import ReaderSetup
from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, MemoryBudgetError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.user_code import dumps, why_not_pickled
from lit_async_data.sources.files.stores import SECRETS
from lit_async_data.sources.local_files import ADVICE, advice_on

FOLDER = "/dev/shm"  # noqa: S108  # the file in it has no name
# Bytes of zeros written per step.
_STEP = 2**20
# The file begins with int64 numbers: the generation of tasks, the threads in a process, the number of the setup, the
# sample that each process tries by itself, and the samples that have ended processes. Samples are counted from 1, and 0
# is none.
HEAD_BYTES = 2**16  # whole pages
GENERATION, THREADS, SETUP = 0, 1, 2
TRIED, DEADLY = 3, 4096


class SharedFile:
    """A file in memory, closed with the object."""

    def __init__(self, name: str) -> None:
        self.folder: str | None = None  # the folder whose space it takes; None if it takes only memory
        try:
            self.file = open(name, "w+b", buffering=0, opener=_memory_descriptor)  # noqa: SIM115
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                what = "the system refuses a file in memory, which processes share"
                raise MemoryBudgetError(f"{what}: {advice_on(error) or error.strerror}", "memory_budget") from error
            import tempfile  # imports modules that no reader process needs

            self.folder = FOLDER if os.access(FOLDER, os.W_OK | os.X_OK) else tempfile.gettempdir()
            # Linux creates it without a name (O_TMPFILE); elsewhere it has one for a moment.
            self.file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115

    def reach(self, size: int) -> None:
        """Make the file this long, with zeros; an `OSError` if the system refuses."""
        if self.folder is None:
            os.ftruncate(self.file.fileno(), size)
            return
        begin = self.file.seek(0, os.SEEK_END)
        try:
            while (missing := size - self.file.tell()) > 0:
                self.file.write(bytes(min(missing, _STEP)))
        except OSError:
            self.file.truncate(begin)
            raise

    def advice(self) -> str:
        if self.folder is None:
            return "set a smaller batch_size or queue_depth, or a higher limit (ulimit -v)"
        if self.folder == FOLDER:
            return f"make {FOLDER} larger (docker run --shm-size=8g), or set worker_kind=thread"
        return f"make room in {self.folder}, or set worker_kind=thread"


def _memory_descriptor(name: str, _: int) -> int:
    (descriptor,) = map(os.memfd_create, (name,))  # returned without another call: see `opening`
    return descriptor


class SharedSlots:
    """The slots of one loader, in shared memory.

    A process that did not create them gets the descriptor ``fd``, which stays open.

    Attributes:
        now: The generation of tasks, the threads in a process, and the number of the setup.
        deadly: The samples that have ended processes, counted from 1; 0 where there is none.
    """

    def __init__(self, slot_bytes: int, fd: int | None = None) -> None:
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slot_bytes = slot_bytes
        self._created: SharedFile | None = None
        if fd is None:
            self._created = SharedFile("lit_async_data slots")
            self._file = self._created.file
            try:
                with self._refused(HEAD_BYTES, "memory that reader processes share"):
                    self._created.reach(HEAD_BYTES)
                    head = mmap.mmap(self.fd, HEAD_BYTES)
            except MemoryBudgetError:
                self._file.close()
                raise
        else:
            self._file = io.FileIO(fd, "r+b", closefd=False)
            head = mmap.mmap(self.fd, HEAD_BYTES)
        self.now, self._tried, self.deadly = np.split(np.frombuffer(head, np.int64), [TRIED, DEADLY])
        self._slots: list[Bytes] = []

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def add(self, count: int) -> list[Bytes]:
        """Add slots, whose memory is not touched yet; only for the creator of the file."""
        known = len(self._slots)
        if not count:
            return []
        assert self._created is not None
        with self._refused(count * self._stride, f"{count} slots"):
            self._created.reach(HEAD_BYTES + (known + count) * self._stride)
            self._map()
        return self._slots[known:]

    def tried(self, process: int) -> Indices:
        """The sample that a process tries by itself, as an array of one number."""
        return self._tried[process % len(self._tried) :][:1]

    def condemn(self, process: int) -> bool:
        """Note the sample with which a process ended as deadly; False if it tried none, or there are too many."""
        sample, count = self.tried(process)[0], np.count_nonzero(self.deadly)
        if not sample or count == len(self.deadly):
            return False
        self.deadly[count] = sample
        return True

    @contextlib.contextmanager
    def _refused(self, nbytes: int, what: str) -> Iterator[None]:
        assert self._created is not None
        try:
            yield
        except OSError as error:
            raise MemoryBudgetError(
                f"the system refuses {readable(nbytes)} for {what} ({error.strerror}); "
                f"{ADVICE.get(error.errno or 0, self._created.advice())}",
                "memory_budget",
            ) from error

    def slot(self, number: int) -> Bytes:
        if number >= len(self._slots):
            self._map()
        return self._slots[number]

    def _map(self) -> None:
        """Map all slots of the file that are not mapped yet, at once: each map holds a descriptor."""
        begin = HEAD_BYTES + len(self._slots) * self._stride
        memory = np.frombuffer(mmap.mmap(self.fd, os.fstat(self.fd).st_size - begin, offset=begin), np.uint8)
        self._slots += [memory[first : first + self._slot_bytes] for first in range(0, len(memory), self._stride)]

    def close(self) -> None:
        """Close the file; memory lives on with its arrays."""
        self._slots.clear()
        self.now, self._tried, self.deadly = self.now.copy(), self._tried.copy(), self.deadly.copy()
        self._file.close()


# A source whose pickled arrays take more than this is copied to a reader process only on demand.
MOST_COPIED_BYTES = 2**28
# Arrays begin at multiples of this many bytes.
ALIGNMENT = 64
# Modules that register filters of HDF5 when they are imported.
REGISTERING = ("hdf5plugin", "bitshuffle.h5")
# Settings by module and name, with their defaults; h5py has them in its configuration.
SETTINGS: Mapping[tuple[str, str], Any] = {
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 2**30 // 12,
    ("h5py", "complex_names"): ("r", "i"),
}


def check(setup: ReaderSetup, *, on_demand: bool) -> None:
    """Raise a ConfigError if a setup cannot be pickled, or is large and the user has not asked for a process."""
    nbytes = sum(map(len, _pickled(setup)))
    if not on_demand and nbytes > MOST_COPIED_BYTES:
        raise ConfigError(f"a copy of it takes {readable(nbytes)}")


def _pickled(setup: ReaderSetup) -> list[memoryview]:
    """The pickle of a setup, and its arrays, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    python = setup.read.transformation is not None or setup.read.source.chunks.reading == "python"
    inherited = Inherited(filters=python)
    secrets = SECRETS.set(True)  # it never leaves memory
    try:
        # Settings first: they must be set before objects of the user are unpickled.
        data = dumps((inherited, setup), buffers.append)
        return [memoryview(data), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        why = why_not_pickled(setup.read.source) or f"cannot be pickled ({type(error).__name__}: {error})"
        raise ConfigError(f"it {why}") from error
    finally:
        SECRETS.reset(secrets)


def stored(setup: ReaderSetup) -> io.FileIO:
    """An anonymous file in memory, whose arrays reader processes map and share."""
    pieces = _pickled(setup)
    shared = SharedFile("lit_async_data setup")
    try:
        with open(shared.file.fileno(), "wb", closefd=False) as buffered:
            buffered.write(struct.pack(f"<{len(pieces) + 1}q", len(pieces), *map(len, pieces)))
            for piece in pieces:
                buffered.write(bytes(-buffered.tell() % ALIGNMENT))
                buffered.write(piece)
    except OSError as error:
        shared.file.close()
        raise MemoryBudgetError(
            f"the system refuses {readable(sum(map(len, pieces)))} for a copy of the source "
            f"({error.strerror}); {shared.advice()}",
            "memory_budget",
        ) from error
    return shared.file


def loaded(fd: int) -> ReaderSetup:
    """The setup in a file, which is closed; also applies the settings. Arrays are copied on write."""
    content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    (count,) = struct.unpack_from("<q", content)
    sizes = struct.unpack_from(f"<{count}q", content, 8)
    begin, pieces = 8 * (count + 1), []
    for size in sizes:
        begin += -begin % ALIGNMENT
        pieces.append(memoryview(content)[begin : begin + size])
        begin += size
    setup: ReaderSetup
    _, setup = pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301  # from the trainer's process
    logging.getLogger().setLevel(setup.level)
    return setup


def environment() -> dict[str, str]:
    """The environment of this process, with the folders where its h5py looks for plugins."""
    found = dict(os.environ)
    if "h5py" in sys.modules:
        h5pl: Any = importlib.import_module("h5py.h5pl")
        found["HDF5_PLUGIN_PATH"] = os.pathsep.join(os.fsdecode(h5pl.get(place)) for place in range(h5pl.size()))
    return found


class Inherited:
    """The settings of this process, which unpickling applies; for code of the user also filters of HDF5."""

    def __init__(self, *, filters: bool) -> None:
        self._filters = filters

    def __reduce__(self) -> Any:
        modules = [name for name in REGISTERING if self._filters and name in sys.modules]
        settings = {key: getattr(_holder(key[0]), key[1]) for key in SETTINGS if key[0] in sys.modules}
        return _set, (modules, settings)


def _holder(module: str) -> Any:
    found: Any = importlib.import_module(module)
    return found.get_config() if module == "h5py" else found


def _set(modules: Sequence[str], settings: Mapping[tuple[str, str], Any]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for (module, name), value in settings.items():
        if module in sys.modules or value != SETTINGS[module, name]:
            setattr(_holder(module), name, value)
