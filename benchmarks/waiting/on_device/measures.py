"""The measurements on a GPU: copies, waiting, submitting, memory, and copies beside kernels."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from measuring import trainer_steps

from lit_async_data import AsyncLoader, ToFloat
from lit_async_data.engine.device.streams import Streams
from waiting.on_device.contenders import MIB, Batch, Contender, source
from waiting.on_device.rig import cycles_per_second, sleep, timed_event
from waiting.on_device.simulated import replaced_streams

QUIET = trainer_steps.QUIET | {"accelerator": "gpu", "devices": 1}
# The first steps of a run are not counted, since they load kernels and allocate memory.
SETTLE = 5
# Seconds to wait for a batch on the host.
PATIENCE = 30.0
GB = 1e9


class Kernels:
    """The work of a step: reads its batch, and multiplies matrices for a given time.

    Args:
        seconds: Time on this GPU when idle.
    """

    def __init__(self, seconds: float) -> None:
        self._values = torch.ones(4096, 4096, dtype=torch.float16, device="cuda")
        self._out = torch.empty_like(self._values)
        self._products = 1
        self._products = max(round(seconds / min(self._timed() for _ in range(9))), 1)

    def __call__(self, batch: Batch | None = None) -> None:
        if batch is not None:
            batch["x"].amax()
        for _ in range(self._products):
            torch.mm(self._values, self._values, out=self._out)

    def _timed(self) -> float:
        begin = timed_event()
        self()
        end = timed_event()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


# -- copies ------------------------------------------------------------------------------------------------------------


def pinned_rate(nbytes: int, copies: int = 20) -> float:
    """The limit: GB/s of plain copies from pinned memory, one after the other."""
    hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    device.copy_(hosts[0], non_blocking=True)
    begin = timed_event()
    for number in range(copies):
        device.copy_(hosts[number % 2], non_blocking=True)
    end = timed_event()
    end.synchronize()
    return copies * nbytes / (begin.elapsed_time(end) / 1000) / GB


class TimedCopies(Streams):
    """Streams that time each copy of a large field to the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: list[tuple[int, torch.Event, torch.Event]] = []

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.is_cuda or source.nbytes < MIB:
            super().copy(destination, source)
            return
        begin = timed_event()
        super().copy(destination, source)
        self._copies.append((source.nbytes, begin, timed_event()))

    @property
    def rate(self) -> float:
        """GB/s while a copy runs."""
        torch.cuda.synchronize()
        counted = self._copies[SETTLE:]
        seconds = sum(begin.elapsed_time(end) for _, begin, end in counted) / 1000
        return sum(nbytes for nbytes, _, _ in counted) / seconds / GB


def copy_rate(contender: Contender, step: Callable[[Batch], None]) -> float:
    """GB/s of the copies of one of our loaders while steps run."""
    created: list[TimedCopies] = []

    def streams(device: torch.device) -> TimedCopies:
        created.append(TimedCopies(device))
        return created[-1]

    with replaced_streams(streams, simulated=False), contender.opened() as batches:
        for batch in batches:
            step(batch)
        return created[-1].rate


def delivered_rate(contender: Contender) -> float:
    """GB/s of batches delivered to a loop that only makes sure that they are on the GPU."""
    with contender.opened() as batches:
        nbytes = 0
        for number, batch in enumerate(batches):
            if number == SETTLE:
                torch.cuda.synchronize()
                started = time.perf_counter()
            on_device = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
            nbytes += sum(tensor.nbytes for tensor in on_device.values()) if number >= SETTLE else 0
        torch.cuda.synchronize()
        return nbytes / (time.perf_counter() - started) / GB


# -- waiting -----------------------------------------------------------------------------------------------------------


