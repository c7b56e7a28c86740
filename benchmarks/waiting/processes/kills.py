"""Kills reader processes at random moments: every end has a name, nothing hangs, nothing is left behind."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

from loading.hdf5 import Run
from measuring.program import Figures

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.errors import StalledError, WorkerError
from waiting.processes.process_tree import descendants, memory_files, name_of, runs, shared_memory_names
from waiting.processes.transforms import summed

NAMED = re.compile(r"reader process (\d+) was killed by SIGKILL")
READER = "lit_data reader"
# Seconds after which the loader raises, those after which the program prints all stacks and ends, and those that
# processes of a closed loader may take to end.
STALLED_S, WATCHDOG_S, ENDING_S = 30.0, 120.0, 5.0
# The longest time from the process that is waited for to the kill.
MOMENTS_S = 0.4
# Batches that must come after a process was killed.
AFTER = 24
HANG, UNNAMED, LEFT = "HANG", "UNNAMED END", "LEFT BEHIND"
BAD = (HANG, UNNAMED, LEFT)


@dataclasses.dataclass
class Kill:
    """A process that was killed.

    Attributes:
        pid: None until it happened.
        name: The name that the process had; python's until it has started.
        family: All processes of the loader that there were.
        bystanders: Processes of other parts of the program, such as the resource tracker of multiprocessing.
    """

    bystanders: frozenset[int] = dataclasses.field(default_factory=lambda: frozenset(descendants()))
    pid: int | None = None
    name: str = ""
    family: list[int] = dataclasses.field(default_factory=list)

    def of_the_loader(self) -> list[int]:
        """The processes that run or are not waited for yet."""
        return [pid for pid in descendants() if pid not in self.bystanders]


def kill_one(kill: Kill, rng: random.Random, over: threading.Event) -> None:
    """Wait for a process of a loader, then for a random moment, and kill one."""
    # One in four is killed while the processes start.
    awaited = "" if rng.random() < 0.25 else READER
    while not any(awaited in name_of(pid) for pid in kill.of_the_loader()):
        if over.wait(0.002):
            return
    if over.wait(rng.uniform(0, MOMENTS_S)):
        return
    family = [pid for pid in kill.of_the_loader() if runs(pid)]
    named = {pid: name_of(pid) for pid in family}
    victims = [pid for pid, name in named.items() if name == READER] or family
    if victims:
        pid = rng.choice(victims)
        # The parent waits only for processes that it ends itself: the id is not another process's by now.
        kill.name, kill.family, kill.pid = named[pid], family, pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Replaced(logging.Handler):
    """Keeps the warnings about processes that have ended."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def names(self, pid: int | None) -> bool:
        """Whether one of them names this process."""
        return any((match := NAMED.search(text)) and int(match[1]) == pid for text in self.texts)


def outcome(open_loader: Callable[[], AsyncLoader], rng: random.Random) -> tuple[str, str]:
    """Take batches until a kill shows; how the loader took it, and what it said."""
    kill, over = Kill(), threading.Event()
    thread = threading.Thread(target=kill_one, args=(kill, rng, over))
    before = memory_files(), shared_memory_names()
    found = UNNAMED, "no error came"
    thread.start()
    try:
        with open_loader() as loader:
            found = _taken(loader, kill)
    except Exception as error:  # noqa: BLE001  # any other end is what this program looks for
        found = UNNAMED, f"{type(error).__name__}: {error}"
    over.set()
    thread.join()
    gc.collect()
    if found[0] not in BAD and (left := left_behind(kill, *before)):
        return LEFT, left
    return found


def _taken(loader: AsyncLoader, kill: Kill) -> tuple[str, str]:
    until, replaced = time.monotonic() + STALLED_S, Replaced()
    with logged(replaced):
        return _taken_until(loader, kill, until, replaced)


@contextlib.contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
    logging.getLogger("lit_async_data").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("lit_async_data").removeHandler(handler)


def _taken_until(loader: AsyncLoader, kill: Kill, until: float, replaced: Replaced) -> tuple[str, str]:
    after = 0
    while time.monotonic() < until:
        # The error, if there is one, comes with its batch.
        after += replaced.names(kill.pid)
        if after > AFTER:
            return "a new process, no batch was lost", replaced.texts[-1]
        try:
            loader.next()
        except StalledError as error:
            return HANG, str(error)
        except WorkerError as error:
            text = str(error)
            match = NAMED.search(text)
            if match is None or int(match[1]) != kill.pid:
                return UNNAMED, f"{kill}: {text}"
            return "WorkerError, while the process started", text
    return UNNAMED, f"{kill}: no error in {STALLED_S} s"


def left_behind(kill: Kill, files: int, names: set[str]) -> str:
    """What a closed loader has left, in words; empty if nothing."""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until and (kill.of_the_loader() or any(map(runs, kill.family))):
        time.sleep(0.01)
    parts = [f"process {pid} ({name_of(pid)})" for pid in {*kill.of_the_loader(), *filter(runs, kill.family)}]
    parts += [f"{memory_files() - files} descriptors of memory"] if memory_files() > files else []
    parts += [f"/dev/shm/{name}" for name in shared_memory_names() - names]
    return ", ".join(parts)


def kills(run: Run) -> Figures:
    """Loaders of a compressed file: with one reader process, and with two that transform."""
    layout = dataclasses.replace(run.layouts["B"], batch=32)
    number, seed = 10 if run.quick else 200, random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    print(f"\n{number} kills at random moments, seed {seed}")
    with contextlib.closing(HDF5Source(run.path(layout))) as source:
        for turn, open_loader in enumerate(_loaders(source, layout.batch, number)):
            # Ends the program with the stacks of all threads if a call never returns.
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            end, text = outcome(open_loader, rng)
            faulthandler.cancel_dump_traceback_later()
            counts[end] += 1
            if end in BAD:
                print(f"kill {turn}: {end}: {text}")
    for end, count in counts.most_common():
        print(f"{count:>6}  {end}")
    return [{"outcome": end, "count": count, "bad": end in BAD, "seed": seed} for end, count in counts.items()]


def _loaders(source: HDF5Source, batch: int, number: int) -> Iterator[Callable[[], AsyncLoader]]:
    options = {"batch_size": batch, "shuffle": True, "worker_kind": "process", "workers": 2, "timeout_s": STALLED_S}
    kinds: list[Callable[[], AsyncLoader]] = [
        lambda: AsyncLoader(source, options),
        lambda: AsyncLoader(source, options, sample_transform=summed),
    ]
    for turn in range(number):
        yield kinds[turn % len(kinds)]
