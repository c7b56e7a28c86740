"""What training shows: lines before it, how full the queues are, and how long it waited."""

import contextlib
import io
import logging
import re

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.lightning.trainer import (
    BATCH,
    NO_STAGES,
    SAMPLES,
    STORED,
    CountingSource,
    Recorder,
    Recording,
    Watching,
    datamodule,
    pl,
    trainer,
)
from support.lightning.trainer import source as small
from tqdm import tqdm
from waiting.on_device.fake_streams import FakeStreams

import lit_async_data as lad
from lit_async_data.engine.stats import Verdict, Wait, Watch
from lit_async_data.lightning import display
from lit_async_data.lightning.display import print_line, summary_lines
from lit_async_data.sources.hdf5.readers import part_reader
from lit_async_data.testing import ArraySource

pytestmark = NO_STAGES


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    shown = Terminal()
    handler = logging.StreamHandler(shown)
    monkeypatch.setattr(logging.getLogger("lit_async_data"), "handlers", [handler])
    yield shown
    assert handler.stream is shown


def test_a_line_stands_above_a_bar_of_tqdm(terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal)
    with tqdm(total=3, file=terminal, mininterval=0) as bar:
        bar.update()
        print_line("epoch 0: fine")
    assert re.search(r"(\A|\n|\r|\x1b\[2K)epoch 0: fine\s*\n", terminal.getvalue())  # a row of its own


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_the_progress_bar_shows_how_full_the_queues_are(bar, capsys):
    shown, made = Watching(), getattr(pl.callbacks, bar)()
    fit = trainer(lad.DevicePrefetcher(), made, shown, enable_progress_bar=True, max_epochs=2)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert len(shown.shown) == 2 * len(STORED)
    for items in shown.shown:
        ready, depth = items["data"].removeprefix("host ").split("/")
        assert 0 <= int(ready) <= int(depth)
        assert int(depth) % 3 == 0  # queue_depth slots, each of one batch or several
    assert "get_metrics" not in vars(made)
    assert "data" not in fit.callback_metrics | fit.logged_metrics
    assert "host " in capsys.readouterr().out


