"""Batches by length hold the values of their samples and no more elements than they may, whatever reads them."""

import itertools

import h5py
import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.lightning.trainer import pl, trainer
from support.sources import reader_sources as acts
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ConcatSource,
    DevicePrefetcher,
    Field,
    HDF5Source,
    LoaderOptions,
    split,
)
from lit_async_data.batch import spec
from lit_async_data.engine.pipeline import sample_reader
from lit_async_data.errors import ConfigError, FormatError, ResumeError, TransformError
from lit_async_data.lightning.summary import summary_lines
from lit_async_data.order.by_length import LengthPlan
from lit_async_data.testing import ArraySource

ELEMENTS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of sequences of two columns, whose longest have 180 and 97 rows."""
    folder = tmp_path_factory.mktemp("sequences")
    generator = np.random.default_rng(0)
    for name, count, longest in (("a.h5", 230, 180), ("b.h5", 77, 97)):
        lengths = np.minimum(generator.lognormal(3, 1, count).astype(int), longest)
        lengths[count // 2] = longest
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        with h5py.File(folder / name, "w") as file:
            values = generator.integers(1, 2**15, (offsets[-1], 2), np.int16)
            file.create_dataset("x/values", data=values, chunks=(64, 2), compression="gzip")
            file["x/offsets"] = offsets
            file["y"] = np.arange(count)
    return folder


@pytest.fixture
def source(folder):
    source = HDF5Source(folder / "*.h5", {"x": "x", "y": "y"})
    yield source
    source.close()


def loader_of(source, *, rank=0, ranks=1, hooks=None, **options):
    options = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "seed": 4, **options}
    options = {"return_indices": True, **options}
    return AsyncLoader(source, options, rank=rank, world_size=ranks, **(hooks or {}))


def samples_of(batch):
    """The samples of a batch by number, without padding, which must be zeros."""
    x, lengths = batch["x"], batch["x_length"]
    assert x.shape[0] * x.shape[1] <= ELEMENTS
    found = {}
    for number, values, length in zip(batch["index"].tolist(), x.cpu(), lengths.tolist(), strict=True):
        assert not values[length:].any()
        found[number] = values[:length]
    return found


def stored(source):
    """The samples as h5py reads them."""
    found = []
    for path in source.paths:
        with h5py.File(path) as file:
            edges, values = file["x/offsets"][...], file["x/values"][...]
        found += [torch.from_numpy(values[a:b]) for a, b in itertools.pairwise(edges)]
    return dict(enumerate(found))


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for number, values in wanted.items():
        assert torch.equal(found[number], values)


READERS = [
    pytest.param({"workers": 0}, {}, id="caller"),
    pytest.param({"workers": 2}, {}, id="threads"),
    pytest.param({"workers": 1}, {"sample_transform": acts.copied}, id="sample_transform"),
    pytest.param({"workers": 1}, {"batch_transform": acts.copied}, id="batch_transform"),
    pytest.param({"workers": 1, "worker_kind": "process"}, {}, id="process", marks=pytest.mark.processes),
    pytest.param(
        {"workers": 2, "worker_kind": "process"},
        {"sample_transform": acts.copied, "batch_transform": acts.copied},
        id="shares and both",
        marks=pytest.mark.processes,
    ),
]


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
        assert loader.order.shuffle == "chunk"
        used = sum(batch["x_length"].sum() for batch in loader) * 4  # bytes
        decoded, predicted = loader.stats().read.stages.decode.bytes / used, loader.footprint.amplification
    assert 0.7 * predicted < decoded < 1.2 * predicted < 2.4


def test_ranks_have_equally_many_batches_and_share_the_samples(source):
    found, counts = {}, set()
    for rank in range(3):
        with loader_of(source, rank=rank, ranks=3) as loader:
            batches = list(loader)
        counts.add(len(batches))
        for batch in batches:
            assert not found.keys() & samples_of(batch).keys()
            found |= samples_of(batch)
    assert len(counts) == 1
    check_equal(found, stored(source))


def test_short_batches_are_filled_up_to_the_size_of_their_bucket(source):
    wanted, found, shapes = stored(source), {}, {}
    with loader_of(source, pad_last=True, workers=2) as loader:
        for batch in loader:
            real = int(batch["mask"].sum())
            found |= samples_of({key: values[:real] for key, values in batch.items()})
            assert batch["x_length"][real:].eq(batch["x_length"][real - 1]).all()
            shapes.setdefault(batch["x"].shape[1], set()).add(len(batch["x"]))
        buckets = loader.order.buckets
    check_equal(found, wanted)
    assert shapes == {
        bound: {size} for bound, size in zip(buckets.bounds.tolist(), buckets.sizes.tolist(), strict=True)
    }
    with pytest.raises(ConfigError, match="pad_last: with ragged='concat', batches of x differ"):
        loader_of(concat(source), pad_last=True)


BY = [pytest.param({}, id="by length"), pytest.param({"batch_by": None, "batch_elements": None}, id="any")]


def concat(source, **options):
    """The same samples, one after the other."""
    return HDF5Source(source.paths, {"x": Field("x", ragged="concat", **options), "y": "y"})


def joined_samples_of(batch):
    x, edges = batch["x"].cpu(), batch["x_offsets"].tolist()
    assert (edges[0], edges[-1], len(edges)) == (0, len(x), len(batch["index"]) + 1)
    assert np.diff(edges).tolist() == batch["x_length"].tolist()
    return {n: x[a:b] for n, (a, b) in zip(batch["index"].tolist(), itertools.pairwise(edges), strict=True)}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("options", "hooks"), READERS)
def test_all_readers_give_samples_one_after_the_other(source, options, hooks, by):
    with loader_of(concat(source), hooks=hooks, **options, **by) as loader:
        found = {n: x for batch in loader for n, x in joined_samples_of(batch).items()}
    check_equal(found, stored(source))


@pytest.mark.parametrize("by", BY)
def test_a_device_gets_samples_one_after_the_other(source, monkeypatch, by):
    streams, found = FakeStreams("side"), {}
    pretend(monkeypatch, lambda device: streams)
    with loader_of(concat(source), workers=1, **by) as loader:
        for batch in loader:
            streams.synchronize()
            found |= joined_samples_of(batch)
    check_equal(found, stored(source))


def test_slots_have_room_for_the_longest_samples_of_a_batch(source):
    lengths, element = sorted((len(x) for x in stored(source).values()), reverse=True), 4
    for options, most in [({}, sum(lengths[:16])), ({"weights": "y"}, 16 * lengths[0])]:
        with loader_of(concat(source), workers=0, batch_by=None, batch_elements=None, **options) as loader:
            layout = loader.footprint.layout
            assert layout.small_start == -(-most * element // 512) * 512
            assert all(joined_samples_of(batch) for batch in loader)


@pytest.mark.parametrize("hooks", [{}, {"sample_transform": acts.copied}], ids=["plain", "sample_transform"])
def test_joined_samples_are_read_in_the_memory_of_a_batch(source, monkeypatch, hooks):
    for module in (spec, sample_reader):
        monkeypatch.setattr(module, "RUN_BYTES", 1)
    source, read, taken, found = concat(source), HDF5Source.read_into, [], {}

    def read_into(self, samples, out):
        taken.append(max(array.nbytes for array in out.values()))
        read(self, samples, out)

    monkeypatch.setattr(HDF5Source, "read_into", read_into)
    with loader_of(source, workers=0, batch_by=None, batch_elements=None, hooks=hooks) as loader:
        scratch = loader.footprint.budget.scratch
        assert scratch < source.spec["x"].nbytes * 16
        taken.clear()
        for batch in loader:
            assert max(taken) <= (scratch if hooks else batch["x"].nbytes)
            found |= joined_samples_of(batch)
            taken.clear()
    check_equal(found, stored(source))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("function", "text"), [(acts.longer, "'?x'?"), (acts.relabelled, "changed x_length of sample")]
)
def test_no_length_of_joined_samples_changes_on_the_host(source, function, text, by):
    loader = loader_of(concat(source), workers=0, shuffle=False, hooks={"sample_transform": function}, **by)
    with loader, pytest.raises(TransformError, match=text):
        list(loader)


@pytest.mark.parametrize("ragged", ["concat", "pad"])
def test_transforms_take_samples_of_one_element_at_most(h5, ragged):
    path = h5()
    with h5py.File(path, "w") as file:
        file["x/values"], file["x/offsets"] = np.float32([5, 6, 7]), [0, 1, 1, 2, 3]
    source = HDF5Source(path, {"x": Field("x", ragged=ragged)})
    options = {"batch_size": 4, "shuffle": False, "workers": 0}
    with AsyncLoader(source, options, sample_transform=acts.copied) as loader:
        assert next(loader)["x"].flatten().tolist() == ([5, 6, 7] if ragged == "concat" else [5, 0, 6, 7])
    source.close()


def test_joined_samples_are_read_and_put_together_padded(source):
    assert np.array_equal(concat(source)[0]["x"], source[0]["x"])
    with pytest.raises(FormatError, match="'x' has concat False in"):
        ConcatSource([concat(source), source])
    clash = HDF5Source(source.paths, {"x": Field("x", ragged="concat"), "x_offsets": "y"})
    with pytest.raises(ConfigError, match="ragged: the source has a field 'x_offsets' of its own"):
        loader_of(clash)


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"ragged": "no"}, "ragged"),
        ({"attr": "a"}, "ragged"),
        ({"decode": "image"}, "ragged"),
        ({"max_length": 180}, "max_length"),
        ({"pad_side": "left"}, "pad_side"),
        ({"pad_side": "top"}, "pad_side"),
    ],
)
def test_options_that_do_not_fit_joined_samples_are_named(option, name):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        Field("x", **{"ragged": "concat"} | option)


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.processes)])
def test_a_device_gets_the_same_batches(source, monkeypatch, kind):
    wanted, streams, found = stored(source), FakeStreams("side"), {}
    pretend(monkeypatch, lambda device: streams)
    with loader_of(source, workers=1, worker_kind=kind) as loader:
        for batch in loader:
            streams.synchronize()
            found |= samples_of(batch)
    check_equal(found, wanted)


def test_a_run_goes_on_after_a_resume_on_other_ranks(source):
    with loader_of(source) as loader:
        whole = [batch["index"].tolist() for batch in loader]
    with loader_of(source) as loader:
        seen = [next(loader)["index"].tolist() for _ in range(6)]
        state = loader.state_dict()
    shared = []
    for rank in range(2):
        with loader_of(source, rank=rank, ranks=2) as loader:
            loader.load_state_dict(state)
            shared.append([batch["index"].tolist() for batch in loader])
    rest = [batch for step in zip(*shared, strict=True) for batch in step]
    assert sum(seen + rest, []) == sum(whole, [])  # noqa: RUF017
    with loader_of(source, batch_elements=500) as loader, pytest.raises(ResumeError, match="batches by length"):
        loader.load_state_dict(state)


def test_a_resume_in_a_later_epoch_ends_it_where_drop_last_leaves_too_few_batches(source):
    options = {"workers": 0, "drop_last": True}
    with loader_of(source, **options) as loader:
        state, plan = loader.state_dict(), loader.machinery.wiring.schedule.plan(1)
    for left in range(1, 10):
        with loader_of(source, ranks=8, **options) as loader:
            loader.load_state_dict(state | {"epoch": 1, "position": plan.position(len(plan) - left)})
            assert len(list(loader)) == (left // 8 or len(loader))


class Model(pl.LightningModule):
    """Records the samples of each epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), {}

    def training_step(self, batch, number):
        self.seen.setdefault(self.current_epoch, []).append(batch["index"].tolist())
        return self.layer(batch["x_length"][:, None].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Saver(pl.Callback):
    """Saves a checkpoint behind a batch of the second epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, *_):
        if module.current_epoch == 1 and len(module.seen[1]) == 5:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("limit", [1.0, 12])
@pytest.mark.parametrize("callbacks", [[], [DevicePrefetcher()]], ids=["loader alone", "prefetcher"])
def test_a_trainer_resumes_in_the_middle_of_a_later_epoch(source, tmp_path, callbacks, limit):
    def fitted(*savers, path=None):
        loader = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "workers": 0, "return_indices": True}
        model, data = Model(), AsyncDataModule(train=source, loader=loader)
        fit = trainer(*callbacks, *savers, max_epochs=3, limit_train_batches=limit)
        fit.fit(model, datamodule=data, ckpt_path=path)
        return model.seen

    whole = fitted(Saver(tmp_path / "at.ckpt"))
    assert fitted(path=tmp_path / "at.ckpt") == {1: whole[1][5:], 2: whole[2]}


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
        assert plan.buckets.width(np.array(batch)) == plan.width(step)
        assert len(batch) == (len(planned) if on_error == "substitute" else len(set(planned) - bad) or 1)


def test_a_split_and_lengths_of_the_user_do_as_well(source):
    sides = split(source, {"train": 0.5, "val": 0.5})
    wanted = {n: x for n, x in stored(source).items() if n in sides["val"].samples}
    with loader_of(sides["val"], workers=0) as loader:
        check_equal({n: x for batch in loader for n, x in samples_of(batch).items()}, wanted)
    arrays, lengths = ArraySource({"x": np.arange(40.0)}), np.arange(40) % 7 + 1
    with loader_of(arrays, batch_by=lengths, batch_elements=14, workers=0) as loader:
        batches = [batch["index"].tolist() for batch in loader]
    assert all(len(batch) * lengths[batch].max() <= 14 for batch in batches)
    assert len({number for batch in batches for number in batch}) == 40


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
    batches = list(AsyncDataModule(predict=source, loader=options).predict_dataloader()[0])
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), torch.cat([torch.arange(230), torch.arange(77)]))
    data = AsyncDataModule(predict=source, loader=options, predict_loader={"batch_by": "x"})
    assert isinstance(data.predict_dataloader()[0].order, LengthPlan)


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
    assert "of all elements are padding" in line


@pytest.mark.parametrize(
    ("given", "option", "text"),
    [
        ({"batch_by": "z"}, "batch_by", "'z' is not one of the fields"),
        ({"batch_by": [1, 2, 3]}, "batch_by", "not the lengths of the 307 samples"),
        ({"batch_by": np.full(307, 5)}, "batch_by", "samples of x have other lengths"),
        ({"batch_elements": 100}, "batch_elements", "alone takes 180 elements"),
        ({"batch_by": None}, "batch_elements", "needs batch_by"),
        ({"weights": "y"}, "weights", "cannot be combined with batch_by"),
        ({"buckets": [9, 3]}, "buckets", "neither a number nor ascending lengths"),
        ({"buckets": [50, 100]}, "buckets", "the last bucket ends at 100"),
    ],
)
def test_options_that_do_not_fit_are_named(source, given, option, text):
    with pytest.raises(ConfigError, match=text) as caught:
        loader_of(source, **given)
    assert caught.value.option in (option, None)


def test_options_are_the_same_in_a_configuration():
    options = LoaderOptions.of({"batch_size": 4, "batch_by": "x", "batch_elements": 9, "buckets": [4, 9]})
    assert (options.batch_by, options.batch_elements, options.buckets) == ("x", 9, (4, 9))
