"""Whether Python runs with the GIL, and what follows for who reads."""

import sys

import numpy as np
import pytest

from lit_async_data.engine.resources.workers import Workers
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.testing import ArraySource


class Stored(ArraySource):
    def __init__(self, reading):
        super().__init__({"x": np.arange(6)})
        self._reading = reading

    @property
    def chunks(self):
        return StorageLayout(reading=self._reading)


@pytest.mark.parametrize(
    ("reading", "refusal", "chosen"),
    [
        ("decoded", "", ("process", 1, "samples are decoded")),
        ("python", "", ("process", 1, "Python code reads the samples")),
        ("python", "no memfd", ("caller", 0, "no memfd")),
    ],
)
def test_without_the_gil_threads_read_what_a_process_or_the_loop_would(monkeypatch, reading, refusal, chosen):
    monkeypatch.setattr("lit_async_data.engine.resources.workers.system_refusal", lambda: "")
    monkeypatch.setattr("lit_async_data.engine.resources.workers.cores", lambda ranks=None: 2)
    for gil_on, (kind, threads, why) in zip((True, False), (chosen, ("thread", chosen[1] or 1, "there is no GIL"))):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda gil_on=gil_on: gil_on, raising=False)
        workers = Workers.of(Stored(reading), LoaderOptions(batch_size=2), ahead=True, refusal=refusal)
        assert (workers.kind, workers.threads, workers.why) == (kind, threads, why)
