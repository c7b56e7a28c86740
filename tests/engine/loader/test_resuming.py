"""A loader goes on from a saved place: no sample is lost, none is repeated, whatever the ranks and batch sizes."""

import contextlib
import copy
import json
import logging

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import plan_of
from support.sources.hooks import Rows
from support.sources.numbered import Bad

from lit_async_data import AsyncLoader, Balanced, ConcatSource, HDF5Source, LoaderOptions, ManifestSource, SubsetSource
from lit_async_data.engine.loader.resuming import Quarantine
from lit_async_data.engine.pipeline.sample_reader import BadSample, ReadAround
from lit_async_data.errors import ConfigError, ReadError, ResumeError, SourceError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import StorageLayout
from lit_async_data.testing import ArraySource

LENGTH = 22
CHUNKS = StorageLayout((ChunkRun(LENGTH, 3),), compressed=True, reading="decoded")


class Chunked(ArraySource):
    @property
    def chunks(self):
        return CHUNKS if len(self) == LENGTH else super().chunks


def numbers(length=LENGTH, kind=ArraySource):
    first = np.arange(length)
    return kind({"y": first, "label": first % 3})


def loader_of(source=None, *, rank=0, world_size=1, transforms=None, **options):
    options = {"batch_size": 4, "workers": 0, "shuffle": "global"} | options
    source = numbers() if source is None else source
    return AsyncLoader(source, LoaderOptions(**options), rank=rank, world_size=world_size, **(transforms or {}))


def seen(batches):
    return [batch["y"].tolist() for batch in batches]


def whole(epoch=0, source=None, **options):
    with loader_of(source, **options) as loader:
        loader.set_epoch(epoch)
        return seen(loader)


def saved(batches, epoch=0, source=None, **options):
    with loader_of(source, **options) as loader:
        loader.set_epoch(epoch)
        for _ in zip(range(batches), loader, strict=False):
            pass
        return json.loads(json.dumps(loader.state_dict()))


ORDERS = {
    "none": {"shuffle": "none"},
    "global": {"shuffle": "global"},
    "chunk": {"shuffle": "chunk", "shuffle_chunks": 2},
    "balance": {"shuffle": "global", "weights": Balanced("label"), "epoch_size": 17},
    "weights by chunks": {"shuffle": "chunk", "shuffle_chunks": 3, "weights": np.arange(1.0, LENGTH + 1)},
}


class Ranks:
    """The loaders of all ranks, and the samples of each step over all of them."""

    def __init__(self, world_size, batch_size, state, epoch, **options):
        options = {"batch_size": batch_size, "world_size": world_size} | options
        with contextlib.ExitStack() as stack:
            source = numbers(kind=Chunked)
            self.loaders = [stack.enter_context(loader_of(source, rank=rank, **options)) for rank in range(world_size)]
            for loader in self.loaders:
                if state is not None:
                    loader.load_state_dict(state)
                loader.set_epoch(epoch)
            self._closing = stack.pop_all()

    def step(self):
        batches = [next(loader, None) for loader in self.loaders]
        if None in batches:
            assert batches == [None] * len(batches)  # on all ranks at once
            return []
        assert all(len(batch["y"]) for batch in batches)
        return [sample for batch in batches for sample in batch["y"].tolist()]

    def state(self):
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return json.loads(json.dumps(states[0]))

    def close(self):
        self._closing.close()


