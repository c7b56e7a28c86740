"""`LoaderOptions`: each wrong value is named and quoted, and unknown names point to the near ones."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest

import lit_async_data as lad
from lit_async_data import AsyncDataModule, AsyncLoader, Balanced, Field, HDF5Source, LoaderOptions
from lit_async_data.errors import ConfigError
from lit_async_data.reading import read
from lit_async_data.testing import ArraySource

NAN, INFINITY = float("nan"), float("inf")
NO_NUMBER = [None, True, "4", 2.0, NAN]
NO_BOOL = [None, 1, "true"]

BAD = {
    "batch_size": [*NO_NUMBER, 0, -1],
    "shuffle": [1, "Global", ["global"]],
    "seed": [*NO_NUMBER[1:], -1, 2**63],
    "drop_last": NO_BOOL,
    "pad_last": NO_BOOL,
    "workers": [*NO_NUMBER, -1, 10**6, "Auto"],
    "worker_kind": ["processes", 1, ["thread"]],
    "shuffle_chunks": [*NO_NUMBER, 0, -1],
    "queue_depth": [*NO_NUMBER, 0, -1],
    "cache_bytes": [*NO_NUMBER, -1, "4 GB"],
    "memory_budget": [*NO_NUMBER[1:], 0, -1, "4 GB", 1e9],
    "timeout_s": [None, True, "60", 0, -0.5, NAN, INFINITY],
    "warn_after_s": [None, True, "30", 0, -0.5, NAN, INFINITY],
    "restarts": [*NO_NUMBER, -1],
    "on_error": [None, True, "Skip", ["skip"]],
    "max_bad": [None, True, "10", -1, -0.5, 1.5, NAN],
    "quarantine": [1, True, ""],
    "augment": NO_BOOL,
    "return_indices": NO_BOOL,
    "weights": [True, 2.5, "", [], {"y": 1}, [[1.0], [2.0]]],
    "epoch_size": [*NO_NUMBER[1:], 0, -1],
    "batch_by": [True, 2.5, "", [], {"y": 1}, [[1], [2]]],
    # The last ones of these two lack batch_by.
    "batch_elements": [*NO_NUMBER[1:], 0, -1, 512],
    "buckets": [*NO_NUMBER, 0, -1, [], [3, 2], [[1]], [0.5], 8, (4, 9)],
}


def test_bad_values_are_tried_for_every_option():
    assert set(BAD) == {option.name for option in dataclasses.fields(LoaderOptions)}


@pytest.mark.parametrize("name", BAD)
def test_an_absurd_option_is_named_and_its_value_quoted(name):
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=f"^{name}: .*{re.escape(repr(value))}") as caught:
            LoaderOptions(**{"batch_size": 4, name: value})
        assert caught.value.option == name


def test_weights_are_combined_by_their_product():
    for other in (np.ones(3), Balanced("z"), [1.0, 2.0]):
        with pytest.raises(ConfigError, match=r"weights: .*multiply weights: class_weights"):
            LoaderOptions(batch_size=4, weights=[Balanced("y"), other])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_workers", "use workers"),
        ("prefetch_factor", "use queue_depth"),
        ("sampler", "use shuffle"),
        ("batchsize", "did you mean batch_size?"),
        ("queue_dept", "did you mean queue_depth?"),
        ("kiwi", "choose from batch_size, shuffle, shuffle_chunks, seed"),
    ],
)
def test_an_option_of_torch_points_to_ours_and_a_misspelt_one_to_the_near_one_or_all(name, hint):
    with pytest.raises(ConfigError, match=f"^{name}: no such option; .*{re.escape(hint)}"):
        LoaderOptions(batch_size=4, **{name: 2})


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (AsyncLoader, {"batch_size": 8}, "batch_size: no such option; give LoaderOptions(batch_size=…)"),
        (AsyncLoader, {"num_workers": 8}, "num_workers: no such option; in LoaderOptions, use workers"),
        (AsyncDataModule, {"transform": abs}, "transform: no such option; use sample_transform (one sample), batch_tr"),
        (AsyncDataModule, {"trian": 1}, "trian: no such option; did you mean train?"),
        (HDF5Source, {"window": (0, 3)}, "window: no such option; give it to a field: Field(NAME, window=…)"),
        (HDF5Source, {"shuffle": True}, "a loader does this, not a source: give LoaderOptions(shuffle=…)"),
        (Field, {"colum": 1}, "colum: no such option; did you mean column?"),
        (lad.split, {"group": "y"}, "group: no such option; did you mean groups?"),
        (lad.prefetched, {"prefetch_factor": 2}, "prefetch_factor: no such option; give it to the loader that is"),
        (lad.DevicePrefetcher, {"device_transform": abs}, "no such option; give it to AsyncDataModule or AsyncLoader"),
        (lad.MixtureSource, {"shares": [0.7, 0.3]}, "shares: no such option; give pairs: {"),
        (lad.SubsetSource, {"indices": [1]}, "indices: no such option; write samples="),
        (read, {"row": 1}, "row: no such option; did you mean rows?"),
        (lad.PredictionWriter, {"output": "p"}, "output: no such option; choose from path"),
    ],
)
def test_an_option_that_belongs_elsewhere_is_told_its_place(kind, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        kind(*["x.h5"] * (kind is not AsyncDataModule), **given)
    assert caught.value.option in given


def test_an_option_that_is_set_too_late_is_refused():
    class Mine(AsyncDataModule):
        def __init__(self, train):
            super().__init__(train=train, loader={"batch_size": 2})
            self.train = self.loader = train

    source = ArraySource({"y": np.arange(8)})
    module = AsyncDataModule(train=source, loader={"batch_size": 2})
    for built, name, said in [
        *((each, "loader", "AsyncDataModule; build another") for each in (module, copy.copy(module))),
        (module.train_dataloader(), "batch_size", r"AsyncLoader; give LoaderOptions\(batch_size"),
        (module.train_dataloader(), "num_workers", "AsyncLoader; in LoaderOptions, use workers"),
        (lad.Normalize(), "mean", "Normalize; build"),
    ]:
        with pytest.raises(ConfigError, match=f"^{name}: cannot be set in {said}"):
            setattr(built, name, 3)
    module.mine, module.batch_size, module.force_resume = 3, 4, True  # what is no option, and what is an attribute
    assert (Mine(source).loader, next(module.train_dataloader())["y"].shape) == (source, (4,))


@pytest.mark.parametrize(
    ("kind", "positional", "said"),
    [
        (lad.ConcatSource, "aa", "ConcatSource takes only one argument, as in ConcatSource([…])"),
        (Balanced, "aa", "Balanced takes only one argument, as in Balanced(…)"),
        (AsyncDataModule, "abc", "AsyncDataModule takes further arguments by name: source="),
        (HDF5Source, "abc", "HDF5Source takes further arguments by name: layout="),
        (lad.MixtureSource, "ab", "MixtureSource takes further arguments by name: epoch=, fields=, source_key="),
        (lambda size: LoaderOptions(size, batch_size=64), "a", "LoaderOptions takes further arguments by name: batch"),
    ],
)
def test_arguments_without_their_names_are_told_them(kind, positional, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        kind(*positional)


def test_options_can_be_copied():
    options = LoaderOptions(batch_size=3, seed=7)
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == copy.copy(options) == options
