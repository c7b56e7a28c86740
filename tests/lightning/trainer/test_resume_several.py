"""Training on several loaders at once: no batch of a shorter one comes twice; stopped anywhere, it goes on with the
batches that were due of each."""

import contextlib
import importlib

import pytest
import torch
from support.lightning.trainer import NAME, CountingSource, Learning, Stateful, pl, trainer

import lit_async_data as lad
from lit_async_data.errors import ResumeError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CombinedLoader = importlib.import_module(f"{NAME}.utilities").CombinedLoader
LONG, SHORT, EPOCHS = 22, 10, 3  # six batches and three
PREFETCHED = (lad.DevicePrefetcher,)


def ours(samples, **options):
    basic = {"batch_size": 4, "shuffle": True, "return_indices": True, "workers": 1}
    return lad.AsyncLoader(CountingSource(samples, width=1), basic | options)


def theirs(samples):
    return lad.prefetched(Stateful(-(-samples // 4)), 2)


class StopError(Exception): ...


class Both(Learning):
    def __init__(self, place="", at=None, folder=None):
        super().__init__()
        self.steps, self.place, self.at, self.folder = [], place, at, folder
        setattr(self, f"on_train_{place}", self.passes)

    def passes(self, *_):
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        if (self.trainer.current_epoch, progress.ready) == self.at:
            if self.place == "step":
                raise StopError
            self.trainer.save_checkpoint(self.folder / "at.ckpt")

    def training_step(self, batch, number):
        if self.place == "step":
            self.passes()
        pair = batch.values() if isinstance(batch, dict) else batch
        self.steps.append([None if each is None else each["index"].tolist() for each in pair])
        return self.layer(torch.ones(1, 1)).sum()


def fitted(loaders, model=None, path=None, callbacks=PREFETCHED):
    model = Both() if model is None else model
    saving = [pl.callbacks.OnExceptionCheckpoint(model.folder, "at")] if model.place == "step" else []
    fit = trainer(*saving, *[kind() for kind in callbacks], max_epochs=EPOCHS, enable_checkpointing=bool(saving))
    with contextlib.ExitStack() as closing:
        for each in loaders.flattened:
            closing.callback(each.close)
        with contextlib.suppress(StopError):
            fit.fit(model, loaders.iterables if loaders._mode == "max_size_cycle" else loaders, ckpt_path=path)
    return model.steps


STEPS = [("step", batch, batch - 1) for batch in (1, 3, 6)]
ENDS = [("batch_end", 3, 3), ("batch_end", 6, 6), ("epoch_end", 6, 6)]


@pytest.mark.parametrize(
    ("mode", "made", "callbacks", "places"),
    [
        ("min_size", ours, PREFETCHED, [("step", 3, 2), ("batch_end", 3, 3)]),
        ("max_size", ours, PREFETCHED, [STEPS[1], *ENDS[:2]]),
        *(
            ("max_size_cycle", made, PREFETCHED, [*STEPS, ("batch_start", 3, 2), *ENDS, ("epoch_start", 6, 0)])
            for made in (ours, theirs)
        ),
        ("max_size_cycle", ours, (), [("batch_end", batch, batch) for batch in (1, 3, 4, 6)]),
    ],
)
def test_each_of_several_loaders_goes_on_where_it_was(tmp_path, mode, made, callbacks, places):
    def loaders():
        return CombinedLoader({"long": made(LONG), "short": made(SHORT)}, mode)

    whole = fitted(loaders(), callbacks=callbacks)
    for place, batch, done in places:
        at = len(whole) // EPOCHS + done
        before = fitted(loaders(), Both(place, (1, batch), tmp_path), callbacks=callbacks)
        assert before[:at] == whole[:at]
        assert fitted(loaders(), path=tmp_path / "at.ckpt", callbacks=callbacks) == whole[at:], (place, batch)
        (tmp_path / "at.ckpt").unlink()


def test_of_several_loaders_another_batch_size_is_refused(tmp_path):
    fitted(CombinedLoader([ours(LONG), ours(SHORT)], "max_size_cycle"), Both("batch_end", (1, 2), tmp_path))
    both = CombinedLoader([ours(LONG, batch_size=2), ours(SHORT)], "max_size_cycle")
    with pytest.raises(ResumeError, match=r"was 4 × 1, is 2 × 1, .* of several loaders at once: go back to 4 × 1"):
        fitted(both, path=tmp_path / "at.ckpt")


def drawing(samples):
    def draw(sample, rng):
        return sample | {"drawn": rng.random(1, dtype="float32")}

    return lad.AsyncLoader(CountingSource(samples, width=1), {"batch_size": 4, "shuffle": True}, sample_transform=draw)


class Drawn(Learning):
    def training_step(self, batch, number):
        if number == 0:
            self.seen.append([])
        self.seen[-1].append([each["drawn"].ravel().tolist() for each in (batch["a"], *batch["b"])])
        return self.layer(torch.ones(1, 1)).sum()


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [((), {}), (PREFETCHED, {}), (PREFETCHED, {"reload_dataloaders_every_n_epochs": 1})],
)
def test_a_shorter_loader_never_repeats_an_order_or_a_random_number(callbacks, options):
    class Nested(pl.LightningDataModule):
        def train_dataloader(self):
            return {"a": drawing(LONG), "b": [drawing(SHORT), drawing(5)]}

    model = Drawn()
    trainer(*[kind() for kind in callbacks], max_epochs=EPOCHS, **options).fit(model, datamodule=Nested())
    steps = [step for epoch in model.seen for step in epoch]
    assert len(steps) == 6 * EPOCHS
    for one in zip(*steps, strict=True):
        assert len({tuple(batch) for batch in one}) == len(steps)
    with drawing(SHORT) as alone:
        passes = [batch["drawn"].ravel().tolist() for _ in range(2 * EPOCHS) for batch in alone]
    assert [step[1] for step in steps] == passes  # three batches: two passes in each epoch
