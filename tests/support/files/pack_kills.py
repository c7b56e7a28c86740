"""Kills a pack by SIGKILL at each of its writes in turn, half of them torn, and lets the next run go on.

Run as a program: ``pack_kills.py FOLDER`` prints one line of JSON. It forks a child for each run, so that importing
takes time once.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np

from lit_async_data import BatchSpec, FieldSpec, HDF5Source, Source
from lit_async_data.errors import ConfigError
from lit_async_data.tools.pack import packing
from lit_async_data.tools.pack.packing import pack
from lit_async_data.tools.pack.planning import plan
from lit_async_data.tools.pack.progress import Silent
from lit_async_data.tools.pack.writing import writes

SAMPLES = 8
VALUES = (np.add.outer(np.arange(SAMPLES), np.arange(4096)) // 9 % 256).astype("u1")
LABELS = np.arange(SAMPLES, dtype="i4")
DONE, KILLED, REFUSED, WRONG = 0, -signal.SIGKILL, 3, 4


class Numbers(Source):
    spec = BatchSpec({"x": FieldSpec((4096,), VALUES.dtype), "y": FieldSpec((), np.dtype("i8"))}, as_mapping=True)

    def __len__(self):
        return SAMPLES

    def read_into(self, samples, out):
        out["x"][...], out["y"][...] = VALUES[samples], LABELS[samples]


def kill_at(step, torn):
    """Ends this process at the given write; a torn one writes half of its bytes before."""
    count = 0

    def wrapped(name, write):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == step:
                if torn and name in ("write_at", "append"):
                    half = bytes(memoryview(args[1]).cast("B"))
                    write(args[0], half[: len(half) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return None if name == "sync" else write(*args, **kwargs)  # no power fails here

        return call

    for name in ("write_at", "append", "cut", "sync", "publish", "remove"):
        setattr(writes, name, wrapped(name, getattr(writes, name)))


class Ear(Silent):
    def begin(self, what, total, done=0):
        if what == "packing" and done:
            os.write(self.pipe, b"r")


def run(out, pipe, step=None, torn=False):
    """The exit status of a run in a child, which is killed at a step."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = WRONG
    try:
        plan.PIECE_BYTES, packing.COMMIT_BYTES = 2 * 4096, 4 * 4096
        kill_at(step, torn)
        ear = Ear()
        ear.pipe = pipe
        pack(Numbers(), out, codec="deflate", progress=ear)
        status = DONE
    except ConfigError as error:
        status = REFUSED if "exists already" in str(error) else WRONG
    finally:
        os._exit(status)


def right(out):
    packed = HDF5Source(out, {"x": "x", "y": "y"}, index_cache=False)
    batch = {key: np.empty((SAMPLES, *packed.spec[key].stored_shape), packed.spec[key].dtype) for key in packed.spec}
    packed.read_into(np.arange(SAMPLES), batch)
    packed.close()
    return np.array_equal(batch["x"], VALUES) and np.array_equal(batch["y"], LABELS)


def main(folder):
    problems, step, read, write = [], 0, *os.pipe()
    while True:
        step += 1
        out = f"{folder}/{step}.h5"
        status = run(out, write, step, torn=step % 2 == 0)
        if os.path.exists(out) and not right(out):
            problems.append(f"step {step}: a wrong file")
        if status == DONE:
            break
        if status != KILLED:
            problems.append(f"step {step}: status {status}")
        run(out, write, 1 + step % 7, torn=True)  # killed once more, soon after it began
        status = run(out, write)
        if status not in (DONE, REFUSED) or not right(out):
            problems.append(f"step {step}, then: status {status}")
        left = [name for name in os.listdir(folder) if name != f"{step}.h5"]
        if left:
            problems.append(f"step {step}: left behind {left}")
        os.unlink(out)
    os.close(write)
    print(json.dumps({"steps": step - 1, "resumed": len(os.read(read, 2**20)), "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1])
