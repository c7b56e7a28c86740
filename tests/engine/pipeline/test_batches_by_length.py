"""Batches by length hold the values of their samples and no more elements than they may, whatever reads them."""

import h5py
import numpy as np
import pytest
import torch
from support.lightning.trainer import CountingSource, Recorder, Save, trainer
from support.sources import reader_sources as acts
from support.sources.sequences import (
    ELEMENTS,
    READERS,
    check_equal,
    concat,
    joined_samples_of,
    loader_of,
    samples_of,
    stored,
)

from lit_async_data import AsyncDataModule, ConcatSource, DevicePrefetcher, Field, HDF5Source
from lit_async_data.errors import ConfigError, FormatError, ResumeError, TransformError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.order.plan import LengthPlan


@pytest.mark.parametrize(("options", "hooks"), READERS)
def test_all_readers_give_the_stored_samples(source, options, hooks):
    wanted = stored(source)
    with loader_of(source, hooks=hooks, **options) as loader:
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == len(loader)
            check_equal({n: x for batch in batches for n, x in samples_of(batch).items()}, wanted)


def test_by_chunks_each_chunk_is_decoded_about_once(source):
    with loader_of(source, batch_size=8, shuffle_chunks=8, workers=0) as loader:
        assert loader.order.decks.shuffle == "chunk"
        used = sum(batch["x_length"].sum() for batch in loader) * 4  # bytes
        assert loader.stats().read.decoded / used < 2.4


def test_short_batches_are_filled_up_to_the_size_of_their_bucket(source):
    wanted, found, shapes = stored(source), {}, {}
    with loader_of(source, pad_last=True, workers=2) as loader:
        for batch in loader:
            real = int(batch["mask"].sum())
            found |= samples_of({key: values[:real] for key, values in batch.items()})
            assert batch["x_length"][real:].eq(batch["x_length"][real - 1]).all()
            shapes.setdefault(batch["x"].shape[1], set()).add(len(batch["x"]))
        buckets = loader.order.decks.buckets
    check_equal(found, wanted)
    assert shapes == {
        bound: {size} for bound, size in zip(buckets.bounds.tolist(), buckets.sizes.tolist(), strict=True)
    }
    with pytest.raises(ConfigError, match="pad_last: with ragged='concat', batches of x differ"):
        loader_of(concat(source), pad_last=True)
    with pytest.raises(ConfigError, match="pad_last: with ragged='concat', batches of x differ"):
        loader_of(concat(source), pad_last=True, hooks={"batch_transform": lambda batch: pytest.fail("called")})


def test_a_resume_with_other_batches_by_length_is_refused(source):
    with loader_of(source) as loader:
        next(loader)
        state = loader.state_dict()
    with loader_of(source, batch_elements=500) as loader, pytest.raises(ResumeError, match="batches by length"):
        loader.load_state_dict(state)


def test_a_resume_in_a_later_epoch_ends_it_where_drop_last_leaves_too_few_batches(source):
    options = {"workers": 0, "drop_last": True}
    with loader_of(source, **options) as loader:
        state, plan = loader.state_dict(), loader._wiring.schedule.plan(1)
    for left in range(1, 10):
        with loader_of(source, ranks=8, **options) as loader:
            loader.load_state_dict(state | {"epoch": 1, "position": plan.position(len(plan) - left)})
            assert len(list(loader)) == (left // 8 or len(loader))


@pytest.mark.parametrize("limit", [1.0, 12])
@pytest.mark.parametrize("callbacks", [[], [DevicePrefetcher()]], ids=["loader alone", "prefetcher"])
def test_a_trainer_resumes_in_the_middle_of_a_later_epoch(tmp_path, callbacks, limit):
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 300).astype(int), 180)
    options = {"batch_size": 16, "batch_by": lengths, "batch_elements": ELEMENTS, "workers": 0, "return_indices": True}

    def fitted(*savers, path=None):
        model, data = Recorder(), AsyncDataModule(train=CountingSource(300), loader=options)
        model.seen["train"] = [] if path is None else [[]]
        fit = trainer(*callbacks, *savers, max_epochs=3, limit_train_batches=limit)
        fit.fit(model, datamodule=data, ckpt_path=path)
        return model.seen["train"]

    whole = fitted(Save(tmp_path / "at.ckpt", 4))
    assert fitted(path=tmp_path / "at.ckpt") == [whole[1][5:], whole[2]]