class TimedSteps(pl.LightningModule):
    """Steps whose begin and end the GPU records."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._kernels = kernels
        self._marks: list[tuple[torch.Event, torch.Event]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        begin = timed_event()
        self._kernels(batch)
        self._marks.append((begin, timed_event()))

    def configure_optimizers(self) -> list[Any]:
        return []  # Lightning warns of None

    def seconds(self) -> dict[str, float]:
        """Seconds per step: in total, and with no step running."""
        torch.cuda.synchronize()
        marks = self._marks[SETTLE:]
        idle = [end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(marks)]
        whole = marks[0][1].elapsed_time(marks[-1][1])
        return {"step_s": whole / len(idle) / 1000, "idle_s": statistics.fmean(idle) / 1000}


def stepped(contender: Contender, kernels: Kernels) -> dict[str, float]:
    """The figures of `TimedSteps` over an epoch in the Trainer."""
    model = TimedSteps(kernels)
    with contender.opened() as batches:
        pl.Trainer(callbacks=contender.callbacks(), **QUIET).fit(model, batches)
    return model.seconds()


class NoSynchronising(pl.Callback):
    """Makes any wait of the program for the GPU an error, from the start of an epoch to its end.

    Give it to the Trainer before other callbacks, so that it begins before and ends before what they log.
    """

    def on_train_epoch_start(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


# -- submitting --------------------------------------------------------------------------------------------------------


def submit_seconds(turns: int, hold_s: float = 0.05) -> list[float]:
    """Seconds that ``prefetch`` takes to start the copy of a batch while both streams are busy."""
    durations, cycles = [], round(hold_s * cycles_per_second())
    with source(16, SETTLE + turns + 1, 0.0, device_depth=1) as loader:
        loader._wiring.externally_driven = True
        for number in range(SETTLE + turns):
            batch = loader.next()
            wait_until(lambda: engine_of(loader).feed.pipeline.ready)
            torch.cuda.synchronize()
            with engine_of(loader).queue.streams.on_side():
                sleep(cycles)
            sleep(cycles)
            started = time.perf_counter()
            loader._prefetch()
            seconds = time.perf_counter() - started
            assert engine_of(loader).queue.ready == 1, "nothing was submitted"
            if number >= SETTLE:
                durations.append(seconds)
            del batch
            torch.cuda.synchronize()
    return durations


def engine_of(loader: AsyncLoader) -> Any:
    assert loader._run.engine is not None
    return loader._run.engine


def wait_until(reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "no batch came on the host"


# -- memory ------------------------------------------------------------------------------------------------------------


def reserved(epochs: int, *, new_streams: bool = False) -> list[int]:
    """Bytes that torch's allocator holds after each epoch.

    Args:
        epochs: How many.
        new_streams: Use a new side stream for each epoch, which cannot reuse the memory of the last one.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    sizes = []
    with source(16, 12, 0.0, device_transform=ToFloat("x")) as loader:
        for _ in range(epochs):
            for batch in loader:
                batch["x"].amax()
                torch.cuda.synchronize()  # how far the program runs ahead decides how many batches lie there at a time
            sizes.append(torch.cuda.memory_reserved())
            if new_streams:
                engine_of(loader).queue.streams.side = torch.Stream(device="cuda")
    return sizes


# -- copies beside kernels ---------------------------------------------------------------------------------------------

Interval = tuple[float, float]


@contextlib.contextmanager
def traced(collected: list[dict[str, Any]]) -> Iterator[None]:
    """Profile the GPU inside the context, and append the events of its kernels and copies."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, cuda]) as profile:
        yield
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "trace.json"))
        profile.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    collected += [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy") and "dur" in event]


def copies(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The copies of large fields from host to device."""
    return [event for event in events if "HtoD" in event["name"] and event["args"].get("bytes", MIB) >= MIB]


def beside(events: list[dict[str, Any]]) -> float:
    """The share of the time of copies to the device in which a kernel ran."""
    kernels = merged([interval(event) for event in events if event["cat"] == "kernel"])
    mine = [interval(event) for event in copies(events)]
    both = sum(max(min(end, stop) - max(begin, start), 0.0) for begin, end in mine for start, stop in kernels)
    return both / sum(end - begin for begin, end in mine)


def interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def merged(intervals: list[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def beside_kernels(contender: Contender, kernels: Kernels) -> list[dict[str, Any]]:
    """The events of the GPU in the middle of an epoch in the Trainer."""
    events: list[dict[str, Any]] = []
    watching = contextlib.ExitStack()

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == SETTLE:
                watching.enter_context(traced(events))

        def on_train_end(self, *_: Any) -> None:
            watching.close()

    with contender.opened() as batches, watching:
        pl.Trainer(callbacks=[*contender.callbacks(), Watch()], **QUIET).fit(TimedSteps(kernels), batches)
    return events
