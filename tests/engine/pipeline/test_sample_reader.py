"""Batches of samples of variable length, padded or one after the other, hold the values that are stored, and no more
elements than they may, whatever reads them; what is fetched for those behind."""

import collections
import functools
import itertools

import h5py
import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.plans import plan_of
from support.sources import reader_sources as acts
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncDataModule, AsyncLoader, ConcatSource, Field, HDF5Source
from lit_async_data.batch import spec
from lit_async_data.engine.pipeline import sample_reader
from lit_async_data.engine.pipeline.sample_reader import LOOKS, Ahead
from lit_async_data.errors import ConfigError, FormatError, ResumeError, TransformError
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.plan import BatchIndex, LengthPlan, Schedule, Shares
from lit_async_data.testing import ArraySource


@pytest.fixture(scope="session")
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


ELEMENTS = 600

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


def loader_of(source, *, rank=0, ranks=1, hooks=None, **options):
    options = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "seed": 4, **options}
    options = {"return_indices": True, "shuffle": True, **options}
    return AsyncLoader(source, options, rank=rank, world_size=ranks, **(hooks or {}))


def concat(source, **options):
    return HDF5Source(source.paths, {"x": Field("x", ragged="concat", **options), "y": "y"})


def samples_of(batch):
    """The samples of a batch by number, without padding, which must be zeros."""
    x, lengths = batch["x"], batch["x_length"]
    assert x.shape[0] * x.shape[1] <= ELEMENTS
    found = {}
    for number, values, length in zip(batch["index"].tolist(), x.cpu(), lengths.tolist(), strict=True):
        assert not values[length:].any()
        found[number] = values[:length]
    return found


def joined_samples_of(batch):
    x, edges = batch["x"].cpu(), batch["x_offsets"].tolist()
    assert (edges[0], edges[-1], len(edges)) == (0, len(x), len(batch["index"]) + 1)
    assert np.diff(edges).tolist() == batch["x_length"].tolist()
    return {n: x[a:b] for n, (a, b) in zip(batch["index"].tolist(), itertools.pairwise(edges), strict=True)}


def stored(source):
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


BY = [pytest.param({}, id="by length"), pytest.param({"batch_by": None, "batch_elements": None}, id="any")]
# How samples are batched, and how they are taken from a batch, padded or one after the other.
FORMS = [({}, samples_of), *((*by.values, joined_samples_of) for by in BY)]


@pytest.mark.parametrize(("by", "taken"), FORMS)
@pytest.mark.parametrize(("options", "hooks"), READERS)
def test_all_readers_give_the_stored_samples(source, options, hooks, by, taken):
    with loader_of(concat(source) if taken is joined_samples_of else source, hooks=hooks, **options, **by) as loader:
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == len(loader)
            check_equal({n: x for batch in batches for n, x in taken(batch).items()}, stored(source))


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.processes)])
@pytest.mark.parametrize(("by", "taken"), FORMS)
def test_a_device_gets_the_same_samples(source, monkeypatch, kind, by, taken):
    streams, found = FakeStreams("side"), {}
    pretend(monkeypatch, lambda device: streams)
    with loader_of(
        concat(source) if taken is joined_samples_of else source, workers=1, worker_kind=kind, **by
    ) as loader:
        for batch in loader:
            streams.synchronize()
            found |= taken(batch)
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
    path = h5(**{"x/values": np.float32([5, 6, 7]), "x/offsets": [0, 1, 1, 2, 3]})
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


def test_lengths_of_the_user_do_as_well():
    arrays, lengths = ArraySource({"x": np.arange(40.0)}), np.arange(40) % 7 + 1
    with loader_of(arrays, batch_by=lengths, batch_elements=14, workers=0) as loader:
        batches = [batch["index"].tolist() for batch in loader]
    assert all(len(batch) * lengths[batch].max() <= 14 for batch in batches)
    assert sorted(number for batch in batches for number in batch) == list(range(40))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"batch_by": "z"}, "'z' is not one of the fields"),
        ({"batch_by": [1, 2, 3]}, "not the lengths of the 307 samples"),
        ({"batch_by": np.full(307, 5)}, "samples of x have other lengths"),
        ({"weights": "y"}, "cannot be combined with batch_by"),
    ],
)
def test_options_that_do_not_fit_are_named(source, given, text):
    with pytest.raises(ConfigError, match=text):
        loader_of(source, **given)


RUN = ChunkRun(100, 10)


def schedule_of(shuffle):
    plan = functools.partial(plan_of, length=100, batch_size=2, shuffle=shuffle, seed=0, runs=(RUN,), shuffle_chunks=2)
    return Schedule(plan, shuffled=True)


