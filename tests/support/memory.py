"""The memory that a call takes."""

import tracemalloc

SMALL = 512 * 1024  # bytes of the objects of Python itself, and of the steps of a check sum


def peak(work):
    work()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
