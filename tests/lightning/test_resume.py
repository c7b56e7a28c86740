"""Resumed training: sees the batches of an uninterrupted run, from any checkpoint, or is refused."""

import importlib
import logging
from collections import Counter

import numpy as np
import pytest
import torch
from support.lightning.trainer import NAME, SAMPLES, CountingSource, Recorder, Stateful, datamodule, pl, plan, trainer
from support.plans import plan_of
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import ResumeError

# Lightning remarks on callbacks that a resumed run lacks, and on stages without data.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS, EPOCHS = 6, 3
WHOLE = [plan(epoch) for epoch in range(EPOCHS)]


class Saver(pl.Callback):
    def __init__(self, path, hook, batches=None):
        self.path, self.batches = str(path), batches
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        now = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.current_epoch == 1 and self.batches in (None, now.ready):
            trainer.save_checkpoint(self.path)


def fitted(*callbacks, loader=None, force_resume=False, samples=SAMPLES, **options):
    fit = trainer(*callbacks, **{"limit_val_batches": 2, "max_epochs": EPOCHS} | options)
    sources = {"train": CountingSource(samples), "val": CountingSource(width=1)}
    return fit, datamodule(loader, force_resume=force_resume, **sources)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a checkpoint that is written in a hook, at a given batch; many tests begin with the same."""
    made = {}

    def checkpoint(hook, batches=None, callbacks=list, **options):
        key = str((hook, batches, callbacks, options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved") / "at.ckpt"
            fit, dm = fitted(Saver(made[key], hook, batches), *callbacks(), **options)
            fit.fit(Recorder(), datamodule=dm)
        return made[key]

    return checkpoint


class Continued(Recorder):
    """Begins a new list of batches with each epoch, not with batch 0 as its parent."""

    def see(self, stage, batch, number):
        if stage == "train" and (not self.seen.get(stage) or self.epoch != self.current_epoch):
            self.seen[stage].append([])
        self.epoch = self.current_epoch
        super().see(stage, batch, number or (1 if stage == "train" else 0))


def flat(batches):
    return [sample for batch in batches for sample in batch]


def resumed(path, callbacks=list, model=Continued, **options):
    model = model()
    fit, dm = fitted(*callbacks(), **options)
    fit.fit(model, datamodule=dm, ckpt_path=str(path))
    return model.seen["train"]


def driven():
    return [lad.DevicePrefetcher()]


with_and_without = pytest.mark.parametrize("callbacks", [list, driven])


@with_and_without
@pytest.mark.parametrize(
    ("hook", "batches", "done"),
    [
        ("on_train_batch_start", 1, 0),  # interrupted before the first step
        ("on_train_batch_end", 1, 1),
        ("on_before_backward", 5, 4),
        ("on_train_batch_end", 5, 5),
        ("on_validation_start", STEPS, STEPS),
        ("on_validation_end", STEPS, STEPS),
        ("on_train_epoch_end", STEPS, STEPS),
    ],
)
def test_what_has_not_been_trained_on_follows(saved, callbacks, hook, batches, done):
    path = saved(hook, batches, callbacks)
    assert resumed(path, callbacks) == [rest for rest in (WHOLE[1][done:], WHOLE[2]) if rest]


def test_with_the_callback_an_epoch_that_had_only_begun_is_whole(saved, caplog):
    """Lightning alone takes it for done, as it still has the counters of the epoch before."""
    path = saved("on_train_epoch_start")
    assert resumed(path, driven) == WHOLE[1:]
    caplog.set_level(logging.INFO)
    assert resumed(path) == WHOLE[2:]
    assert caplog.text.count("epoch 1 is left out: the checkpoint was written when it had only begun") == 1


class StopError(Exception): ...


class Stopping(Continued):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def training_step(self, batch, number):
        if (self.current_epoch, number) == (1, self.batch):
            raise StopError
        return super().training_step(batch, number)


def kept(folder, **options):
    return pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", **options)


@with_and_without
@pytest.mark.parametrize("batch", [0, 5])
def test_after_an_exception_the_failed_batch_comes_again(tmp_path, callbacks, batch):
    folder = tmp_path / "kept"
    saving = [kept(folder, save_top_k=-1), pl.callbacks.OnExceptionCheckpoint(folder)]
    fit, dm = fitted(*saving, *callbacks(), enable_checkpointing=True)
    with pytest.raises(StopError):
        fit.fit(Stopping(batch), datamodule=dm)
    assert resumed(folder / "on_exception.ckpt", callbacks) == [WHOLE[1][batch:], WHOLE[2]]
    assert resumed(folder / "epoch=0-step=6.ckpt", callbacks) == WHOLE[1:]


@with_and_without
@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"limit_train_batches": 4, "every_n_train_steps": 3},
        {"reload_dataloaders_every_n_epochs": 1, "every_n_train_steps": 3},
    ],
    ids=str,
)
def test_each_file_of_a_model_checkpoint_goes_on_where_it_was_written(tmp_path, callbacks, options):
    its = {name: value for name, value in options.items() if name.endswith("steps")}
    of_fit = {name: value for name, value in options.items() if name not in its}
    folder, steps = tmp_path / "kept", options.get("limit_train_batches", STEPS)
    fit, dm = fitted(kept(folder, save_top_k=-1, **its), *callbacks(), enable_checkpointing=True, **of_fit)
    fit.fit(Recorder(), datamodule=dm)
    middle = 0
    for path in folder.iterdir():
        counted = torch.load(path, weights_only=False)["loops"]["fit_loop"]
        epoch = counted["epoch_progress"]["current"]["ready"] - 1
        done = counted["epoch_loop.batch_progress"]["current"]["processed"]
        expected = [order[:steps] for order in [WHOLE[epoch][done:steps], *WHOLE[epoch + 1 :]] if order]
        assert resumed(path, callbacks, **of_fit) == expected
        middle += 0 < done < steps
    assert 0 < middle < len(list(folder.iterdir()))


class Decaying(Continued):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return [optimizer], [{"scheduler": decay, "interval": "epoch"}]


# The step at which the first run ends, by what, who writes its checkpoint, and how far the second run goes.
CUTS = [
    (2, "max_steps", "ModelCheckpoint", {"max_epochs": EPOCHS}),
    (8, "max_steps", "save_checkpoint", {"max_steps": 18, "max_epochs": -1}),
    (6, "should_stop", "ModelCheckpoint", {"max_steps": 18, "max_epochs": -1}),
    (6, "max_steps", "save_checkpoint", {"max_steps": 18, "max_epochs": EPOCHS}),
]


@with_and_without
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_after_a_run_that_ended_in_the_middle_of_an_epoch_its_rest_comes(tmp_path, caplog, callbacks, cut):
    step, ends, writer, then = cut
    ending = {"max_steps": step} if ends == "max_steps" else {"max_epochs": 5}
    saving = [pl.callbacks.ModelCheckpoint(tmp_path, "at")] if writer == "ModelCheckpoint" else []

    def end(trainer, *_):  # as EarlyStopping and max_time do
        trainer.should_stop = trainer.should_stop or trainer.global_step == step

    stops = [] if ends == "max_steps" else [pl.callbacks.LambdaCallback(on_train_batch_end=end)]
    fit, dm = fitted(*callbacks(), *saving, *stops, enable_checkpointing=bool(saving), **ending)
    fit.fit(Decaying(), datamodule=dm)
    if not saving:
        fit.save_checkpoint(tmp_path / "at.ckpt")
    model = Decaying()
    again, dm = fitted(*callbacks(), **then)
    again.fit(model, datamodule=dm, ckpt_path=str(tmp_path / "at.ckpt"))
    epoch, done = divmod(step, STEPS)
    assert model.seen["train"] == [WHOLE[epoch][done:], *WHOLE[epoch + 1 :]]
    assert model.epoch == EPOCHS - 1
    assert (again.current_epoch, again.global_step) == (EPOCHS, STEPS * EPOCHS)
    assert again.optimizers[0].param_groups[0]["lr"] == model.learning_rate * 0.5**EPOCHS
    assert "is not used" not in caplog.text


@with_and_without
def test_an_epoch_that_the_model_ends_is_over(tmp_path, callbacks):
    class Skips(Recorder):
        def on_train_batch_start(self, batch, number):
            return -1 if number == 2 else None

    fit, dm = fitted(*callbacks(), max_epochs=2)
    fit.fit(model := Skips(), datamodule=dm)
    assert model.seen["train"] == [WHOLE[0][:2], WHOLE[1][:2]]
    fit.save_checkpoint(tmp_path / "at.ckpt")
    assert resumed(tmp_path / "at.ckpt", callbacks) == WHOLE[2:]


@pytest.mark.parametrize(("stage", "callbacks"), [("validate", list), ("test", driven), ("predict", driven)])
def test_evaluation_takes_any_checkpoint(saved, callbacks, stage):
    """Also of another order than that of a loader that is held from a fit."""
    path, model, name = saved("on_train_batch_end", 2), Recorder(), stage.replace("validate", "val")
    dm = datamodule({"seed": 1}, **{name: CountingSource(), "train": CountingSource()})
    fit = trainer(*callbacks())
    fit.fit(Recorder(), datamodule=dm)
    held = fit.train_dataloader
    getattr(fit, stage)(model, datamodule=dm, ckpt_path=str(path))
    assert model.seen == {f"{name} 0": [plan(0, shuffle="none")]}
    assert held.state_dict()["position"] == SAMPLES
    trainer(*callbacks()).fit(model, datamodule=dm)
    assert model.seen["train"] == [plan(0, seed=1)]  # a new run begins at the beginning


def order(epoch):
    return plan_of(length=SAMPLES, batch_size=1, shuffle="global", seed=0, epoch=epoch).deck.samples(np.arange(SAMPLES))


AT_END = "on_train_batch_end"
LIMIT = {"limit_train_batches": 3}


@pytest.mark.parametrize(
    ("place", "written", "loader", "then", "taken"),
    [
        ((AT_END, 1), {}, {"batch_size": 3}, {}, ((4, 22), (0, 22))),
        ((AT_END, 5), {}, {"batch_size": 8}, {}, ((20, 22), (0, 22))),
        ((AT_END, STEPS), {}, {"batch_size": 3}, {}, ((), (0, 22))),
        (("on_train_epoch_end", STEPS), {}, {"batch_size": 8}, {}, ((), (0, 22))),
        # With a limit, the epoch ends with the step that reaches it.
        ((AT_END, 1), LIMIT, {"batch_size": 8}, {"limit_train_batches": 2}, ((4, 20), (0, 16))),
        ((AT_END, 1), LIMIT, {"batch_size": 3}, {"limit_train_batches": 4}, ((4, 13), (0, 12))),
        # After a rest that drop_last drops, the next epoch begins.
        ((AT_END, 5), {}, {"batch_size": 8, "drop_last": True}, {}, ((), (0, 16))),
        (("on_before_backward", 6), {}, {"batch_size": 8, "drop_last": True}, {}, ((), (0, 16))),
    ],
)
def test_with_another_batch_size_each_sample_comes_once(saved, caplog, place, written, loader, then, taken):  # noqa: PLR0917
    path = saved(*place, **written)
    caplog.set_level(logging.INFO)
    epochs = resumed(path, driven, loader=loader, **then)
    wanted = [order(1 + number)[slice(*span)].tolist() for number, span in enumerate(taken) if span]
    assert [flat(epoch) for epoch in epochs] == wanted
    assert ("drop_last drops the 2 samples that remain of it" in caplog.text) == ("drop_last" in loader)


DRAWN = {"weights": np.arange(1.0, SAMPLES + 1), "epoch_size": 18}


@pytest.mark.parametrize(
    "options",
    [{"loader": DRAWN}, {"overfit_batches": 4}, {"accumulate_grad_batches": 3}],
    ids=["weights", "overfit_batches", "accumulated"],
)
def test_drawn_stored_and_accumulated_batches_go_on_too(saved, options):
    whole = Recorder()
    fit, dm = fitted(**options)
    fit.fit(whole, datamodule=dm)
    path = saved("on_train_batch_end", 2, **options)
    then = options | {"loader": options.get("loader", {}) | {"batch_size": 2}}
    if "overfit_batches" in options:
        then["overfit_batches"] = 8
    epochs = resumed(path, driven, **then)
    assert [flat(epoch) for epoch in epochs] == [flat(whole.seen["train"][1])[8:], flat(whole.seen["train"][2])]


@with_and_without
def test_after_the_search_for_a_learning_rate_a_run_can_be_saved_and_resumed(tmp_path, callbacks):
    tuning = importlib.import_module(f"{NAME}.tuner").Tuner
    path = tmp_path / "at.ckpt"
    for ckpt_path, expected in ((None, WHOLE), (path, [WHOLE[1][2:], WHOLE[2]])):
        model = Continued()
        fit, dm = fitted(Saver(path, "on_train_batch_end", 2), *callbacks(), default_root_dir=tmp_path)
        tuning(fit).lr_find(model, datamodule=dm, num_training=4)
        model.seen.clear()
        fit.fit(model, datamodule=dm, ckpt_path=ckpt_path)
        assert model.seen["train"] == expected


def test_resumed_twice_with_other_batch_sizes(saved, tmp_path):
    first, second = saved("on_train_batch_end", 2), tmp_path / "second.ckpt"
    fit, dm = fitted(Saver(second, "on_train_batch_end"), lad.DevicePrefetcher(), loader={"batch_size": 3})
    model = Continued()

    def stop(stage, batch):
        if len(model.seen["train"][0]) == 3:
            raise StopError

    model.on_step = stop
    with pytest.raises(StopError):
        fit.fit(model, datamodule=dm, ckpt_path=first)
    history = torch.load(second, weights_only=False)["AsyncDataModule"]["order"]["history"]
    assert history == [[0, 1, 4], [8, 1, 3]]
    epochs = resumed(second, driven, loader={"batch_size": 5})
    assert flat(epochs[0]) == order(1)[14:].tolist()
    assert [len(batch) for batch in epochs[0]] == [5, 3]
    assert flat(epochs[1]) == order(2).tolist()


class AsksForSteps(Continued):
    """Lightning issue 20550: the loader is built before its place is restored."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@with_and_without
