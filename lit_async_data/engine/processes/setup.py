"""`ReaderSetup`: what a reader process needs to begin, and its way there."""

from __future__ import annotations

import dataclasses
import io
import logging
import mmap
import pickle
import struct
from typing import Any

from lit_async_data.batch.spec import BatchLayout
from lit_async_data.engine.pipeline.ahead import Ahead
from lit_async_data.engine.pipeline.bad_samples import AroundBadSamples
from lit_async_data.engine.pipeline.sample_reader import SampleReader
from lit_async_data.engine.processes.inherited import Inherited
from lit_async_data.engine.processes.shared_file import SharedFile
from lit_async_data.engine.resources.memory import readable
from lit_async_data.engine.resources.plan import ResourcePlan
from lit_async_data.errors import ConfigError, MemoryBudgetError
from lit_async_data.order.plan import Schedule
from lit_async_data.sources.contract.pickling import why_not_pickled

# A source whose pickled arrays take more than this is copied to a reader process only on demand.
MOST_COPIED_BYTES = 2**28
# Arrays begin at multiples of this many bytes.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class ReaderSetup:
    """What a reader process needs: what reads and reads ahead, the order, threads and memory."""

    read: SampleReader
    schedule: Schedule
    plan: ResourcePlan
    ahead: Ahead | None
    around: AroundBadSamples | None = None
    # Log records below this level are not sent.
    level: int = dataclasses.field(default_factory=lambda: logging.getLogger("lit_async_data").getEffectiveLevel())

    @property
    def layout(self) -> BatchLayout:
        return self.plan.layout

    @property
    def raw_bytes(self) -> int:
        """Bytes beside each slot for samples that processes read by shares, and one of them transforms as a batch."""
        hooks = self.read.transformation
        return hooks.scratch_bytes if self.plan.workers.shared and hooks is not None and hooks.takes_batches else 0

    def check(self, *, on_demand: bool) -> None:
        """Check that it can go to a reader process; of any size if the user has asked for that, ``on_demand``."""
        nbytes = sum(map(len, self._pickled()))
        if not on_demand and nbytes > MOST_COPIED_BYTES:
            raise ConfigError(f"a copy of it takes {readable(nbytes)}")

    def _pickled(self) -> list[memoryview]:
        """A pickle, and its arrays, which are not copied.

        Classes and functions of ``__main__``, as in a notebook, travel by value.
        """
        import cloudpickle

        buffers: list[pickle.PickleBuffer] = []
        python = self.read.transformation is not None or self.read.source.chunks.reading == "python"
        inherited = Inherited(filters=python)
        try:
            # In this order, so that settings are set before anything of the user is unpickled.
            data = cloudpickle.dumps((inherited, self), protocol=5, buffer_callback=buffers.append)
            return [memoryview(data), *(buffer.raw() for buffer in buffers)]
        except Exception as error:
            why = why_not_pickled(self.read.source) or f"cannot be pickled ({type(error).__name__}: {error})"
            raise ConfigError(f"it {why}") from error

    def stored(self) -> io.FileIO:
        """Write the setup to an anonymous file in memory. Reader processes map its arrays and share them."""
        pieces = self._pickled()
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
                f"memory_budget: the system refuses {readable(sum(map(len, pieces)))} for a copy of the source "
                f"({error.strerror}); {shared.advice()}"
            ) from error
        return shared.file

    @staticmethod
    def loaded(fd: int) -> Any:
        """Read a setup, and set what this process inherits. Its arrays are copied only where they are written to."""
        content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        (count,) = struct.unpack_from("<q", content)
        sizes = struct.unpack_from(f"<{count}q", content, 8)
        begin, pieces = 8 * (count + 1), []
        for size in sizes:
            begin += -begin % ALIGNMENT
            pieces.append(memoryview(content)[begin : begin + size])
            begin += size
        _, setup = pickle.loads(pieces[0], buffers=pieces[1:])  # noqa: S301  # from the trainer's process
        return setup