class Storage:
    """A source that notes what is asked of it, and says whether anything had to be fetched."""

    def __init__(self, cold=True):
        self.cold, self.fetched, self.decoded = cold, [], []

    def fetch(self, samples):
        self.fetched.append(samples.tolist())
        return self.cold

    def decode(self, samples, chunk_group):
        self.decoded += [(chunk_group, chunk) for chunk in (samples // 10).tolist()]


def read(storage, rounds, shuffle="none"):
    """Have workers read ahead after batches; those of a round have all been read before the first of them does."""
    ahead, schedule = Ahead(storage, 4, Shares(ChunkExtents([RUN]))), schedule_of(shuffle)
    unread = set(range(51))
    for steps in rounds:
        unread -= set(steps)
        for step in steps:
            ahead(schedule, [BatchIndex(0, step)], BatchIndex(*divmod(min(unread), 50)))


def test_at_first_all_that_come_are_fetched_and_then_the_last_one_and_in_memory_only_now_and_then():
    read(storage := Storage(), [[0], [1]])
    assert storage.fetched == [[8, 9], [2, 3, 4, 5, 6, 7], [10, 11]]
    read(storage := Storage(cold=False), [[step] for step in range(2 * LOOKS + 2)])
    assert storage.fetched == [[8, 9], [8 + 2 * (LOOKS + 1), 9 + 2 * (LOOKS + 1)]]


def test_each_chunk_is_decoded_once_whichever_worker_comes_first():
    read(storage := Storage(), [[1], [0], [2, 3], [4], [6], [5], *([n, n + 1] for n in range(7, 49, 2)), [49]], "chunk")
    turns = [*((0, number) for number in range(1, 5)), (1, 0)]
    assert collections.Counter(chunk_group for chunk_group, _ in storage.decoded) == dict.fromkeys(turns, 2)
    assert len(set(storage.decoded)) == 10


def test_by_chunks_each_chunk_is_decoded_about_once(source):
    with loader_of(source, batch_size=8, shuffle_chunks=8, workers=0) as loader:
        assert loader.order.decks.shuffle == "chunk"
        used = sum(batch["x_length"].sum() for batch in loader) * 4  # bytes
        assert loader.stats().read.decoded / used < 2.4


def test_short_batches_are_filled_up_to_the_size_of_their_bucket(source):
    found, shapes = {}, set()
    with loader_of(source, pad_last=True, workers=2) as loader:
        for batch in loader:
            real = int(batch["mask"].sum())
            found |= samples_of({key: values[:real] for key, values in batch.items()})
            assert batch["x_length"][real:].eq(batch["x_length"][real - 1]).all()
            shapes.add((batch["x"].shape[1], len(batch["x"])))
        buckets = loader.order.decks.buckets
    check_equal(found, stored(source))
    assert shapes == {*zip(buckets.bounds.tolist(), buckets.sizes.tolist(), strict=True)}
    for hooks in ({}, {"batch_transform": lambda batch: pytest.fail("called")}):
        with pytest.raises(ConfigError, match="pad_last: with ragged='concat', batches of x differ"):
            loader_of(concat(source), pad_last=True, hooks=hooks)


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
    for left in (1, 7, 8, 9):
        with loader_of(source, ranks=8, **options) as loader:
            loader.load_state_dict(state | {"epoch": 1, "position": plan.position(len(plan) - left)})
            assert len(list(loader)) == (left // 8 or len(loader))


@pytest.mark.parametrize("ragged", ["pad", "concat"])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_bad_samples_are_read_around_within_their_bucket(folder, tmp_path, on_error, ragged):
    damaged, content = tmp_path / "a.h5", bytearray((folder / "a.h5").read_bytes())
    with h5py.File(folder / "a.h5") as file:
        place, edges = file["x/values"].id.get_chunk_info(20).byte_offset + 5, file["x/offsets"][...]
    content[place : place + 20] = bytes(20)
    damaged.write_bytes(content)
    touched = (edges[:-1] < 21 * 64) & (edges[1:] > 20 * 64) & (np.diff(edges) > 0)
    bad, source = {*np.flatnonzero(touched).tolist()}, HDF5Source(damaged, {"x": Field("x", ragged=ragged)})
    with loader_of(source, on_error=on_error, max_bad=1.0, workers=2) as loader:
        found = [batch["index"].tolist() for batch in loader if ragged == "pad" or joined_samples_of(batch)]
        plan = loader.order
    assert isinstance(plan, LengthPlan)
    for step, batch in enumerate(found):
        planned, width = plan.batch(step).tolist(), plan.decks.buckets.width
        assert not bad & set(batch)
        assert set(planned) - bad <= set(batch)
        assert width(np.array(batch)) == width(plan.batch(step))
        assert len(batch) == (len(planned) if on_error == "substitute" else len(set(planned) - bad) or 1)


def test_sources_of_other_longest_samples_are_one(source, folder):
    parts = [HDF5Source(folder / name, {"x": "x", "y": "y"}) for name in ("b.h5", "a.h5")]
    wanted = {first + n: x for part, first in zip(parts, (0, 77)) for n, x in stored(part).items()}
    with loader_of(ConcatSource(parts), workers=0) as loader:
        check_equal({n: x for batch in loader for n, x in samples_of(batch).items()}, wanted)
    with pytest.raises(FormatError, match="'x' has dtype float32 in"):
        ConcatSource([source, HDF5Source(folder / "b.h5", {"x": Field("x", dtype="float32"), "y": "y"})])


def test_predictions_come_in_the_order_of_the_dataset(source):
    options = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "buckets": 4, "workers": 0}
    batches = list(AsyncDataModule(predict=source, loader=options).predict_dataloader())
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), torch.cat([torch.arange(230), torch.arange(77)]))
    data = AsyncDataModule(predict=source, loader=options, predict_loader={"batch_by": "x"})
    assert isinstance(data.predict_dataloader().order, LengthPlan)


@pytest.mark.parametrize("hooks", [{"sample_transform": acts.masked}, {"batch_transform": acts.masked}], ids="+".join)
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
