"""What the training process and a reader process exchange: memory, the `ReaderSetup`, tasks, reports and errors.

`SharedFile` is a nameless file in memory that both map; `SharedSlots` are the slots in it. Such a file also takes a
`ReaderSetup` to a reader process, with settings that libraries keep for a whole process.

Tasks and reports have fixed sizes, and are written atomically. Pickled errors or a log record may follow a report.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import importlib
import io
import logging
import mmap
import os
import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine.pipeline.pipeline import BatchResult
from lit_async_data.engine.pipeline.sample_reader import ReadAround, ReaderSetup
from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, MemoryBudgetError, ReadError
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Limits, Share
from lit_async_data.sources.contract.stage_clock import NO_WORK, Work
from lit_async_data.sources.contract.user_code import dumps, why_not_pickled
from lit_async_data.sources.files.stores import SECRETS
from lit_async_data.sources.local_files import ADVICE, advice_on

# The result of a batch that was not read as planned.
Unplanned = Exception | ReadAround


def packed_results(batches: Sequence[BatchResult]) -> bytes:
    """The results of the batches that were not read as planned; empty if all were."""
    results = {number: result for number, batch in enumerate(batches) if (result := batch.error or batch.around)}
    return packed(results) if results else b""


def packed(results: Mapping[int, BaseException | ReadAround]) -> bytes:
    return pickle.dumps({number: _portable(result) for number, result in results.items()})


def unpacked(payload: bytes, process: int) -> dict[int, Any]:
    """The results by number; exceptions with their tracebacks as notes."""
    found = {}
    for number, (result, cause, text) in pickle.loads(payload).items():  # noqa: S301  # from the reader process
        if text:
            result.__cause__ = cause
            result.add_note(f"In reader process {process}:\n{text}")
        found[number] = result
    return found


def _portable(result: BaseException | ReadAround) -> tuple[Any, BaseException | None, str]:
    """A result that can be pickled; of an exception also the cause, and the text of both with tracebacks."""
    if isinstance(result, ReadAround):
        bad = tuple(each._replace(error=_portable(each.error)[0]) for each in result.bad)
        return result._replace(bad=bad), None, ""
    text = "".join(traceback.format_exception(result)).rstrip()
    cause = result.__cause__ if result.__cause__ is not None and _travels(result.__cause__) else None
    if isinstance(result, Exception) and _travels(result):
        return result, cause, text
    known = ("file", "dataset", "row", "sample_id", "stage", "worker")
    place: dict[str, Any] = {name: getattr(result, name, None) for name in known}
    return ReadError(f"{type(result).__name__}: {result}", **place), cause, text


def _travels(error: BaseException) -> bool:
    """Whether pickle restores an error: it may need arguments that it does not keep."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # made here
    except Exception:  # noqa: BLE001  # its code may raise anything
        return False


# Messages on the control socket: use another setup; write the stacks of all threads to a socket.
RENEWED, ASKED = b"+", b"?"


class Task(NamedTuple):
    """Batches, or one process's share of them, that a reader process reads into a slot."""

    slot: int
    generation: int  # see `Pipeline`; processes skip tasks of an older generation
    key: BatchIndex  # the first batch
    batches: int
    row: int  # the first row in the slot
    share: Share
    limits: Limits  # the part of each epoch that the consumer will take
    around: bool = False  # whether one process reads the whole slot, sample by sample, around bad ones
    deaths: int = 0  # processes that the task has ended; known to the training process alone

    def packed(self) -> bytes:
        numbers = self.slot, self.generation, *self.key, self.batches, self.row, *self.share, *self.limits
        return _TASK.pack(*numbers, self.around)

    @classmethod
    def unpacked(cls, data: bytes) -> Task:
        slot, generation, epoch, step, batches, row, reader, readers, *limits, around = _TASK.unpack(data)
        key, share = BatchIndex(epoch, step), Share(reader, readers)
        return cls(slot, generation, key, batches, row, share, Limits(*limits), bool(around))


class ReportKind(enum.IntEnum):
    READY = 1  # the process takes tasks from now on
    DONE = 2  # a task is done; the payload has its errors, if any
    LOG = 3  # the payload is a log record
    FAILED = 4  # the process cannot go on; the payload is the error


class Report(NamedTuple):
    kind: int  # a `ReportKind`
    payload: int = 0  # bytes that follow
    slot: int = 0  # of the task
    step: int = 0  # the first one of the task
    work: Work = NO_WORK  # seconds and bytes of the thread since its last report, reading ahead included
    idle_s: float = 0.0  # seconds that the thread has waited for the task

    def packed(self) -> bytes:
        return REPORT.pack(*self[:4], *self.work[:8], self.idle_s)


