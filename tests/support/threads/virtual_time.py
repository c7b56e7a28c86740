"""`VirtualTime`: real loaders, loops and reader threads, in time that passes only while all of them work or wait."""

import contextlib
import functools
import math
import threading
import time
import types

from lit_async_data.engine.loader import async_loader
from lit_async_data.engine.pipeline.pipeline import SlotPool
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.engine.resources import Workers, allocated
from lit_async_data.engine.supervisor import Bell, ThreadWorker
from support.threads.waits import LONG

# Modules that measure what verdicts are about.
LOADERS = "engine.loader.async_loader", "engine.loader.base_loader", "engine.prefetch.loader"
PIPELINES = "engine.pipeline.pipeline", "engine.pipeline.thread_pipeline", "sources.contract.stage_clock"
TIMED = *LOADERS, *PIPELINES, "engine.device.queues", "engine.hooks", "engine.stats"
# Seconds after which a thread hands the GIL on.
SWITCH_S = 0.001


class VirtualTime:
    """Time stands still while any thread runs. When none does, it passes to the end of the shortest work.

    A thread works by `spend`, and waits for a slot, or for a batch, by the loader's own code. Threads of this process
    stand for reader processes, which cannot share such a clock: each has a GIL of its own.
    """

    def __init__(self, monkeypatch):
        self.now = 0.0
        # Guards everything below; notified when time has passed.
        self._passed = threading.Condition()
        self._running = 1  # threads that neither work nor wait: that of the test
        self._working = []  # the end of all work, each in a list that is emptied when it has come
        self._free_at = {}  # by lock
        self._may_go_on = []  # of each thread that waits
        self._stopped = False
        self._own = threading.local()
        clock = types.SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now, thread_time=self._cpu)
        for module in TIMED:
            monkeypatch.setattr(f"lit_async_data.{module}.time", clock)
        start, work, take, tuner = ThreadWorker.start, ThreadWorker._main, SlotPool.take, Workers.tuner

        def started(worker):
            self._count(1)
            start(worker)

        def worked(worker):
            work(worker)
            self._count(-1)

        def taken(pool, timeout=None):
            free = functools.partial(take, pool, 0)
            return free() if timeout is not None else self._wait(lambda: not pool.vacant.empty(), free)

        def rung(bell, timeout):
            return self._wait(lambda: not bell._silent.locked(), lambda: bell._silent.acquire(blocking=False))

        def tuned(workers):
            if (made := tuner(workers)) is not None:
                made.clock = clock.monotonic
            return made

        monkeypatch.setattr(ThreadWorker, "start", started)
        monkeypatch.setattr(ThreadWorker, "_main", worked)
        monkeypatch.setattr(SlotPool, "take", taken)
        monkeypatch.setattr(Bell, "wait", rung)
        monkeypatch.setattr(Workers, "tuner", tuned)
        monkeypatch.setattr(async_loader, "check", lambda *_, **__: None)  # a clock cannot be pickled
        monkeypatch.setattr(async_loader, "pipeline_of", threads_of)
        monkeypatch.setattr("lit_async_data.engine.resources.system_refusal", lambda: "")

    def _cpu(self):
        return getattr(self._own, "cpu", 0.0)

    def hold(self, gil, seconds):
        """Run Python code, in turn with other threads of a process."""
        for _ in range(round(seconds / SWITCH_S)):
            self.spend(SWITCH_S, lock=gil, cpu=True)

    def spend(self, seconds, *, lock=None, cpu=False):
        """Work, after others that have asked for the lock; ``cpu``: a core does."""
        self._own.cpu = self._cpu() + cpu * seconds
        with self._passed:
            if self._stopped:
                return
            end = max(self.now, self._free_at.get(lock, 0.0)) + seconds
            if lock is not None:
                self._free_at[lock] = end
            self._working.append(own := [end])
            self._running -= 1
            self._pass()
            assert self._passed.wait_for(lambda: not own, LONG)

    def _wait(self, may_go_on, go_on):
        with self._passed:
            self._may_go_on.append(may_go_on)
            self._running -= 1
            self._pass()
            given_up = time.monotonic() + LONG
            while not may_go_on():
                self._passed.wait(0.001)  # what it waits for tells nobody
                assert time.monotonic() < given_up
            self._may_go_on.remove(may_go_on)
            self._running += 1
            return go_on()

    def _count(self, threads):
        with self._passed:
            self._running += threads
            self._pass()

    def _pass(self):
        if self._working and not self._running and not any(may_go_on() for may_go_on in self._may_go_on):
            self.now = min(end for (end,) in self._working)
            self._go_on(until=self.now)

    def _go_on(self, until):
        for work in [work for work in self._working if work[0] <= until]:
            self._working.remove(work)
            self._running += 1
            work.clear()
        self._passed.notify_all()

    @contextlib.contextmanager
    def of(self, loader):
        """Closes the loader; what is left to be done takes no time."""
        try:
            yield loader
        finally:
            with self._passed:
                self._stopped = True
                self._go_on(until=math.inf)
            loader.close()
            self._stopped, self._free_at = False, {}


def threads_of(setup, *, pin, options):
    return ThreadPipeline(setup, lambda: allocated(setup.plan.layout.nbytes, pinned=False), timeout_s=LONG)
