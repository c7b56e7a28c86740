"""`Watch`: measures loaders, the loop's thread and its process from one moment on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from lit_async_data.host.stats import DeviceWait, LoaderStats
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.prefetch.loader import PrefetchedLoader
from lit_async_data.system import core_seconds
from lit_async_data.verdict.facts import Facts, Readers

Loader = AsyncLoader | PrefetchedLoader


class Cpu(NamedTuple):
    """Seconds of cores: of the calling thread, and of its process."""

    thread_s: float = 0.0
    process_s: float = 0.0

    @classmethod
    def now(cls) -> Cpu:
        return cls(time.thread_time(), time.process_time())


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
        self._began_s, self._cpu = time.perf_counter(), Cpu.now()
        self._left_out_s, self._left_out = 0.0, Cpu()
        self._cores, self._all = Cores.now(), Cpu.now()

    def leave_out(self, other: Watch) -> None:
        """Something else, such as a validation, has run in between: all that another watch has seen until now."""
        wall_s, cpu = other.spent()
        self._left_out_s += wall_s
        self._left_out = Cpu(self._left_out.thread_s + cpu.thread_s, self._left_out.process_s + cpu.process_s)

    def spent(self) -> tuple[float, Cpu]:
        """Seconds since the beginning, and seconds of cores, without what was left out."""
        now, left_out = Cpu.now(), self._left_out
        cpu = Cpu(
            now.thread_s - self._cpu.thread_s - left_out.thread_s,
            now.process_s - self._cpu.process_s - left_out.process_s,
        )
        return time.perf_counter() - self._began_s - self._left_out_s, cpu

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
            elsewhere=self._elsewhere(stages.cpu_s if readers.kind == "process" else 0.0),
            starved=now.read.starved - before.read.starved,
            stages=stages,
            readers=readers,
            slowdown=now.slowdown,
        )

    def _elsewhere(self, readers_s: float) -> float:
        """How many cores other programs kept busy, on average. Readers in processes of their own are no others."""
        now, process_s = Cores.now(), time.process_time() - self._all.process_s
        wall_s = time.perf_counter() - self._began_s
        total_s, idle_s = now.total_s - self._cores.total_s, now.idle_s - self._cores.idle_s
        if any(isinstance(loader, PrefetchedLoader) for loader in self.loaders) or total_s < wall_s / 2:
            return 0.0  # nobody knows what workers of a DataLoader take, or what all cores do
        return max((total_s - idle_s - process_s - readers_s) / wall_s, 0.0)


def _waited(before: LoaderStats, now: LoaderStats) -> tuple[float, float]:
    """Seconds that were waited for batches but the first, and for the first; by the device's clock if it has one."""
    if now.device is not None:
        device = now.device.since(before.device or DeviceWait())
        return device.wait_s, device.gap_s
    return now.wait_s - before.wait_s, now.gap_s - before.gap_s
