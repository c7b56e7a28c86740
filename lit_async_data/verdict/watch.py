"""`Watch`: measures loaders, the loop's thread and its process from one moment on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from lit_async_data.host.metrics.stages import StageTimes
from lit_async_data.host.metrics.stats import DeviceWait, LoaderStats
from lit_async_data.host.resources.cores import cores
from lit_async_data.host.resources.gil import gil_is_taken
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.prefetch.loader import PrefetchedLoader
from lit_async_data.system import children_seconds, core_seconds, thread_seconds, usable_cores
from lit_async_data.threads import OURS
from lit_async_data.verdict.facts import HELD, Facts, Readers

Loader = AsyncLoader | PrefetchedLoader


class Cpu(NamedTuple):
    """Seconds of cores.

    Attributes:
        thread_s: In which the loop's thread had one.
        process_s: In which its process had one, all threads together.
        queued_s: In which the loop's thread wanted one and had none.
        readers_queued_s: The same for threads of this package, together.
        own_s: In which other Python threads of the program had one, or wanted one and had none, together.
    """

    thread_s: float = 0.0
    process_s: float = 0.0
    queued_s: float = 0.0
    readers_queued_s: float = 0.0
    own_s: float = 0.0

    def less(self, other: Cpu) -> Cpu:
        """These seconds without some others."""
        return Cpu(*(mine - others for mine, others in zip(self, other, strict=True)))


class Moment:
    """Sums at one moment, taken in the loop's thread."""

    def __init__(self) -> None:
        self.wall_s, self._thread_s, self._process_s = time.perf_counter(), time.thread_time(), time.process_time()
        #: Of each living Python thread, by its number in the system: its name, and what `thread_seconds` says.
        self._threads = {
            number: (thread.name, *thread_seconds(number))
            for thread in threading.enumerate()
            if (number := thread.native_id) is not None
        }

    def since(self, before: Moment) -> Cpu:
        """What came after an earlier moment. Threads that have ended in between are in ``process_s`` only."""
        here, queued_s, readers_queued_s, own_s = threading.get_native_id(), 0.0, 0.0, 0.0
        for number, (name, had_now_s, queued_now_s) in self._threads.items():
            _, had_before_s, queued_before_s = before._threads.get(number, ("", 0.0, 0.0))
            had_s, wanted_s = max(had_now_s - had_before_s, 0.0), max(queued_now_s - queued_before_s, 0.0)
            if number == here:
                queued_s = wanted_s
            elif name.startswith(OURS):
                readers_queued_s += wanted_s
            else:
                own_s += had_s + wanted_s
        thread_s, process_s = self._thread_s - before._thread_s, self._process_s - before._process_s
        return Cpu(thread_s, process_s, queued_s, readers_queued_s, own_s)


class Cores(NamedTuple):
    """Seconds of all cores that this process may use, since the machine began; zeros where the system does not say."""

    idle_s: float = 0.0
    total_s: float = 0.0

    @classmethod
    def now(cls) -> Cores:
        return cls(*core_seconds())


class Watch:
    """What happens to some loaders after this was made.

    Args:
        loaders: Those that one loop takes its batches from.

    Attributes:
        loaders: The same.
    """

    def __init__(self, loaders: Sequence[Loader]) -> None:
        self.loaders = list(loaders)
        self._before = [loader.stats() for loader in loaders]
        self._began, self._cores, self._children_s = Moment(), Cores.now(), children_seconds()
        self._left_out_s, self._left_out = 0.0, Cpu()

    def leave_out(self, other: Watch) -> None:
        """Something else, such as a validation, has run in between: all that another watch has seen until now."""
        wall_s, cpu = other.spent()
        self._left_out_s += wall_s
        self._left_out = Cpu(*map(sum, zip(self._left_out, cpu, strict=True)))

    def spent(self) -> tuple[float, Cpu]:
        """Seconds since the beginning, and seconds of cores, without what was left out."""
        now = Moment()
        return now.wall_s - self._began.wall_s - self._left_out_s, now.since(self._began).less(self._left_out)

    def facts(self, total_s: float | None = None) -> Facts:
        """What was measured until now, of the loader that was waited for longest.

        Args:
            total_s: Seconds of the loop; None for all that have passed.
        """
        wall_s, cpu = self.spent()
        seen = [(loader, before, loader.stats()) for loader, before in zip(self.loaders, self._before, strict=True)]
        waits = [_waited(before, now) for _, before, now in seen]
        if not seen:
            return Facts(total_s=wall_s if total_s is None else total_s)
        slowest = max(range(len(seen)), key=lambda number: waits[number])
        loader, before, now = seen[slowest]
        readers, stages = Readers.of(loader, now), now.stages.since(before.stages)
        return Facts(
            batches=now.batches - before.batches,
            total_s=wall_s if total_s is None else total_s,
            waited_s=sum(waited_s for waited_s, _ in waits),
            gap_s=sum(gap_s for _, gap_s in waits),
            loop_cpu_s=cpu.thread_s,
            process_cpu_s=cpu.process_s,
            loop_queued_s=cpu.queued_s,
            readers_queued_s=cpu.readers_queued_s,
            own_s=cpu.own_s if cpu.own_s > HELD * wall_s and gil_is_taken() else 0.0,
            cores=cores(loader.local_world_size),
            elsewhere=self._elsewhere(self._workers_s(readers, stages), cores(loader.local_world_size)),
            starved=now.read.starved - before.read.starved,
            stages=stages,
            readers=readers,
        )

    def _workers_s(self, readers: Readers, stages: StageTimes) -> float:
        """Seconds of cores that workers in processes of their own took."""
        if readers.kind == "foreign":  # a DataLoader does not say which processes are its workers
            return children_seconds() - self._children_s
        return stages.cpu_s if readers.kind == "process" else 0.0

    def _elsewhere(self, workers_s: float, own: int) -> float:
        """How many of this process's cores other programs kept busy, on average.

        Of the ranks on a machine, each has its share of the cores; what the others leave idle of theirs is free, too.
        """
        now, moment = Cores.now(), Moment()
        wall_s, process_s = moment.wall_s - self._began.wall_s, moment.since(self._began).process_s
        total_s, idle_s = now.total_s - self._cores.total_s, now.idle_s - self._cores.idle_s
        if total_s < wall_s / 2:
            return 0.0  # the system does not say what all cores do
        others = (total_s - idle_s - process_s - workers_s) / wall_s
        return max(others - (usable_cores() - own), 0.0)


def _waited(before: LoaderStats, now: LoaderStats) -> tuple[float, float]:
    """Seconds that were waited for batches but the first, and for the first; by the device's clock if it has one."""
    if now.device is not None:
        device = now.device.since(before.device or DeviceWait())
        return device.wait_s, device.gap_s
    return now.wait_s - before.wait_s, now.gap_s - before.gap_s
