"""Loaders with random options, interrupted at random, hand out the order of the epoch and leave nothing behind.

In the folder ``tests``: ``python -m scenarios.soak --seconds 600 --seed 0``; with ``--kills 200`` until as many reader
processes were killed, at random moments. What a seed tries is always the same; only when a process dies is not. Next to
each loader a twin that reads in the caller's thread does the same; the order itself is that of the plan alone.
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import logging
import os
import random
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path

import h5py
import numpy as np
from support.processes import children
from support.threads.leaks import alive, shared_memory

from lit_async_data import AsyncLoader, DatasetSource, HDF5Source, ManifestSource

# The file of ``bad gzip`` has one damaged chunk, and ``bad files`` lack some.
ROWS, CHUNK, BAD_CHUNK, MISSING = 61, 4, 5, (3, 40)
BAD = {"bad gzip": set(range(BAD_CHUNK * CHUNK, BAD_CHUNK * CHUNK + CHUNK)), "bad files": set(MISSING)}
RESTARTS, SECONDS, GROWTH_BYTES = 3, 120, 64 * 2**20


def drawn(sample, rng):
    return {**sample, "drawn": 0 if rng is None else rng.integers(2**40)}


@functools.cache
def sources(folder):
    values = np.random.default_rng(0).integers(0, 9, (ROWS, 4000)).astype("f4")
    made = {"Python": lambda: DatasetSource([{"x": row, "y": number} for number, row in enumerate(values[:, :9])])}
    for name in ("raw", "gzip", "bad gzip"):
        path = os.path.join(folder, f"{name}.h5")
        with h5py.File(path, "w") as file:
            options = {"chunks": (CHUNK, 4000), "compression": "gzip"} if "gzip" in name else {}
            data = file.create_dataset("x", data=values, **options)
            place = data.id.get_chunk_info(BAD_CHUNK).byte_offset if name in BAD else 0
        if name in BAD:
            with open(path, "r+b") as file:
                file.seek(place + 6)
                file.write(bytes(12))
        made[name] = functools.partial(HDF5Source, path, {"x": "x"})
    for number, row in enumerate(values):
        np.save(os.path.join(folder, f"{number}.npy"), row)
    for name in ("files", "bad files"):
        table = Path(folder, f"{name}.jsonl")
        files = [f"{'no' * (number in BAD.get(name, ()))}{number}.npy" for number in range(ROWS)]
        table.write_text("".join(json.dumps({"x": file, "y": number}) + "\n" for number, file in enumerate(files)))
        made[name] = functools.partial(ManifestSource, table, {"x": "x", "y": "y"}, check_files="none")
    return made


class Ranks:
    """The loaders of all ranks, which do the same."""

    def __init__(self, source, world_size, options, state, hooks):
        self.loaders = [AsyncLoader(source, options, rank=r, world_size=world_size, **hooks) for r in range(world_size)]
        for loader in self.loaders if state else ():
            loader.load_state_dict(state)
        self.kept = []  # tensors of the last step, and what was in them
        self.begin()

    def begin(self, epoch=None):
        for loader in self.loaders if epoch is not None else ():
            loader.set_epoch(epoch)
        self.passes = [iter(loader) for loader in self.loaders]

    def step(self):
        """The batches of the next step by rank, as plain values; none if the pass is over, on all ranks."""
        batches = [next(each, None) for each in self.passes]
        assert all(tensor.numpy().tobytes() == content for tensor, content in self.kept), "a batch has changed"
        if None in batches:
            assert batches == [None] * len(batches), "a rank has more batches than another"
            self.begin()
            return []
        found = [{key: value.numpy().tobytes() for key, value in batch.items()} for batch in batches]
        self.kept = [(batch[key], each[key]) for batch, each in zip(batches, found, strict=True) for key in each]
        return [{**each, "index": batch["index"].tolist()} for batch, each in zip(batches, found, strict=True)]

    def beside(self):
        """A batch of another pass, while one is under way; none if nothing remains of it."""
        return [batch["index"].tolist() for loader in self.loaders for batch in itertools.islice(loader, 1)]

    def prefetch(self):
        for loader in self.loaders:
            loader._prefetch()

    def state(self):
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        places = [{key: value for key, value in state.items() if key != "bad_samples"} for state in states]
        assert all(place == places[0] for place in places), places
        return states[0]


class Killer(threading.Thread):
    """Kills ``count`` reader processes of this process, at random moments."""

    def __init__(self, count, moments):
        super().__init__(name="killer", daemon=True)
        self.kills, self._count, self._moments, self._before = 0, count, moments, children(os.getpid())

    def run(self):
        until = time.monotonic() + SECONDS / 2
        while self.kills < self._count and time.monotonic() < until:
            time.sleep(self._moments.uniform(0, 0.3))
            if found := sorted(children(os.getpid()) - self._before):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._moments.choice(found), signal.SIGKILL)
                    self.kills += 1


class Run:
    """What a seed draws: a source, options, and up to three parts, each with other ranks and workers."""

    def __init__(self, seed, folder, kills):
        self.draw = draw = random.Random(seed)
        name = draw.choice(sorted(sources(folder)))
        self.bad, self.build = BAD.get(name, set()), sources(folder)[name]
        self.kills, self.killed, self.state = kills, 0, None
        self.options = {"shuffle": draw.choice(["none", "chunk", "global"]), "shuffle_chunks": draw.randint(1, 6)}
        self.options |= {"seed": draw.randrange(99), "drop_last": draw.random() < 0.3, "return_indices": True}
        self.options |= {"on_error": draw.choice(["skip", "substitute"] if self.bad else ["raise", "skip"])}
        self.options |= {"max_bad": 1.0, "timeout_s": SECONDS / 2, "augment": draw.random() < 0.7}
        self.hooks = {"sample_transform": drawn} if draw.random() < 0.4 else {}

    def play(self):
        with contextlib.closing(self.build()) as source:
            for _ in range(self.draw.randint(1, 3)):
                self.part(source)

    def part(self, source):
        draw, left = self.draw, ROWS - (self.state["position"] if self.state else 0) or ROWS
        kind = "process" if self.kills or draw.random() < 0.06 else "thread"
        world_size = 1 if kind == "process" else draw.randint(1, min(3, left))
        options = self.options | {"batch_size": draw.randint(1, min(9, ROWS // world_size))}
        own = {"workers": draw.randint(kind == "process", 3), "worker_kind": kind, "queue_depth": draw.randint(1, 5)}
        own |= {"cache_bytes": draw.choice([0, 2**20]), "restarts": RESTARTS}
        killer = Killer(min(self.kills - self.killed, RESTARTS), random.Random(draw.random()))
        ours = Ranks(source, world_size, options | own, self.state, self.hooks)
        twin = Ranks(source, world_size, options | {"workers": 0}, self.state, self.hooks)
        killer.start()
        for acts in itertools.count():
            if acts >= 12 and not killer.is_alive():
                break
            match draw.choice(["steps", "steps", "epoch", "break", "beside", "set_epoch", "prefetch"]):
                case "steps":
                    self.compare(ours, twin, draw.randint(1, 5), options)
                case "epoch":
                    self.compare(ours, twin, ROWS + 1, options)
                case "break" | "set_epoch" as act:
                    epoch = draw.randrange(5) if act == "set_epoch" else None
                    ours.begin(epoch)
                    twin.begin(epoch)
                case "beside":
                    assert ours.beside() == twin.beside()
                case "prefetch":
                    ours.prefetch()
        self.killed, self.state = self.killed + killer.kills, twin.state()
        assert ours.state() == self.state
        for loader in [*ours.loaders, *twin.loaders] if draw.random() < 0.7 else ():  # garbage collection closes others
            loader.close()

    def compare(self, ours, twin, steps, options):
        """Take some steps of a pass, and compare them with those of the twin, and with the order."""
        for _ in range(steps):
            before, found = twin.state(), ours.step()
            assert found == twin.step()
            if not found:
                return
            after = twin.state()
            again = before["epoch"] != after["epoch"] or before["position"] >= after["position"]
            places = np.arange(0 if again else before["position"], after["position"])
            if options["drop_last"]:  # the place behind the last step is the end
                places = places[: options["batch_size"] * len(found)]
            plan = twin.loaders[0]._wiring.schedule.plan(after["epoch"])
            stretch, dealt = plan.deck.samples(places).tolist(), collections.Counter()
            dealt.update(sample for batch in found for sample in batch["index"])
            good = collections.Counter(sample for sample in stretch if sample not in self.bad)
            assert good <= dealt, (before, after, dealt, stretch)
            assert not dealt.keys() & self.bad
            whole = options["on_error"] != "skip" or good.total() == len(stretch)
            assert dealt.total() == len(stretch) if whole else dealt.total() <= len(stretch)


def held():
    """What this process holds, and its children."""
    gc.collect()
    gc.freeze()  # what lives on is never garbage; the next collection need not look through it
    return alive() | {"shared memory": shared_memory(), "children": children(os.getpid())}


def checked(seed, folder, kills=0):
    """Try what a seed draws; returns how many processes were killed meanwhile.

    Raises:
        AssertionError: A batch or a place is wrong, or something is left behind.
    """
    sources(folder)
    before, run, until = held(), Run(seed, folder, kills), time.monotonic() + SECONDS / 2
    run.play()
    killed = run.killed
    del run
    while left := {kind: now - before[kind] for kind, now in held().items() if now - before[kind]}:
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.01)
    return killed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    began, killed, seed, memory = time.monotonic(), 0, given.seed, 0
    with tempfile.TemporaryDirectory() as folder:
        while killed < given.kills if given.kills else time.monotonic() < began + given.seconds:
            print(f"\rseed {seed}", end=" ", flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            killed += checked(seed, folder, given.kills - killed)
            faulthandler.cancel_dump_traceback_later()
            seed += 1
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            memory = now if seed <= given.seed + 50 else memory
            assert now < memory + GROWTH_BYTES, f"memory grew from {memory} to {now} bytes"
    print(f"\n{seed - given.seed} runs, {killed} kills, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