STEPS = -(-SAMPLES // BATCH)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO")
    return lambda: [each.getMessage() for each in caplog.records if " waited " in each.getMessage()]


def all_stages():
    return datamodule(train=CountingSource(), val=CountingSource(), test=CountingSource(), predict=CountingSource())


@pytest.fixture
def short(monkeypatch):
    """Loops that are as short as those of tests are spoken of, too."""
    monkeypatch.setattr(display, "LEAST_S", 0.0)
    monkeypatch.setattr(display, "LEAST_STEPS", 1)


@pytest.fixture
def found(monkeypatch, short):
    """Share, cause and hint that are found out, loop by loop: a list to fill."""
    left, measured = [], Watch.verdict

    def verdict(self, total_s=None):
        return Verdict(measured(self, total_s).waited, *(left.pop(0) if left else (0.5, "read")))

    monkeypatch.setattr(Watch, "verdict", verdict)
    return left


def test_every_stage_is_counted_and_says_how_long_it_waited(lines, found):
    callback, dm = lad.DevicePrefetcher(), all_stages()
    fit = trainer(callback, max_epochs=1, num_sanity_val_steps=1)
    fit.fit(Recorder(), datamodule=dm)
    fit.test(Recorder(), datamodule=dm)
    fit.predict(Recorder(), datamodule=dm)
    fit.validate(Recorder(), datamodule=dm)  # nothing new
    begins = ["validation", "epoch 0: training", "test", "prediction"]
    assert [line.partition(" waited 50.0 % of ")[0] for line in lines()] == begins
    # Without the sanity check, whose batches are a part of a pass.
    steps = {"val": 2 * STEPS, "test": STEPS, "predict": STEPS}
    assert {stage: waited.steps for stage, waited in callback.evaluated.items()} == steps
    assert all(waited.total_s > waited.waited_s > 0 for waited in callback.evaluated.values())


def test_a_sentence_is_said_again_only_if_something_has_changed(lines, found):
    found += [(0.5, "decode", "workers", 3), (0.45, "decode", "workers", 4), (0.7, "decode", "workers", 3)]
    found += [(0.5, "decode", "pack"), (0.01, "loop")]
    found += 2 * [(0.5, "read", "workers", 3), (0.7, "decode", "workers", 3)]  # two causes that take turns
    trainer(lad.DevicePrefetcher(), max_epochs=9).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert [line.partition(":")[0] for line in lines()] == [f"epoch {epoch}" for epoch in (0, 2, 3, 4, 5)]


@pytest.mark.parametrize(("seconds", "steps", "said"), [(1.0, 20, 1), (0.9, 20, 0), (1.0, 19, 0)])
def test_a_short_epoch_is_not_spoken_of(lines, monkeypatch, seconds, steps, said):
    slow = Verdict(Wait(steps, wait_s=0.5, busy_s=seconds - 0.5), 0.5, "read")
    monkeypatch.setattr(Watch, "verdict", lambda *_: slow)
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert len(lines()) == said


def test_the_own_logger_silences_lines_and_gauge_by_its_level(terminal, caplog, short):
    caplog.set_level(logging.WARNING, logger="lit_async_data")
    callback, shown = lad.DevicePrefetcher(), Watching()
    trainer(callback, shown, enable_progress_bar=True).fit(Recorder(), datamodule=all_stages())
    assert terminal.getvalue() == ""
    assert shown.shown
    assert not any("data" in items for items in shown.shown)
    assert callback.waited.steps == STEPS  # it measures all the same
    print_line("samples come twice", logging.WARNING)
    caplog.set_level(logging.ERROR, logger="lit_async_data")
    print_line("samples come twice", logging.WARNING)
    assert terminal.getvalue() == "samples come twice\n"


def test_with_several_ranks_the_slowest_is_named_with_its_own_cure(monkeypatch, lines, short):
    fit = trainer(lad.DevicePrefetcher())

    def reduce(values, *_, reduce_op, **__):
        if reduce_op == "sum" and values.shape == (2,):
            assert not values[1]
            values[1] = 1.0
        return values

    def broadcast(mine, src=0):
        return Verdict(mine.waited, 1.0, "decode", "workers", 4) if isinstance(mine, Verdict) and src == 1 else mine

    monkeypatch.setattr(type(fit), "world_size", 2)
    monkeypatch.setattr(fit.strategy, "reduce", reduce)
    monkeypatch.setattr(fit.strategy, "broadcast", broadcast)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    (line,) = lines()
    assert "training on rank 1, the slowest of 2, waited 100.0 % of " in line
    assert line.endswith(", mostly for decoding; set loader.workers=4")


class Blind(Recorder):
    """Looks at no value: on this device none has arrived when the host asks."""

    def see(self, stage, batch, number): ...


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning")
def test_the_callback_logs_what_the_device_waited_per_step_and_per_epoch(caplog, monkeypatch, short):
    """Copies take time on this device, and nothing hides it."""
    streams = FakeStreams("side", {"copy": 0.03})
    pretend(monkeypatch, lambda device: streams)
    caplog.set_level("INFO")
    callback, logger = lad.DevicePrefetcher(), Recording()
    fit = trainer(callback, logger=logger, log_every_n_steps=1, max_epochs=2)
    source = ArraySource({"x": np.zeros((20, 5000), np.float32)})  # one large field, which travels in one copy
    with lad.AsyncLoader(source, {"batch_size": 4, "shuffle": False}) as loader:
        assert loader.stats().device is None
        fit.fit(Blind(), loader)
        waited = loader.stats().device
        assert loader.stats().metrics()["data/device_wait_ms"] == pytest.approx(1e3 * 0.03)
    assert loader.stats().device == waited is not None  # it is kept
    steps = [row["data/device_wait_ms"] for _, row in logger.rows if "data/device_wait_ms" in row]
    assert steps == pytest.approx([1e3 * 0.03] * 10)
    assert fit.callback_metrics["data/device_wait_ms"] == pytest.approx(1e3 * 0.03)
    assert callback.waited.device_s == pytest.approx(10 * 0.03)
    assert re.search(r"epoch 0: the device waited \d+\.\d % of ", caplog.text)


# -- the lines that describe a loader before training ----------------------------------------------------------------


def test_a_transform_on_the_device_is_named():
    def halved(batch):
        return {"x": batch["x"] / 2}

    for name, transform in {"halved": halved, "Sequential": torch.nn.Sequential(torch.nn.Flatten())}.items():
        with lad.AsyncLoader(small(8), {"batch_size": 4}, device_transform=transform) as loader:
            assert re.search(rf": x float32 \(3,\); device_transform .*{name}$", summary_lines(loader)[0])
    options = {"loader": {"batch_size": 4}, "device_transform": {"train": lad.Normalize(0.5, 2)}}
    with contextlib.closing(lad.AsyncDataModule(train=small(8), val=small(8), **options)) as dm:
        assert [line.rpartition("; ")[2] for line in dm.describe().split("\n") if " samples " in line] == [
            "device_transform Normalize makes x float32",
            dm.describe(["val"]).split("\n")[0],
        ]


def test_what_will_happen_is_said_for_every_rank():
    with lad.AsyncLoader(small(10_000), {"batch_size": 128, "shuffle": True}, rank=3, world_size=8) as loader:
        first, second, third = summary_lines(loader)
    assert first.startswith("10,000 samples from ")
    assert first.endswith(": x float32 (3,)")
    assert second == ("batch 128 × 8 ranks = 1024, 10 steps, seed 0, shuffle global: every sample is read alone")
    assert third.startswith("1 reader thread (a test of threads), queue depth 4: 5 slots of 1.5 KiB = 7.5 KiB, of ")


def test_the_price_of_a_shuffle_over_compressed_chunks_is_said(h5, caplog, monkeypatch):
    data = {"data": np.zeros((6400, 4), "u1"), "chunks": (64, 4), "compression": "gzip"}
    source = lad.HDF5Source(h5(data=data), ["data"])
    with lad.AsyncLoader(source, {"batch_size": 10, "shuffle": "global"}) as loader:
        assert "shuffle global: each chunk is decoded once and kept" in summary_lines(loader)[1]
    monkeypatch.setattr(part_reader, "RECENT_BYTES", 0)  # as if the file were larger
    with lad.AsyncLoader(source, {"batch_size": 10, "shuffle": "global"}) as loader:
        said = "61.2 samples are decoded for each one used, since 64 share"
        assert said in summary_lines(loader)[1]
        next(loader)
        assert f"shuffle=global: {said}" in caplog.messages[0]
    caplog.clear()
    with lad.AsyncLoader(source, {"batch_size": 10, "shuffle": "global", "cache_bytes": 10**6}) as loader:
        assert "25.0 KiB cache" in summary_lines(loader)[2]
    with lad.AsyncLoader(source, {"batch_size": 10, "shuffle": True, "shuffle_chunks": 5, "workers": 2}) as loader:
        assert summary_lines(loader)[1] == (
            "batch 10, 640 steps, seed 0, shuffle chunk: a batch draws from about 5 of 100 chunks; "
            "every chunk is decoded once per epoch; decoded chunks take 4.8 KiB"
        )
        assert "5 slots of 1.5 KiB + 4.8 KiB decoded = 12.3 KiB" in summary_lines(loader)[2]
    assert not caplog.messages


def test_the_shuffle_of_windows_over_many_chunks_is_said_as_it_is(h5):
    frame = {"data": np.zeros((3000, 64, 64), "u1"), "chunks": (1, 64, 64), "compression": "gzip"}
    source = lad.HDF5Source(h5(frame=frame), {"frame": lad.Field("frame", offsets=[-15, -10, -5, 0])})
    options = {"batch_size": 64, "shuffle": True, "workers": 0}
    with lad.AsyncLoader(source, options) as loader:
        said = "chunk: a batch draws from about 8 of 50 stretches of up to 60 chunks; every chunk is decoded 1.2 times"
        assert said in summary_lines(loader)[1]
        first = np.sort([source.locate([number])[0].row // 60 for number in loader.order.batch(0)])
        assert len(np.unique(first)) >= 8
        total = loader.footprint.budget.total
    with pytest.raises(lad.MemoryBudgetError, match=r"shuffle_chunks \(below 8\)"):
        lad.AsyncLoader(source, options | {"memory_budget": total - 1})
    with lad.AsyncLoader(source, options | {"memory_budget": total - 1, "shuffle_chunks": 7}) as loader:
        assert "about 7 of 50 stretches" in summary_lines(loader)[1]
