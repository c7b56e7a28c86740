"""Which rows are samples and what their windows read: by loops over rows, for any episodes, offsets and times."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources.oracle import read

from lit_async_data import ConfigError, Field, FormatError, HDF5Source, split
from lit_async_data.sources.hdf5.select import Episodes, WindowStarts

GZIP, SHUFFLED = {"chunks": (3,), "compression": "gzip"}, {"chunks": (4,), "shuffle": True}
STORED = [{}, {"chunks": True}, GZIP, {"chunks": (1,)}, SHUFFLED, "virtual"]
BOUNDS = ["ids", {"ends": "ends"}, {"lengths": "lengths"}, {"starts": "starts", "lengths": "lengths"}]
PADS = st.sampled_from([None, "last", "zero"])
LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), min_size=1, max_size=3)
STEPS = st.lists(st.integers(-6, 6), min_size=1, max_size=4) | st.tuples(st.integers(-6, 3), st.integers(1, 8)).map(
    lambda pair: list(range(pair[0], pair[0] + pair[1]))
)


def sample(episode, row, field, base):
    """The values and the mask of a window in an episode, which is a list of its rows; None if it has no window."""
    steps, pad = field
    values, mask = [], []
    for step in steps:
        place = episode.index(row) + step
        mask.append(0 <= place < len(episode))
        nearest = episode[min(max(place, 0), len(episode) - 1)]
        values.append(0 if pad == "zero" and not mask[-1] else nearest + base)
    return None if pad is None and not all(mask) else (values, mask)


def expected(files, fields, stride):
    """The part, the row and the fields of each sample."""
    for number, episodes in enumerate(files):
        first = 0
        for length in episodes:
            episode = list(range(first, first + length))
            first += length
            count = 0
            for row in episode:
                found = {key: sample(episode, row, field, 1000 * (number + 1)) for key, field in fields.items()}
                if None not in found.values():
                    if count % stride == 0:
                        yield number, row, found
                    count += 1


def virtual(file, name, values):
    """A virtual dataset over two halves of the values."""
    layout, half = h5py.VirtualLayout(values.shape, values.dtype), len(values) // 2
    for part, of in (("a", slice(0, half)), ("b", slice(half, len(values)))):
        if len(values[of]):
            layout[of] = h5py.VirtualSource(file.create_dataset(f"{name}_{part}", data=values[of]))
    file.create_virtual_dataset(name, layout)


def written(folder, files, stored):
    for number, lengths in enumerate(files):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            rows = np.arange(sum(lengths)) + 1000 * (number + 1)
            if stored == "virtual":
                virtual(file, "x", rows)
            else:
                options = stored if not stored.get("chunks") or len(rows) >= 4 else {}
                file.create_dataset("x", data=rows, **options)
            ends = np.cumsum(lengths)
            file["ends"], file["lengths"], file["starts"] = ends, lengths, ends - lengths
            file["ids"] = np.repeat(np.arange(len(lengths)), lengths)
            file["time"] = np.concatenate([np.arange(length) for length in lengths]) / 30
            file["time32"] = file["time"][...].astype("f4")
    return [folder / f"{number}.h5" for number in range(len(files))]


@settings(max_examples=100, deadline=None)
@given(
    files=LENGTHS,
    fields=st.dictionaries(st.sampled_from("xyz"), st.tuples(STEPS, PADS), min_size=1),
    stride=st.integers(1, 4),
    stored=st.sampled_from(STORED),
    episodes=st.sampled_from(BOUNDS),
    seconds=st.sampled_from([None, "time", "time32"]),
    batch=st.integers(1, 7),
)
def test_any_windows_in_any_episodes(tmp_path_factory, *, files, fields, stride, stored, episodes, seconds, batch):
    # An anchor behind the last row, with windows that all end before it, is no sample: as if each read its own row.
    model = {**fields, "own": ([0], None)}
    chosen_fields = {
        key: Field("x", offsets=[step / 30 for step in steps], time=seconds, pad=pad, tolerance=0.01)
        if seconds and key == "y" and stride == 1
        else Field("x", offsets=steps, pad=pad)
        for key, (steps, pad) in fields.items()
    }
    paths = written(tmp_path_factory.mktemp("any"), files, stored)
    wanted = list(expected(files, model, stride))
    if not wanted:
        with pytest.raises(FormatError, match=r"windows of a sample|at all of its times"):
            HDF5Source(paths, chosen_fields, episodes=episodes, stride=stride, allow_external=stored == "virtual")
        return
    source = HDF5Source(paths, chosen_fields, episodes=episodes, stride=stride, allow_external=stored == "virtual")
    places = [(int(place.file[-4]), place.row) for place in source.locate(range(len(source)))]
    assert places == [(number, row) for number, row, _ in wanted]
    for order in (np.arange(len(wanted)), np.random.default_rng(0).integers(0, len(wanted), 40)):
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            found = read(source, chosen)
            for key, (_, pad) in fields.items():
                assert found[key].tolist() == [wanted[each][2][key][0] for each in chosen]
                if pad:
                    assert found[f"{key}_mask"].tolist() == [wanted[each][2][key][1] for each in chosen]


@settings(max_examples=40, deadline=None)
@given(files=LENGTHS, fields=st.dictionaries(st.sampled_from("xy"), st.tuples(STEPS, PADS), min_size=1), data=st.data())
def test_sides_share_no_values_and_chosen_rows_are_read_in_their_order(tmp_path_factory, files, fields, data):
    chosen_fields = {key: Field("x", offsets=steps, pad=pad) for key, (steps, pad) in fields.items()}
    paths = written(tmp_path_factory.mktemp("any"), files, {})
    wanted = list(expected(files, {**fields, "own": ([0], None)}, 1))
    if not wanted:
        return
    of_part = [[each for each in wanted if each[0] == number] for number in range(len(files))]
    chosen = [data.draw(st.permutations(each))[: data.draw(st.integers(0, 5))] for each in of_part]
    if any(chosen):
        source = HDF5Source(paths, chosen_fields, episodes="ids", rows=[[row for _, row, _ in each] for each in chosen])
        for key, values in read(source, np.arange(len(source))).items():
            if key in fields:
                assert values.tolist() == [found[key][0] for each in chosen for _, _, found in each]
    source = HDF5Source(paths, chosen_fields, episodes="ids")
    for groups in ("episode", "time", None):
        try:
            sides = split(source, {"train": 0.5, "val": 0.5}, groups=groups)
        except ConfigError:
            continue
        read_by = [[wanted[sample][2] for sample in side.samples.tolist()] for side in sides.values()]
        train, val = ({row for found in each for key in fields for row in found[key][0]} for each in read_by)
        assert not (train & val) - {0}
        assert sides.overlap == 0 or groups == "time"


@pytest.mark.parametrize(
    ("chosen", "overlap"), [([0, 5, 10], 0), ([0, 4, 8, 16], 1), ([0, 1, 2, 9], 2), ([8, 0, 4], 2)]
)
def test_chosen_windows_of_5_rows_share_rows_with_the_next_or_if_unordered_with_any(chosen, overlap):
    assert WindowStarts.at(np.array(chosen)).overlap(5) == overlap


def test_other_choices_have_other_fingerprints_and_all_rows_have_none():
    equal = [
        WindowStarts.within(Episodes.whole(10), *each) for each in (((0, 1), 1), ((0, 1), 2), ((-1, 1), 1), ((0, 2), 1))
    ]
    found = [each.fingerprint(10) for each in (*equal, *(WindowStarts.at(np.array(rows)) for rows in ([0, 1], [1, 0])))]
    assert found[0] == 0
    assert len(set(found)) == 6


@pytest.mark.parametrize(("window", "overlap"), [((0, 3), 2), ((4, 6), 5), ((-6, -4), 6)])
def test_samples_that_repeat_a_row_as_padding_overlap(h5, window, overlap):
    source = HDF5Source(h5(x=np.arange(20)), {"x": Field("x", window=window, pad="last")})
    assert source.chunks.overlap == overlap
