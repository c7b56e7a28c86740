"""`headspace=True`: batches are repeated, to show what a better loader would save."""

import math
from types import SimpleNamespace

import pytest
from support.lightning.trainer import NO_STAGES, CountingSource, Recorder, datamodule, trainer

import lit_async_data as lad
from lit_async_data.engine.verdict.headspace import Headspace, RepeatingQueue
from lit_async_data.errors import ConfigError
from lit_async_data.order.plan import BatchIndex


def test_a_repeated_batch_has_not_been_transformed_again():
    queue = RepeatingQueue(SimpleNamespace(take=lambda key: key, transform_s=0.25), real=1, steps=3)
    assert [(queue.take(BatchIndex(0, step)), queue.transform_s) for step in range(3)] == [
        (BatchIndex(0, 0), 0.25),
        (BatchIndex(0, 0), 0.0),
        (BatchIndex(0, 0), 0.0),
    ]


@NO_STAGES
def test_headspace_repeats_batches_in_the_second_half_of_each_epoch(caplog):
    caplog.set_level("INFO")
    model, callback = Recorder(), lad.DevicePrefetcher(headspace=True)
    fit = trainer(callback, max_epochs=2)
    fit.fit(model, datamodule=datamodule(train=CountingSource(88), val=CountingSource()))
    (warned,) = [each for each in caplog.records if "this is no training" in each.getMessage()]
    assert warned.levelname == "WARNING"
    for seen in model.seen["train"]:
        assert len(seen) == 22
        real, repeated = seen[:11], seen[11:]
        assert len({tuple(batch) for batch in real}) == 11
        kept = [batch for batch in real if batch in repeated]
        assert len(kept) == 4
        assert all(batch in kept for batch in repeated)
    assert model.seen["train"][0][:11] != model.seen["train"][1][:11]
    said = [each.getMessage() for each in caplog.records if "headspace: " in each.getMessage()]
    assert [line[:20] for line in said] == ["epoch 0: headspace: ", "epoch 1: headspace: "]
    assert all("steps/s with this loader" in line and "a better loader saves" in line for line in said)
    assert fit.callback_metrics["data/headspace"] >= 0


@NO_STAGES
def test_headspace_is_refused_where_it_makes_no_sense(tmp_path):
    with pytest.raises(ConfigError, match="headspace: repeated batches are not copied"):
        lad.DevicePrefetcher(headspace=True, verify_copies=2)
    path = str(tmp_path / "x.ckpt")
    fit = trainer(max_epochs=1)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    fit.save_checkpoint(path)
    with pytest.raises(ConfigError, match="headspace: this run resumes"):
        trainer(lad.DevicePrefetcher(headspace=True), max_epochs=2).fit(
            Recorder(), datamodule=datamodule(train=CountingSource()), ckpt_path=path
        )


def test_headspace_leaves_out_first_steps():
    headspace = Headspace(20)
    for step in range(20):
        headspace.step(step, {0: 50.0, 10: 50.0}.get(step, 2.0 if step < 10 else 1.0))
    assert headspace.gain == pytest.approx(50)
    headspace = Headspace(4)
    assert math.isnan(headspace.gain)
    assert "too few steps" in str(headspace)
