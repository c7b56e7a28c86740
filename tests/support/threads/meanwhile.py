"""What another thread does between two steps of this one, done at just that moment."""

from __future__ import annotations

import itertools


class GoneAtSecondRead:
    """An attribute that another thread has set to None when it is read for the second time.

    Put it on a class in place of an attribute: objects keep their values, and have them when it is gone again.
    """

    def __init__(self, name):
        self._name = name
        self._reads = itertools.count(1)

    def __get__(self, holder, owner=None):
        return None if next(self._reads) == 2 else vars(holder)[self._name]

    def __set__(self, holder, value):
        vars(holder)[self._name] = value
