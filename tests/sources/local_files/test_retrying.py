"""What a disk or a file server failed to deliver is asked for once more; no other error is."""

import contextlib
import errno
import os

import pytest

from lit_async_data.sources import local_files
from lit_async_data.sources.local_files import PAUSE_S, errno_of, retry_once


@pytest.mark.parametrize(
    ("number", "failures", "reads"),
    [(number, failures, 2) for number in (errno.EIO, errno.ESTALE) for failures in (1, 2)]
    + [(number, 1, 1) for number in (errno.EMFILE, errno.ENOENT, errno.EACCES)],
)
def test_only_input_errors_are_waited_out_and_only_once(number, failures, reads, monkeypatch):
    done, pauses = [], []
    monkeypatch.setattr(local_files.time, "sleep", pauses.append)

    def read():
        done.append("read")
        if len(done) <= failures:
            raise OSError(number, os.strerror(number))
        return "data"

    with contextlib.nullcontext() if reads > failures else pytest.raises(OSError, match=os.strerror(number)):
        assert retry_once(read) == "data"
    assert (done, pauses) == (["read"] * reads, [PAUSE_S] * (reads - 1))


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (MemoryError(), errno.ENOMEM),
        (OSError(5, "?"), 5),
        (OSError("(errno = 116, "), 116),
        (OSError("errno = 0"), None),
    ],
)
def test_the_number_of_an_error_may_stand_in_its_message(error, number):
    assert errno_of(error) == number
