"""Errors of optional work are suppressed, and the first that points at a bug is logged."""

import logging

import pytest

from lit_async_data.engine.supervisor import Unexpected
from lit_async_data.errors import ReadError, SourceError


@pytest.mark.parametrize(
    ("errors", "logged"),
    [
        ([], []),
        ([SourceError("bad data"), ReadError("bad")], ["lit_async_data.errors.ReadError: bad"]),
        ([SourceError("bad data"), ValueError("one"), KeyError("two")], ["ValueError: one"]),
    ],
)
def test_the_first_unexpected_error_is_logged_with_its_traceback(errors, logged, caplog):
    unexpected = Unexpected(logging.getLogger(__name__), "reading ahead failed")
    for error in errors:
        with unexpected:
            raise error
    assert [line.splitlines()[-1] for line in caplog.messages] == logged
    assert all(line.startswith("reading ahead failed. This is a bug") for line in caplog.messages)


def test_an_interrupt_is_not_suppressed():
    with pytest.raises(KeyboardInterrupt), Unexpected(logging.getLogger(__name__), "reading ahead failed"):
        raise KeyboardInterrupt