@pytest.mark.parametrize("reload", [0, 1])
def test_optimizers_that_ask_for_the_number_of_steps_lose_no_place(saved, callbacks, reload):
    path = saved("on_train_batch_end", 2)
    options = {"reload_dataloaders_every_n_epochs": reload}
    assert resumed(path, callbacks, AsksForSteps, **options) == [WHOLE[1][2:], WHOLE[2]]


def test_a_loader_that_exists_takes_up_the_place(saved):
    """As with FSDP and DeepSpeed, for which Lightning restores the DataModule after the loaders are built."""
    path, dm = saved("on_train_batch_end", 2), datamodule(train=CountingSource())
    loader = dm.train_dataloader()
    dm.load_state_dict(torch.load(path, weights_only=False)["AsyncDataModule"])
    assert [batch["index"].tolist() for batch in loader] == WHOLE[1][2:]
    dm.close()


def test_nothing_is_read_of_another_epoch(saved):
    """Lightning issue 21938: workers read the first epoch's batches, since `iter` came before the epoch was named."""
    path = saved("on_train_batch_end", 2)
    fit, dm = fitted(loader={"workers": 2})
    fit.fit(Continued(), datamodule=dm, ckpt_path=path)
    # Two threads read two batches at once, so any may be first.
    read = Counter(tuple(samples) for samples in dm.sources["train"][0].reads)
    trained = Counter(map(tuple, [*WHOLE[1][2:], *WHOLE[2]]))
    assert trained <= read <= trained + Counter(map(tuple, plan(3)))  # and ahead, but of nothing before