legs = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.sampled_from(sorted(ORDERS)), st.booleans(), legs)
def test_stopped_anywhere_and_continued_on_other_ranks_no_sample_is_lost_or_repeated(kind, drop_last, legs):
    """The same global order: each step, over all ranks, has the next samples of the uninterrupted epoch."""
    options, epoch, state, done = ORDERS[kind] | {"drop_last": drop_last}, 3, None, 0
    with loader_of(numbers(kind=Chunked), **ORDERS[kind]) as loader:
        order = loader._wiring.schedule.plan(epoch).deck.samples(np.arange(loader.order.length)).tolist()
    for world_size, batch_size, steps in [*legs, (1, 2, LENGTH)]:
        rest, step = len(order) - done, world_size * batch_size
        if drop_last and step > len(order):
            continue  # refused without a checkpoint, too
        if 0 < rest < world_size and not (drop_last and rest < step):
            with pytest.raises(ResumeError, match=f"{rest} samples? remain.*; resume on 1 "):
                Ranks(world_size, batch_size, state, epoch, **options)
            continue
        with contextlib.closing(Ranks(world_size, batch_size, state, epoch, **options)) as ranks:
            for _ in range(steps):
                found = ranks.step()
                if not found:
                    assert rest == 0 or (drop_last and rest < step)
                    break
                assert sorted(found) == sorted(order[done : done + len(found)])
                done += len(found)
                rest = len(order) - done
            state = ranks.state()
        if drop_last and rest < step:
            done = len(order)  # dropped: the epoch is over
        assert (state["epoch"], state["position"]) == (epoch, done)
        assert len(state["history"]) <= len(legs) + 1
    assert done == len(order)


PROCESS = {"worker_kind": "process"}


@pytest.mark.parametrize(
    ("order", "readers", "transforms", "device_depth"),
    [
        *((order, {}, {}, 2) for order in [*ORDERS, "by length"]),
        ("chunk", {"workers": 1}, {}, 0),
        ("chunk", {"workers": 3, "queue_depth": 3}, {}, 2),
        pytest.param("chunk", PROCESS, {}, 2, marks=pytest.mark.processes),
        pytest.param(
            "chunk", PROCESS | {"workers": 2}, {"sample_transform": copy.copy}, 2, marks=pytest.mark.processes
        ),
    ],
)
def test_from_any_place_all_readers_go_on_as_an_uninterrupted_run_does(order, readers, transforms, device_depth):
    by_length = {"batch_by": np.arange(LENGTH) % 5 + 1, "batch_elements": 9}
    order, source = ORDERS.get(order, by_length), numbers(kind=Rows if readers.get("workers") == 2 else Chunked)
    batches, following = whole(5, source, **order), whole(6, source, **order)
    with loader_of(source, transforms=transforms, **order | readers) as loader:
        loader.device_depth = device_depth
        for place in range(len(batches)):
            loader.load_state_dict(saved(place, 5, source, **order))  # in the middle of what it reads ahead
            assert [seen(loader), seen(loader)] == [batches[place:], following]


def test_the_state_is_the_place_of_the_next_batch():
    def place():
        state = loader.state_dict()
        return state["epoch"], state["position"]

    with loader_of(shuffle="none") as loader:
        assert place() == (0, 0)
        loader.set_epoch(5)
        assert place() == (5, 0)
        for number, _ in enumerate(loader, 1):
            assert place() == (5, min(4 * number, LENGTH))
            if number == 3:
                break
        assert place() == (5, 12)
        loader.set_epoch(8)
        assert place() == (5, 12)  # set_epoch is for the next pass
        assert len(list(loader)) == 6
        assert place() == (8, LENGTH)
        kept = iter(loader)
        assert place() == (8, LENGTH)  # until it is advanced
        next(kept)
        assert place() == (9, 4)
        list(kept)
        for epoch in (9, 3):
            loader.set_epoch(epoch)
            assert place() == (epoch, 0)  # though that epoch has just ended


@pytest.mark.parametrize("shuffle", ["none", "global"])
@pytest.mark.parametrize("first", [True, False])
def test_a_place_holds_for_the_pass_over_its_epoch_and_at_the_end_of_one_the_next_is_whole(shuffle, first):
    state, end = saved(2, 3, shuffle=shuffle), saved(9, 3, shuffle=shuffle)
    with loader_of(shuffle=shuffle) as loader:
        if first:
            loader.set_epoch(3)
        loader.load_state_dict(state)
        assert (len(loader), loader.state_dict()) == (6, state)
        if not first:
            loader.set_epoch(3)
        assert seen(loader) == whole(3, shuffle=shuffle)[2:]
        loader.load_state_dict(end)
        loader._prefetch()
        assert seen(loader) == whole(4, shuffle=shuffle)
        loader.load_state_dict(end)
        for epoch, batches in [(3, []), (4, whole(4, shuffle=shuffle)), (3, whole(3, shuffle=shuffle))]:
            loader.set_epoch(epoch)
            assert seen(loader) == batches


