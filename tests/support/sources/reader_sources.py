"""Sources for reader processes, without torch and what reads HDF5: they do something when a sample is read."""

import contextlib
import ctypes
import logging
import os
import signal
import threading

import numpy as np

from lit_async_data import BatchSpec, FieldSpec, Source, StorageLayout
from lit_async_data.errors import CorruptError
from lit_async_data.order.chunk_order import ChunkRun


class Numbers(Source):
    """Sample n is n. Does something once, when a sample is read."""

    def __init__(self, sample=-1, act=None):
        self._sample, self._act = sample, act

    def __len__(self):
        return 100

    @property
    def spec(self):
        return BatchSpec({"y": FieldSpec((), np.dtype("i8"))}, as_mapping=True)

    def read_into(self, samples, out):
        if self._sample in samples:
            self._act()
        out["y"][...] = samples


class ReadBy(Numbers):
    def __init__(self, layout):
        super().__init__()
        self._layout = layout

    @property
    def chunks(self):
        return self._layout

    def read_into(self, samples, out):
        out["y"][...] = os.getpid()


class Damaged(Numbers):
    def __init__(self, bad, layout=None, error=CorruptError):
        super().__init__()
        self._bad, self._layout, self._error = set(bad), layout or StorageLayout(reading="decoded"), error

    @property
    def chunks(self):
        return self._layout

    def read_into(self, samples, out):
        for sample in samples.tolist():
            if sample in self._bad:
                raise self._error(f"sample {sample} is damaged")
        out["y"][...] = samples


class DamagedParts(Damaged):
    """A quarter of the parts that epochs draw from samples are damaged."""

    def read_random(self, samples, out, keys):
        # Not as attributes: another thread may read other parts meanwhile.
        Damaged(samples[keys % np.uint64(4) == 0].tolist()).read_into(samples, out)


class Deadly(Damaged):
    """Numbers of which one ends the process that reads it; several share a compressed chunk."""

    def __init__(self, sample, chunk, bad=(), reading="python"):
        super().__init__(bad, StorageLayout((ChunkRun(100, chunk),), compressed=True, reading=reading))
        self._deadly = sample

    def read_into(self, samples, out):
        if self._deadly in samples:
            kill()
        super().read_into(samples, out)


class DeadlyItems:
    """A dataset that reads whole batches, and whose sample 33 ends the process that reads it."""

    def __len__(self):
        return 100

    def __getitems__(self, numbers):
        if 33 in numbers:
            kill()
        return [{"y": number} for number in numbers]


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail():
    raise OSError(5, "Input/output error", "scan.h5")


def fail_strangely():
    raise UnpicklableError("odd", "even")


def damage():
    raise CorruptError("x.h5:/data, row 33: bad", file="x.h5", row=33, sample_id=33)


def crash():
    ctypes.string_at(0)


def hold_the_gil():
    os.write(1, b"holding\n")
    ctypes.PyDLL(None).sleep(3600)


def break_the_next_task():
    from lit_async_data.engine.processes.reader_server import ReaderServer

    ReaderServer._begun = None


def leave():
    os._exit(3)


class BadInChildAtLength(Numbers):
    def __setstate__(self, state):
        raise ImportError("x" * 2**18)


def stop():
    threading.Event().wait()


def inform():
    logging.getLogger("mine").info("row %d is even", 34)


def warn():
    logging.getLogger("mine").warning("row %d is odd", 33)


class PythonNumbers(Numbers):
    """Numbers that Python code reads; each sample also tells which process read it."""

    @property
    def spec(self):
        return BatchSpec({name: FieldSpec((), np.dtype("i8")) for name in ("y", "process")}, as_mapping=True)

    @property
    def chunks(self):
        return StorageLayout(reading="python")

    def read_into(self, samples, out):
        super().read_into(samples, out)
        out["process"][...] = os.getpid()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def with_process(sample, rng):
    """A transform of samples that draws, and tells which process ran it."""
    return {**sample, "drawn": rng.integers(2**40), "process": os.getpid()}


def centred(batch, rng):
    return {**batch, "x": batch["x"] - batch["x"].mean() + rng.random(), "index": batch["index"] + 0}


def copied(values):
    return {**values, "x": values["x"][...].copy()}


def masked(values):
    """Adds to samples of variable length, or to a batch of them, which of their elements are not padding."""
    x, length = values["x"], np.asarray(values["x_length"])
    return {**values, "mask": np.arange(x.shape[-2]) < length[..., None]}


def longer(sample):
    return {**sample, "x": np.pad(sample["x"], ((0, 1), (0, 0)))}


def relabelled(sample):
    return {**sample, "x_length": sample["x_length"] + 1}


def counted(batch):
    """A transform of batches that needs all samples."""
    return {**batch, "count": np.full(len(batch["y"]), len(batch["y"]))}


def kill_at_33(values):
    if 33 in values["y"]:
        kill()
    return values


def fail_at_33(sample):
    if sample["y"] == 33:
        raise ValueError("33 is too much")
    return {**sample, "process": os.getpid()}


def fail_at_length():
    raise OSError("x" * 2**18)


def warn_at_length():
    logging.getLogger("mine").warning("x" * 2**18)


def warn_oddly():
    extra = {"why": UnpicklableError("odd", "even"), "lock": threading.Lock()}
    logging.getLogger("mine").warning("row %d: %s", 33, "why?", extra=extra)


class FailsToStart(PythonNumbers):
    """Numbers that cannot be unpickled once a file exists."""

    def __init__(self, flag):
        super().__init__()
        self._flag = flag

    def __setstate__(self, state):
        vars(self).update(state)
        if os.path.exists(self._flag):
            raise ImportError("no such library")


class KilledAtStart(FailsToStart):
    """Numbers whose reader process is killed while it starts: once by a file ``flag``, each time by a folder."""

    def __setstate__(self, state):
        vars(self).update(state)
        with contextlib.suppress(FileNotFoundError):
            if not os.path.isdir(self._flag):
                os.remove(self._flag)
            kill()