_TASK, REPORT = struct.Struct("<13q"), struct.Struct("<4q4d4qd")
TASK_BYTES, REPORT_BYTES = _TASK.size, REPORT.size


class Reports:
    """Sends reports, waiting while the pipe is full; drops them if its other end is closed. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._pipe = open(fd, "wb", buffering=0)  # noqa: SIM115
        self._lock = threading.RLock()  # garbage collection inside it may log

    def send(self, report: Report, payload: bytes = b"") -> None:
        data = memoryview(report._replace(payload=len(payload)).packed() + payload)
        with self._lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[self._pipe.write(data) :]


FOLDER = "/dev/shm"  # noqa: S108  # the file in it has no name
# Bytes of zeros written per step: touching a map without memory behind it would end the process (SIGBUS).
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

    @contextlib.contextmanager
    def refused(self, nbytes: int, what: str, *, close: bool = False) -> Iterator[None]:
        """Have an `OSError` say what there is no memory for, and ``close`` the file."""
        try:
            yield
        except OSError as error:
            if close:
                self.file.close()
            what = f"the system refuses {readable(nbytes)} for {what} ({error.strerror})"
            advice = "set a smaller batch_size or queue_depth, or a higher limit (ulimit -v)"
            if self.folder is not None:
                room = f"make {FOLDER} larger (docker run --shm-size=8g)"
                room = room if self.folder == FOLDER else f"make room in {self.folder}"
                advice = f"{room}, or set worker_kind=thread"
            raise MemoryBudgetError(f"{what}; {ADVICE.get(error.errno or 0, advice)}", "memory_budget") from error


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
            self._created = created = SharedFile("lit_async_data slots")
            self._file = created.file
            with created.refused(HEAD_BYTES, "memory that reader processes share", close=True):
                created.reach(HEAD_BYTES)
                head = mmap.mmap(self.fd, HEAD_BYTES)
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
        with self._created.refused(count * self._stride, f"{count} slots"):
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
    secrets = SECRETS.set(True)  # it never leaves memory
    try:
        data = dumps(setup, buffers.append)
        return [memoryview(data), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        why = why_not_pickled(setup.read.source) or f"cannot be pickled ({type(error).__name__}: {error})"
        raise ConfigError(f"it {why}") from error
    finally:
        SECRETS.reset(secrets)


def stored(setup: ReaderSetup) -> io.FileIO:
    """An anonymous file in memory, whose arrays reader processes map and share."""
    pieces = _pickled(setup)
    python = setup.read.transformation is not None or setup.read.source.chunks.reading == "python"
    header = pickle.dumps((settings_here(filters=python), [len(piece) for piece in pieces]))
    shared = SharedFile("lit_async_data setup")
    with (
        shared.refused(sum(map(len, pieces)), "a copy of the source", close=True),
        open(shared.file.fileno(), "wb", closefd=False) as buffered,
    ):
        buffered.write(header)
        for piece in pieces:
            buffered.write(bytes(-buffered.tell() % ALIGNMENT))
            buffered.write(piece)
    return shared.file


def loaded(fd: int) -> ReaderSetup:
    """The setup in a file, which is closed; also applies the settings. Arrays are copied on write."""
    content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    os.close(fd)
    settings, sizes = pickle.load(content)  # noqa: S301  # from the trainer's process
    begin, pieces = content.tell(), []
    for size in sizes:
        begin += -begin % ALIGNMENT
        pieces.append(memoryview(content)[begin : begin + size])
        begin += size
    adopt(*settings)  # before objects of the user are made
    setup: ReaderSetup = pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301
    logging.getLogger().setLevel(setup.level)
    return setup


def environment() -> dict[str, str]:
    """The environment of this process, with the folders where its h5py looks for plugins."""
    found = dict(os.environ)
    if "h5py" in sys.modules:
        h5pl: Any = importlib.import_module("h5py.h5pl")
        found["HDF5_PLUGIN_PATH"] = os.pathsep.join(os.fsdecode(h5pl.get(place)) for place in range(h5pl.size()))
    return found


def settings_here(*, filters: bool) -> tuple[list[str], dict[tuple[str, str], Any]]:
    """The settings of this process, for `adopt`; for code of the user also modules with filters of HDF5."""
    modules = [name for name in REGISTERING if filters and name in sys.modules]
    return modules, {key: getattr(_holder(key[0]), key[1]) for key in SETTINGS if key[0] in sys.modules}


def _holder(module: str) -> Any:
    found: Any = importlib.import_module(module)
    return found.get_config() if module == "h5py" else found


def adopt(modules: Sequence[str], settings: Mapping[tuple[str, str], Any]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for (module, name), value in settings.items():
        if module in sys.modules or value != SETTINGS[module, name]:
            setattr(_holder(module), name, value)
