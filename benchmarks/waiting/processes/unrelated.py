"""A process that reads as many batches per second as a loader does, and has nothing to do with the training loop."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from lit_async_data import AsyncLoader, Source


@contextlib.contextmanager
def unrelated(source: Source, options: dict[str, Any], period_s: float) -> Iterator[None]:
    """Read batches beside the block, one at the begin of each period, in a process of its own without other threads.

    What the loop loses beside it, no loader could save: the processes share memory, caches, and maybe cores.
    """
    setup = pickle.dumps((source, options, period_s))
    with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(setup)
            process.stdin.close()
            process.stdout.read(1)  # it has read its first batch
            yield
        finally:
            process.kill()


def main() -> None:
    source, options, period_s = pickle.load(sys.stdin.buffer)  # from `unrelated`
    with AsyncLoader(source, {**options, "workers": 0}) as loader:
        loader.next()
        sys.stdout.buffer.write(b".")
        sys.stdout.flush()
        due = time.perf_counter()
        while True:
            loader.next()
            due = max(due + period_s, time.perf_counter() - period_s)  # it does not catch up
            time.sleep(max(due - time.perf_counter(), 0.0))


if __name__ == "__main__":
    main()
