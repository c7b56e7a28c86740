"""Host hooks in a real Trainer: the numbers that a sample gets are those of a plain loader, also after a resume."""

from __future__ import annotations

import collections

import pytest
from support.lightning.trainer import NO_STAGES, CountingSource, Recorder, at_every_depth, datamodule, trainer

import lit_async_data as lad

pytestmark = NO_STAGES


def drawing(sample, rng):
    return {**sample, "drawn": -1 if rng is None else int(rng.integers(2**62))}


def doubling(batch):
    batch["twice"] = 2 * batch["x"][:, 0]


class Drawn(Recorder):
    """Records what was drawn for each batch."""

    def __init__(self):
        super().__init__(self.note)
        self.drawn = collections.defaultdict(list)

    def note(self, stage, batch):
        assert (batch["twice"] == 2 * batch["index"]).all()
        self.drawn[stage] += batch["drawn"].tolist()


def wanted(epochs):
    options = {"batch_size": 4, "shuffle": True, "workers": 0}
    with lad.AsyncLoader(CountingSource(), options, sample_transform=drawing) as loader:
        return [number for _ in range(epochs) for batch in loader for number in batch["drawn"].tolist()]


def hooked(workers):
    hooks = {"sample_transform": drawing, "batch_transform": doubling}
    return datamodule({"workers": workers}, train=CountingSource(), val=CountingSource(), **hooks)


@at_every_depth
@pytest.mark.parametrize("workers", [0, 2])
def test_hooks_draw_the_same_in_a_trainer_and_nothing_in_validation(callbacks, workers):
    model = Drawn()
    trainer(*callbacks(), max_epochs=2, val_check_interval=0.5).fit(model, datamodule=hooked(workers))
    assert model.drawn["train"] == wanted(2)
    assert set(model.drawn["val 0"]) == {-1}


def test_hooks_draw_the_same_after_a_resume(tmp_path):
    saved = trainer(max_epochs=1)
    saved.fit(Drawn(), datamodule=hooked(1))
    saved.save_checkpoint(tmp_path / "end.ckpt")
    model = Drawn()
    trainer(max_epochs=2).fit(model, datamodule=hooked(2), ckpt_path=tmp_path / "end.ckpt")
    assert model.drawn["train"] == wanted(2)[22:]