@pytest.mark.parametrize("ragged", ["pad", "concat"])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_bad_samples_are_read_around_within_their_bucket(folder, tmp_path, on_error, ragged):
    damaged = tmp_path / "a.h5"
    damaged.write_bytes((folder / "a.h5").read_bytes())
    with h5py.File(damaged) as file:
        chunk = file["x/values"].id.get_chunk_info(20)
        edges = file["x/offsets"][...]
    with damaged.open("r+b") as file:
        file.seek(chunk.byte_offset + 5)
        file.write(bytes(20))
    first, end = 20 * 64, 21 * 64
    bad = set(np.flatnonzero((edges[:-1] < end) & (edges[1:] > first) & (np.diff(edges) > 0)).tolist())
    damaged_source = HDF5Source(damaged, {"x": Field("x", ragged=ragged)})
    with loader_of(damaged_source, on_error=on_error, max_bad=1.0, workers=2) as loader:
        found = [batch["index"].tolist() for batch in loader if ragged == "pad" or joined_samples_of(batch)]
        plan = loader.order
    assert isinstance(plan, LengthPlan)
    for step, batch in enumerate(found):
        planned = plan.batch(step).tolist()
        assert not bad & set(batch)
        assert set(planned) - bad <= set(batch)
        assert plan.decks.buckets.width(np.array(batch)) == plan.decks.buckets.width(plan.batch(step))
        assert len(batch) == (len(planned) if on_error == "substitute" else len(set(planned) - bad) or 1)


def test_sources_of_other_longest_samples_are_one(source, folder):
    parts = [HDF5Source(folder / name, {"x": "x", "y": "y"}) for name in ("b.h5", "a.h5")]
    wanted = [part[row]["x"][: part[row]["x_length"]] for part in parts for row in (0, len(part) // 2)]
    with loader_of(ConcatSource(parts), workers=0) as loader:
        found = {n: x for batch in loader for n, x in samples_of(batch).items()}
    assert loader.spec["x"].shape == (180, 2)
    assert len(found) == len(source)
    for number, values in zip((0, 38, 77, 77 + 115), wanted, strict=True):
        assert np.array_equal(found[number].numpy(), values)
    with pytest.raises(FormatError, match="'x' has dtype float32 in"):
        ConcatSource([source, HDF5Source(folder / "b.h5", {"x": Field("x", dtype="float32"), "y": "y"})])


def test_predictions_come_in_the_order_of_the_dataset(source):
    options = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "buckets": 4, "workers": 0}
    batches = list(AsyncDataModule(predict=source, loader=options).predict_dataloader())
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), torch.cat([torch.arange(230), torch.arange(77)]))
    data = AsyncDataModule(predict=source, loader=options, predict_loader={"batch_by": "x"})
    assert isinstance(data.predict_dataloader().order, LengthPlan)


@pytest.mark.parametrize(
    "hooks",
    [
        {"sample_transform": acts.masked},
        {"batch_transform": acts.masked},
        {"sample_transform": acts.masked, "batch_transform": acts.copied},
    ],
    ids="+".join,
)
def test_fields_that_transforms_add_follow_the_length(source, hooks):
    wanted = stored(source)
    with loader_of(source, workers=0, hooks=hooks) as loader:
        for batch in loader:
            assert batch["mask"].shape == batch["x"].shape[:2]
            assert batch["mask"].sum(1).tolist() == [len(wanted[number]) for number in batch["index"].tolist()]


def test_a_transform_that_changes_a_length_is_an_error(source):
    loader = loader_of(source, workers=0, hooks={"sample_transform": acts.longer})
    with loader, pytest.raises(TransformError, match="'x'"):
        list(loader)


def test_the_summary_says_what_is_padded(source):
    line = summary_lines(loader_of(source))[1]
    assert line.startswith("batch at most 16, ")
    assert "batches by length, padded to one of 16 lengths up to 180" in line
