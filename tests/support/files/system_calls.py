"""System calls that fail."""

import os


def failing(real, number, times):
    """A system call that fails a number of times, then works."""
    left = [times]

    def call(*args, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    return call