@with_and_without
def test_another_order_is_refused_in_mid_epoch_unless_forced(saved, callbacks):
    path, other = saved("on_train_batch_end", 2), {"loader": {"seed": 1}}
    with pytest.raises(ResumeError, match=r"seed: 0 in the checkpoint, 1 now.*force_resume=True"):
        resumed(path, callbacks, **other)
    epochs = resumed(path, callbacks, force_resume=True, **other)
    assert [len(epoch) for epoch in epochs] == [4, 6]


@pytest.mark.parametrize(
    ("batches", "written", "read", "said"),
    [
        (2, {}, {"loader": {"batch_size": 2}}, r"was 4 × 1, is 2 × 1, .* add DevicePrefetcher\(\) .* go back to 4 × 1"),
        (5, {}, {"loader": {"batch_size": 8, "drop_last": True}}, r"drop_last drops the 2 samples .* add DevicePref"),
        (3, {"limit_train_batches": 3}, {}, "saved place, sample 22 of 22 in epoch 1; if limit_train_batches"),
        (4, {}, {"limit_train_batches": 3, "callbacks": driven}, "with 3, the epoch ends before the saved place"),
    ],
)
def test_steps_that_do_not_fit_are_refused(saved, batches, written, read, said):
    path = saved("on_train_batch_end", batches, **written)
    with pytest.raises(ResumeError, match=said):
        resumed(path, **read)


