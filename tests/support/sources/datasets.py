"""Samples of datasets, and errors of their sources."""

import pytest

from support.sources.oracle import read

__all__ = ["read", "refused"]


def refused(kind, said, build):
    with pytest.raises(kind, match=said) as caught:
        build()
    assert type(caught.value) is kind
    return caught.value