def test_a_line_says_where_it_goes_on_or_that_the_place_is_dropped_for_another_epoch(caplog):
    caplog.set_level(logging.INFO)
    with loader_of() as loader:
        for epoch, batches in (None, whole(3)[2:]), (4, whole(4)), (3, whole(3)):
            if epoch != 3:
                loader.load_state_dict(saved(2, 3))
            if epoch is not None:
                loader.set_epoch(epoch)
            loader._prefetch()
            assert seen(loader) == batches
    assert [record.message for record in caplog.records if record.name.endswith("resuming")] == [
        "resumed at epoch 3, sample 8 of 22",
        "the saved place, sample 8 of 22 in epoch 3, is not used: epoch 4 begins",
    ]


def test_a_batch_that_failed_counts_as_handed_out():
    with loader_of(Bad(7), shuffle="none") as loader:
        next(loader)
        with pytest.raises(ReadError):
            next(loader)
        assert loader.state_dict()["position"] == 8


def jittered(sample, rng):
    return sample | {"y": sample["y"] + rng.random()}


@pytest.mark.parametrize(("hook", "sizes"), [("sample_transform", (4, 3)), ("batch_transform", (4,))])
def test_draws_are_those_of_an_uninterrupted_run(hook, sizes):
    """Those of samples in batches of any size, those of batches in the same batches."""
    transforms = {hook: jittered}
    order = [value for batch in whole(2, transforms=transforms) for value in batch]
    for batch_size in sizes:
        with loader_of(transforms=transforms, batch_size=batch_size) as loader:
            loader.load_state_dict(saved(2, 2, transforms=transforms))
            assert [value for batch in seen(loader) for value in batch] == order[8:]


CHANGES = {
    "seed: 0 in the checkpoint, 1 now": {"seed": 1},
    "shuffle: global in the checkpoint, none now": {"shuffle": "none"},
    "samples: 22 in the checkpoint, 30 now": {"source": numbers(30)},
    "weights: none in the checkpoint, [0-9a-f]+ now": {"weights": Balanced("label")},
    "fields: y int64, label int64 in the checkpoint, y int64 now": {"source": ArraySource({"y": np.arange(LENGTH)})},
    "selected samples: none in the checkpoint, [0-9a-f]+ now": {
        "source": SubsetSource(numbers(30), np.arange(2, LENGTH + 2))
    },
}


@pytest.mark.parametrize("told", CHANGES)
def test_another_order_is_refused_in_the_middle_of_an_epoch(told, caplog):
    caplog.set_level(logging.INFO)
    with loader_of(**CHANGES[told]) as loader:
        with pytest.raises(ResumeError, match=f"sample 8 of 22 in epoch 3, and the rest .*{told}"):
            loader.load_state_dict(saved(2, 3))
        loader.load_state_dict(saved(2, 3), force=True)
        assert seen(loader) == whole(3, **CHANGES[told])[2:]
    assert "going on at the same position of another order: " in caplog.text


@pytest.mark.parametrize("batches", [0, 6])
def test_between_epochs_another_order_is_a_line(batches, caplog):
    caplog.set_level(logging.INFO)
    with loader_of(seed=1) as loader:
        loader.load_state_dict(saved(batches, 3))
        assert seen(loader) == whole(4 if batches else 3, seed=1)
    assert "the order is another one than in the checkpoint (seed: 0 in the checkpoint, 1 now)" in caplog.text


def test_by_force_an_epoch_of_a_smaller_dataset_is_over():
    with loader_of(numbers(8)) as loader:
        loader.load_state_dict(saved(3, 3), force=True)
        loader.set_epoch(3)
        assert seen(loader) == []
        loader.load_state_dict(loader.state_dict())  # which is a sound one
        assert seen(loader) == whole(4, numbers(8))