@with_and_without
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_the_end_of_an_epoch_that_a_limit_has_cut_is_an_end(saved, callbacks, hook, caplog):
    path = saved(hook, 3, limit_train_batches=3)
    caplog.set_level(logging.INFO)
    assert resumed(path, callbacks, limit_train_batches=3, loader={"seed": 1}) == [plan(2, seed=1)[:3]]
    assert "seed: 0 in the checkpoint, 1 now), from this epoch on" in caplog.text
    assert "is not used" not in caplog.text


@pytest.mark.parametrize("steps", [3, STEPS])
def test_with_the_callback_a_last_batch_that_failed_before_its_step_comes_again(tmp_path, steps):
    """Then Lightning has taken it for the last one, and counts as many batches as ready as were trained on; a Trainer
    that has validated would take the epoch for done."""

    class Moving(Recorder):
        def on_before_batch_transfer(self, batch, number):
            if (self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx) == (1, steps - 2):
                raise StopError
            return batch

    saving = [pl.callbacks.OnExceptionCheckpoint(tmp_path), lad.DevicePrefetcher()]
    fit, dm = fitted(*saving, enable_checkpointing=True, limit_train_batches=steps, limit_val_batches=1)
    with pytest.raises(StopError):
        fit.fit(Moving(), datamodule=dm)
    fit.fit(model := Continued(), datamodule=dm, ckpt_path=str(tmp_path / "on_exception.ckpt"))
    assert model.seen["train"] == [WHOLE[1][steps - 1 : steps], WHOLE[2][:steps]]


