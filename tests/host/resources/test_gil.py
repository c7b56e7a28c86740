"""A free-threaded Python that runs with the GIL all the same says so once, and which module wants it."""

from __future__ import annotations

import importlib
import logging
import sys
import sysconfig
import types

import numpy as np
import pytest

from lit_async_data import AsyncLoader, prefetched
from lit_async_data.host.resources import gil
from lit_async_data.host.resources.workers import Workers
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.testing import ArraySource

# As CPython 3.14 words it.
WARNING = (
    "The global interpreter lock (GIL) has been enabled to load module 'old._speedups', which has not declared that it "
    "can run safely without the GIL. To override this behavior and keep the GIL disabled (at your own risk), run with "
    "PYTHON_GIL=0 or -Xgil=0."
)


@pytest.fixture
def python(monkeypatch):
    """A free-threaded Python: ``python(gil=True, flag=1, recorded={})``."""

    def made(*, gil_on=True, flag=None, recorded=None, built=1):
        monkeypatch.setattr(gil, "_unlogged", [True])
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil_on, raising=False)
        monkeypatch.setattr(
            gil, "sys", types.SimpleNamespace(_is_gil_enabled=lambda: gil_on, flags=Flags(flag), modules=sys.modules)
        )
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: built if name == "Py_GIL_DISABLED" else None)
        monkeypatch.setattr(importlib._bootstrap, "__warningregistry__", recorded or {}, raising=False)

    return made


class Flags:
    def __init__(self, value):
        self.gil = value


RECORDED = {"version": 0, ("another warning", RuntimeWarning, 1): True, (WARNING, RuntimeWarning, 491): True}


def test_the_module_that_wants_the_gil_is_named(python):
    python(recorded=RECORDED)
    assert gil.why_gil().startswith("the extension module 'old._speedups' turned it on")


def test_where_nothing_was_recorded_it_says_how_to_see_the_name(python):
    python()
    assert "python -W always shows it" in gil.why_gil()


def test_where_the_user_wants_the_gil_nothing_else_is_blamed(python):
    python(flag=1, recorded=RECORDED)
    assert gil.why_gil() == "PYTHON_GIL=1 or -X gil=1 turned it on"


@pytest.mark.parametrize("options", [{"gil_on": False}, {"built": 0}, {"built": None}])
def test_there_is_nothing_to_say_without_the_gil_and_on_other_builds(python, options):
    python(recorded=RECORDED, **options)
    assert gil.why_gil() == ""


def loaders():
    return [
        AsyncLoader(ArraySource({"x": np.arange(6)}), {"batch_size": 2}),
        prefetched([[1], [2]], device="cpu"),
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["source", "iterable"])
def test_the_first_batch_of_a_process_logs_it_once(python, caplog, number):
    python(recorded=RECORDED)
    with loaders()[number] as loader:
        assert not caplog.records
        next(loader)
        next(loader)
    for loader in loaders():
        with loader:
            next(loader)
    (record,) = [record for record in caplog.records if record.name == "lit_async_data.host.resources.gil"]
    assert record.levelno == logging.WARNING
    assert "'old._speedups'" in record.message


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
        ("decoded", "", ("process", 1, "chunks are decoded")),
        ("python", "", ("process", 1, "Python code reads the samples")),
        ("python", "no memfd", ("caller", 0, "no memfd")),
    ],
)
def test_without_the_gil_threads_read_what_a_process_or_the_loop_would(python, monkeypatch, reading, refusal, chosen):
    monkeypatch.setattr("lit_async_data.host.resources.workers.system_refusal", lambda: "")
    monkeypatch.setattr("lit_async_data.host.resources.workers.cores", lambda ranks=None: 2)
    for gil_on, (kind, threads, why) in zip((True, False), (chosen, ("thread", chosen[1] or 1, "there is no GIL"))):
        python(gil_on=gil_on)
        workers = Workers.of(Stored(reading), LoaderOptions(batch_size=2), ahead=True, refusal=refusal)
        assert (workers.kind, workers.threads, workers.why) == (kind, threads, why)


# -- whether threads take it from each other ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "queued", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0.0, False),
        ([0.005, 0.0, 0.0, 0.0, 0.0], 0.0, False),  # once may be an accident
        ([0.005, 0.0, 0.005, 0.0, 0.0], 0.0, True),
        ([0.005] * 5, 0.004, False),  # a wait for a core
        ([0.012] * 5, 0.004, True),
    ],
)
def test_whether_the_gil_is_taken_is_tried_by_letting_it_go(monkeypatch, waits, queued, expected):
    now, queue, left = [0.0], [0.0], list(waits)

    def sleep(seconds):
        now[0] += seconds + left.pop(0)
        queue[0] += queued

    monkeypatch.setattr(gil, "time", types.SimpleNamespace(sleep=sleep, perf_counter=lambda: now[0]))
    monkeypatch.setattr(gil, "thread_seconds", lambda _: (0.0, queue[0]))
    monkeypatch.setattr(gil, "has_gil", lambda: True)
    assert gil.gil_is_taken() is expected
    assert not left


def test_without_a_gil_nobody_takes_it(monkeypatch):
    monkeypatch.setattr(gil, "has_gil", lambda: False)
    monkeypatch.setattr(gil.time, "sleep", pytest.fail)
    assert not gil.gil_is_taken()