def test_other_chunks_matter_only_where_the_order_goes_by_them_and_each_weight_does():
    chunked, weights = {"shuffle": "chunk", "shuffle_chunks": 2}, np.ones(LENGTH)
    with loader_of(numbers(), **chunked) as loader, pytest.raises(ResumeError, match=r"chunks: .* now"):
        loader.load_state_dict(saved(2, source=numbers(kind=Chunked), **chunked))
    with loader_of(numbers(kind=Chunked)) as loader:
        loader.load_state_dict(saved(2))
    state = saved(2, weights=weights)
    weights[LENGTH // 2] = 2
    with loader_of(weights=weights) as loader, pytest.raises(ResumeError, match="weights: "):
        loader.load_state_dict(state)


def test_dropped_samples_are_told(caplog):
    caplog.set_level(logging.INFO)
    state = saved(4, 3, drop_last=True)
    with loader_of(drop_last=True, batch_size=8) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert seen(loader) == []
        assert loader.state_dict()["position"] == LENGTH  # whatever topology goes on from there
        assert seen(loader) == whole(4, drop_last=True, batch_size=8)
    assert "epoch 3 is over: drop_last drops the 6 samples that remain of it" in caplog.text


def test_a_state_takes_no_more_room_for_more_data():
    assert len(json.dumps(loader_of(numbers(1_000_000)).state_dict())) < 500


def test_numbers_of_numpy_are_saved_as_plain_ones():
    with loader_of(batch_size=2, world_size=np.int64(2)) as loader:
        loader.set_epoch(np.int64(3))
        next(loader)
        json.dumps(loader.state_dict())


def test_it_reads_nothing_over(monkeypatch):
    read, read_into, state = [], ArraySource.read_into, saved(4)
    monkeypatch.setattr(ArraySource, "read_into", lambda source, samples, out: read.extend(samples.tolist()))
    with loader_of() as loader:
        loader.load_state_dict(state)
        next(loader)
    monkeypatch.setattr(ArraySource, "read_into", read_into)
    assert read == whole()[4]


def stored(path, rows=10, dtype="u1"):
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((rows, 3), dtype)
    return path


def fingerprint(source):
    with contextlib.closing(source):
        return source.fingerprint()


def check_equal_and_different(equal, different):
    assert equal[0] == equal[1]
    assert len({json.dumps(each) for each in different}) == len(different)


def test_changed_files_are_other_data(tmp_path):
    def told(*paths, **options):
        return fingerprint(HDF5Source(list(map(str, paths)), {"x": "x"}, **options))

    a, b = stored(tmp_path / "a.h5"), stored(tmp_path / "b.h5", 20)
    moved = stored(tmp_path / "copies" / "a.h5"), stored(tmp_path / "copies" / "b.h5", 20)
    longer, signed = stored(tmp_path / "c" / "a.h5", 11), stored(tmp_path / "d" / "a.h5", dtype="i1")
    rows = [told(a, rows=np.arange(5)), told(a, rows=np.arange(5) + 1), told(a, stride=2)]
    different = [told(a), told(a, b), told(b, a), told(longer), told(signed), *rows]
    check_equal_and_different([told(a, b), told(*moved)], different)


def test_a_composed_source_tells_what_is_inside():
    one, other = numbers(10), numbers(12)
    composed = [ConcatSource([one, other]), ConcatSource([other, one])]
    subsets = [SubsetSource(one, [1, 2]), SubsetSource(one, [1, 3]), SubsetSource(other, [1, 2])]
    told = [fingerprint(each) for each in composed + subsets]
    inside = {"samples of source 0": 10, "samples of source 1": 12}
    check_equal_and_different([told[0], {"samples": 22, "fields": "y int64, label int64"} | inside], told)


def test_a_table_is_known_by_names_of_files_and_labels(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for path in [tmp_path / folder / f"{name}.npy" for folder in ("here", "there") for name in "abcd"]:
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.zeros(3))

    def told(names="abc", labels=(0, 1, 2), folder="here"):
        table = pyarrow.table({"path": [f"{name}.npy" for name in names], "label": list(labels)})
        return fingerprint(ManifestSource(table, {"x": "path", "y": "label"}, root=tmp_path / folder))

    different = [told(), told("abd"), told(labels=(0, 1, 1)), told("abcd", (0, 1, 2, 3))]
    check_equal_and_different([told(), told(folder="there")], different)


def test_without_a_seed_all_that_is_drawn_goes_by_that_of_the_place(caplog):
    def drawn(sample, rng):
        return sample | {"drawn": np.float64(rng.random())}

    def late(batch, rng):
        return batch | {"late": torch.rand(len(batch["y"]), generator=rng)}

    def taken(loader, count):
        return [[values.tolist() for values in loader.next().values()] for _ in range(count)]

    caplog.set_level(logging.INFO)
    draws = {"transforms": {"sample_transform": drawn, "device_transform": late}, "weights": "label", "shuffle": None}
    with loader_of(seed=3, **draws) as loader, loader_of(**draws) as resumed, loader_of(seed=0, **draws) as fixed:
        before = taken(loader, 2)
        assert before != taken(resumed, 2) == taken(fixed, 2)
        state = loader.state_dict()
        with pytest.raises(ResumeError, match="seed: 3 in the checkpoint, 0 now"):
            fixed.load_state_dict(state)
        resumed.load_state_dict(state)
        assert taken(resumed, 8) == taken(loader, 8)  # also of the next epoch
        assert resumed.state_dict() == loader.state_dict()
    assert caplog.text.count("the seed is 3, as in the saved place, and no longer 0") == 1


def test_a_state_that_is_refused_leaves_the_seed():
    with loader_of(numbers(LENGTH + 1)) as loader:
        with pytest.raises(ResumeError, match="samples: 22 in the checkpoint, 23 now"):
            loader.load_state_dict(saved(2, seed=3))
        assert loader.order.decks.seed == 0


PLAN = plan_of(length=100, batch_size=10, shuffle="none", seed=0, epoch=0)


def around(*bad, lasting=True):
    return ReadAround((), tuple(BadSample(sample, sample, SourceError("damaged"), lasting) for sample in bad))


@pytest.mark.parametrize(("most", "allowed"), [(2, 2), (0.03, 3), (0.001, 1), (0, 0)])
def test_one_more_than_allowed_is_an_error_that_lists_them(most, allowed):
    quarantine = Quarantine(ArraySource({"y": np.arange(100)}), most, None)
    for epoch in range(2):
        quarantine.begin(epoch)
        quarantine.handed_out(0, PLAN, around(*range(allowed)))
        with pytest.raises(SourceError, match=rf"^max_bad: {allowed + 1} bad .* at most {allowed} are") as caught:
            quarantine.handed_out(1, PLAN, around(99))
        assert len(caught.value.errors) == allowed + 1


def test_a_sample_is_listed_once_and_read_again_if_it_was_bad_in_one_epoch(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"quarantine: s3://b/q\.jsonl: an address, not a path"):
        Quarantine(numbers(), 1.0, "s3://b/q.jsonl")
    path, source = tmp_path / "bad.jsonl", ArraySource({"y": np.arange(100)})
    for epoch, loader in enumerate([Quarantine(source, 1.0, path), Quarantine(source, 1.0, path)]):
        loader.remember([50])
        loader.begin(epoch)
        loader.handed_out(3, PLAN, around(7, 50))
        loader.handed_out(4, PLAN, around(8, lasting=False))
        assert (loader.count, loader.known, loader.samples(3), loader.samples(5)) == (3, {7, 50}, (), None)
        loader.tell()
        loader.tell()
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["id"], each["cause"]) for each in listed] == [(7, "damaged"), (8, "damaged")]
    told = " of ArraySource was read around 3 bad samples (7, 50, 8); "
    assert caplog.messages == [f"epoch {epoch}{told}{path} lists them" for epoch in range(2)]
