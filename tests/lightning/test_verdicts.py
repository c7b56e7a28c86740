"""What a Trainer's run says about its waits: at most a sentence per loop, none if it is quiet or nothing is new."""

import logging
import pickle

import pytest
from support.lightning.trainer import BATCH, NO_STAGES, SAMPLES, CountingSource, Recorder, datamodule, trainer

import lit_async_data as lad
from lit_async_data.engine.stats import Wait
from lit_async_data.engine.verdict import Verdict, Watch
from lit_async_data.lightning import display

pytestmark = NO_STAGES
STEPS = -(-SAMPLES // BATCH)


@pytest.fixture
def lines(caplog):
    """The lines that say how long something waited."""
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
    assert {stage: waited.steps for stage, waited in callback.evaluated.items()} == {
        "val": 2 * STEPS,
        "test": STEPS,
        "predict": STEPS,
    }
    assert all(waited.total_s > waited.waited_s > 0 for waited in callback.evaluated.values())


def test_a_sentence_is_said_again_only_if_something_has_changed(lines, found):
    found += [(0.5, "decode", "workers", 3), (0.45, "decode", "workers", 4), (0.7, "decode", "workers", 3)]
    found += [(0.5, "decode", "pack"), (0.01, "loop")]
    found += 2 * [(0.5, "read", "workers", 3), (0.7, "decode", "workers", 3)]  # two causes that take turns
    trainer(lad.DevicePrefetcher(), max_epochs=9).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert [line.partition(":")[0] for line in lines()] == [f"epoch {epoch}" for epoch in (0, 2, 3, 4, 5)]


def test_a_validation_that_keeps_up_is_not_spoken_of_in_training(lines, found):
    found += [(0.0, "loop")] * 2
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=all_stages())
    assert [line.partition(" ")[0] for line in lines()] == ["epoch"]


@pytest.mark.parametrize(("seconds", "steps", "said"), [(1.0, 20, 1), (0.9, 20, 0), (1.0, 19, 0)])
def test_a_short_epoch_is_not_spoken_of(lines, monkeypatch, seconds, steps, said):
    slow = Verdict(Wait(steps, wait_s=0.5, busy_s=seconds - 0.5), 0.5, "read")
    monkeypatch.setattr(Watch, "verdict", lambda *_: slow)
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert len(lines()) == said


def test_the_level_of_the_packages_logger_silences_lines_and_gauge(caplog, short):
    caplog.set_level("INFO")
    callback = lad.DevicePrefetcher()
    fit = trainer(callback, enable_progress_bar=True)
    metrics = []

    def look(stage, batch):
        metrics.append(fit.progress_bar_callback.get_metrics(fit, fit.lightning_module))

    logger = logging.getLogger("lit_async_data")
    logger.setLevel(logging.WARNING)
    try:
        fit.fit(Recorder(look), datamodule=all_stages())
    finally:
        logger.setLevel(logging.NOTSET)
    assert "waited" not in caplog.text
    assert "memory" not in caplog.text
    assert metrics
    assert not any("data" in each for each in metrics)
    assert callback.waited.steps == STEPS  # it measures all the same


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


def test_a_copy_of_the_callback_keeps_its_options():
    copied = pickle.loads(pickle.dumps(lad.DevicePrefetcher(3)))
    assert (copied.device_depth, copied.evaluated) == (3, {})