@with_and_without
def test_a_checkpoint_without_a_place_is_refused_in_mid_epoch_only(saved, tmp_path, callbacks, caplog):
    for name, place in {"middle": ("on_train_batch_end", 2), "end": ("on_train_epoch_end", STEPS)}.items():
        checkpoint = torch.load(saved(*place), weights_only=False)
        del checkpoint["AsyncDataModule"]["order"]
        del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        torch.save(checkpoint, tmp_path / f"{name}.ckpt")
    said = r"middle.ckpt was written after 2 of 6 batches of epoch 1, and holds no"
    with pytest.raises(ResumeError, match=said) as caught:
        resumed(tmp_path / "middle.ckpt", callbacks)
    assert caught.value.file == str(tmp_path / "middle.ckpt")
    caplog.set_level(logging.INFO)
    again = resumed(tmp_path / "end.ckpt", callbacks, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert again == [WHOLE[2], plan(3)]
    assert caplog.text.count("end.ckpt holds no place in the data: epoch 2 begins at its first sample") == 1


def loader(**options):
    basic = {"batch_size": 4, "shuffle": True, "queue_depth": 3, "return_indices": True}
    return lad.AsyncLoader(CountingSource(), basic | options)


class Nested(Continued):
    def training_step(self, batch, number):
        while "index" not in batch:
            batch = batch["a"]
        return super().training_step(batch, number)


nested = pytest.mark.parametrize("nest", [lambda each: each, lambda each: {"a": each}], ids=["alone", "in a dict"])


@with_and_without
@nested
def test_a_loader_without_a_datamodule_goes_on_too(tmp_path, callbacks, nest, caplog):
    caplog.set_level(logging.INFO)
    saver = Saver(tmp_path / "at.ckpt", "on_train_batch_end", 2)
    ended = Saver(tmp_path / "end.ckpt", "on_train_epoch_end")
    with loader() as train:
        trainer(saver, ended, *callbacks(), max_epochs=3).fit(Nested(), nest(train))
    for path, expected in [(saver.path, [WHOLE[1][2:], WHOLE[2]]), (ended.path, WHOLE[2:])]:
        model = Nested()
        with loader() as train:
            trainer(*callbacks(), max_epochs=3).fit(model, nest(train), ckpt_path=path)
        assert model.seen["train"] == expected
    assert "holds no place" not in caplog.text


@nested
def test_with_the_callback_it_goes_on_after_an_exception_with_any_batch_size(tmp_path, nest):
    class Failing(Stopping, Nested): ...

    class NestedAsksForSteps(Nested, AsksForSteps): ...

    saving = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    fit = trainer(saving, lad.DevicePrefetcher(), max_epochs=3, enable_checkpointing=True)
    with loader() as train, pytest.raises(StopError):
        fit.fit(Failing(3), nest(train))
    model = NestedAsksForSteps()
    with loader(batch_size=3) as train:
        fit = trainer(lad.DevicePrefetcher(), max_epochs=3)
        fit.fit(model, nest(train), ckpt_path=tmp_path / "on_exception.ckpt")
    assert [flat(epoch) for epoch in model.seen["train"]] == [order(1)[12:].tolist(), order(2).tolist()]


@pytest.mark.parametrize("batch", [3, 5])
def test_a_batch_that_a_checkpoint_without_the_callback_leaves_out_is_told(tmp_path, caplog, batch):
    saving = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with loader() as train, pytest.raises(StopError):
        trainer(saving, max_epochs=3, enable_checkpointing=True).fit(Stopping(batch), train)
    assert caplog.text.count("saved while StopError is handled: the batch that was handed out last counts as done") == 1
    model = Continued()
    with loader() as train:
        fit = trainer(lad.DevicePrefetcher(), max_epochs=3)
        fit.fit(model, train, ckpt_path=tmp_path / "on_exception.ckpt")
    assert model.seen["train"] == [rest for rest in (WHOLE[1][batch + 1 :], WHOLE[2]) if rest]


class EndsWithItsState(Stateful):
    """Goes on behind the last batch if the state is of the end of a pass: with none, as torchdata's does."""

    def __iter__(self):
        self.taken, self.load = self.load, 0
        return self.rest()


class StatefulDataLoader(Stateful, DataLoader):
    def __init__(self, batches):
        DataLoader.__init__(self, range(batches))
        Stateful.__init__(self, batches)


def prefetched(batches):
    return lad.prefetched(Stateful(batches))


@pytest.mark.parametrize(
    ("callbacks", "made", "kind"),
    [
        (list, prefetched, Continued),
        (driven, prefetched, Continued),
        (driven, prefetched, AsksForSteps),  # which only the callback mends
        (driven, StatefulDataLoader, Continued),
    ],
)
def test_a_loader_of_others_with_a_state_goes_on(tmp_path, callbacks, made, kind):
    whole = [[batch] for batch in range(STEPS)]
    saver = Saver(tmp_path / "at.ckpt", "on_train_batch_end", 2)
    ended = Saver(tmp_path / "end.ckpt", "on_train_epoch_end")
    trainer(saver, ended, *callbacks(), max_epochs=3).fit(Continued(), made(STEPS))
    for path, expected in [(saver.path, [whole[2:], whole]), (ended.path, [whole])]:
        model = kind()
        trainer(*callbacks(), max_epochs=3).fit(model, made(STEPS), ckpt_path=path)
        assert model.seen["train"] == expected


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("kind", "batch"), [(Stateful, 0), (Stateful, 3), (EndsWithItsState, 0), (EndsWithItsState, 5)]
)
def test_a_prefetched_loader_comes_back_to_the_batch_that_failed(tmp_path, depth, batch, kind):
    saving, whole = pl.callbacks.OnExceptionCheckpoint(tmp_path), [[batch] for batch in range(STEPS)]
    fit = trainer(saving, lad.DevicePrefetcher(depth), max_epochs=3, enable_checkpointing=True)
    with pytest.raises(StopError):
        fit.fit(Stopping(batch), lad.prefetched(kind(STEPS), depth))
    model = Continued()
    fit = trainer(lad.DevicePrefetcher(depth), max_epochs=3)
    fit.fit(model, lad.prefetched(kind(STEPS), depth), ckpt_path=tmp_path / "on_exception.ckpt")
    assert model.seen["train"] == [whole[batch:], whole]
