"""What the paths of a manifest name: images as Pillow has them, arrays, rows of HDF5 files, and trees of folders."""

from __future__ import annotations

import ast
import collections
import contextlib
import itertools
import os
import pickle
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from support.sources.oracle import read

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ConcatSource,
    LoaderOptions,
    ManifestSource,
    SubsetSource,
)
from lit_async_data.errors import (
    AsyncDataError,
    ConfigError,
    CorruptError,
    FormatError,
    ManifestError,
    MissingError,
    SourceError,
)
from lit_async_data.sources.local_files import file_times
from lit_async_data.sources.manifest.files import prefetcher as fetching


def smooth(height, width, seed=0):
    """An image in which every place and channel is another one, and that survives JPEG and resizing."""
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = rows * (255 / max(height - 1, 1)), columns * (255 / max(width - 1, 1))
    blue = 128 + 100 * np.sin((rows + columns) / 9 + seed)
    return np.stack([red, green, blue], axis=-1).round().astype(np.uint8)


def of_paths(folder, paths, key="x", **options):
    return ManifestSource(pa.table({"path": [str(path) for path in paths]}), {key: "path"}, root=folder, **options)


def first(source, key="x"):
    return read(source, [0])[key][0].transpose(1, 2, 0)


# -- formats and modes -------------------------------------------------------------------------------------------------


def test_the_contents_and_not_the_name_say_what_a_file_is(tmp_path):
    Image.fromarray(smooth(8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.jpg")
    np.testing.assert_array_equal(first(of_paths(tmp_path, ["a.jpg"])), smooth(8, 8))


def test_a_name_without_an_ending_is_an_image_where_kind_says_so(tmp_path):
    Image.fromarray(smooth(8, 8)).save(tmp_path / "a", format="PNG")
    table = pa.table({"path": ["a"]})
    source = ManifestSource(table, {"x": {"name": "path", "kind": "image"}}, root=tmp_path)
    np.testing.assert_array_equal(first(source), smooth(8, 8))


def test_batches_are_channels_last_in_memory(tmp_path):
    for number in range(4):
        Image.fromarray(smooth(6, 5, number)).save(tmp_path / f"{number}.png")
    source = of_paths(tmp_path, [f"{number}.png" for number in range(4)])
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False)) as loader:
        batch = next(iter(loader))["x"]
    assert batch.shape == (4, 3, 6, 5)
    assert batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    for number in range(4):
        np.testing.assert_array_equal(batch[number].permute(1, 2, 0).numpy(), smooth(6, 5, number))


# -- resizing ----------------------------------------------------------------------------------------------------------

# -- random crops ------------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path):
    """Six images in which a pixel says where it is, and masks that say the same in grey."""
    rows, columns = np.mgrid[0:64, 0:64]
    image = np.stack([rows * 4, columns * 4, np.zeros((64, 64))], axis=-1).astype(np.uint8)
    for number in range(6):
        image[..., 2] = number
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        Image.fromarray(image[..., 0]).save(tmp_path / f"{number}-rows.png")
        Image.fromarray(image[..., 1]).save(tmp_path / f"{number}-columns.png")
    return tmp_path


CROP = {"image_size": 16, "resize": "random_crop", "scale": (0.2, 0.5)}


def crops(source, epochs=2, **options):
    """By epoch and sample the crop of each."""
    found = []
    with AsyncLoader(
        source, LoaderOptions(**{"batch_size": 2, "shuffle": False, "return_indices": True, **options})
    ) as all_:
        for _ in range(epochs):
            seen = {}
            for batch in all_:
                seen.update(zip(batch["index"].tolist(), batch["x"].numpy().copy()))
            found.append(np.stack([seen[sample] for sample in sorted(seen)]))
    return found


def test_a_random_crop_is_another_one_in_each_epoch_and_the_same_for_a_seed(places):
    source = of_paths(places, [f"{number}.png" for number in range(6)], **CROP)
    assert source.spec["x"].shape == (3, 16, 16)
    one, two = crops(source, seed=3)
    for sample in range(6):
        assert not np.array_equal(one[sample], two[sample])
        assert (one[sample][2] == sample).all()
    assert len({one[sample][0].tobytes() for sample in range(6)}) == 6
    for workers in (0, 1, 3):
        for options in ({}, {"shuffle": "global"}, {"batch_size": 5}, {"queue_depth": 1}):
            again = crops(source, seed=3, workers=workers, **options)
            np.testing.assert_array_equal(again, [one, two])
    assert not np.array_equal(crops(source, seed=4)[0], one)
    again = crops(pickle.loads(pickle.dumps(source)), seed=3)
    np.testing.assert_array_equal(again, [one, two])


def test_evaluation_takes_the_middle(places):
    paths = [f"{number}.png" for number in range(6)]
    source = of_paths(places, paths, **CROP)
    middle = read(of_paths(places, paths, image_size=16, resize="crop"), np.arange(6))["x"]
    np.testing.assert_array_equal(read(source, np.arange(6))["x"], middle)
    for epoch in crops(source, augment=False):
        np.testing.assert_array_equal(epoch, middle)
    data = AsyncDataModule(train=source, val=source, test=source, predict=source, loader={"batch_size": 6})
    with contextlib.closing(data):
        for loaders in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
            np.testing.assert_array_equal(next(iter(loaders[0]))["x"], middle)
        assert not np.array_equal(np.sort(next(iter(data.train_dataloader()))["x"], axis=0), middle)


def test_a_mask_takes_the_crop_of_its_image(places):
    table = pa.table(
        {
            "path": [f"{number}.png" for number in range(6)],
            "rows": [f"{number}-rows.png" for number in range(6)],
            "columns": [f"{number}-columns.png" for number in range(6)],
        }
    )
    near = {"mode": "L", "interpolation": "nearest"}
    fields = {"x": "path", "r": {"name": "rows", **near}, "c": {"name": "columns", **near}}
    source = ManifestSource(table, fields, root=places, interpolation="nearest", **CROP)
    assert source.spec["r"].shape == (1, 16, 16)
    with AsyncLoader(source, LoaderOptions(batch_size=3, shuffle=False, workers=2)) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["x"][:, 0].equal(batch["r"][:, 0])
                assert batch["x"][:, 1].equal(batch["c"][:, 0])
    blurred = ManifestSource(table, {**fields, "x": "path"}, root=places, **CROP)
    with AsyncLoader(blurred, LoaderOptions(batch_size=6, shuffle=False)) as loader:
        for batch in loader:
            # The same part by another interpolation: within the size of one pixel of the crop.
            assert (batch["x"][:, 0].int() - batch["r"][:, 0].int()).abs().max() <= 16
            assert (batch["r"].unique() % 4 == 0).all()


def test_crops_of_subsets_and_of_sources_in_a_row(places):
    paths = [f"{number}.png" for number in range(6)]
    whole = of_paths(places, paths, **CROP)
    for drawing in (SubsetSource(whole, [5, 1, 3]), ConcatSource([whole, whole])):
        one, two = crops(drawing)
        assert not np.array_equal(one, two)
        np.testing.assert_array_equal(crops(drawing, workers=3), [one, two])
        still = crops(drawing, augment=False)
        np.testing.assert_array_equal(still[0], still[1])


# -- arrays ------------------------------------------------------------------------------------------------------------


# -- trees of folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, numbers in {"owl": range(3), "auk": range(3, 10), "emu/deep": range(10, 12)}.items():
        (root / name).mkdir(parents=True)
        for number in numbers:
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(root / name / f"{number:02d}.png")
    (root / "owl/.hidden.png").write_bytes(b"nothing")
    (root / "owl/notes.txt").write_text("nothing")
    (root / ".git").mkdir()
    (root / "README.md").write_text("nothing")
    return root


def test_a_folder_for_each_class(tree):
    source = ManifestSource.from_folder(tree)
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    got = read(source, np.arange(len(source)))
    assert got["x"][:, 0, 0, 0].tolist() == [*range(3, 10), 10, 11, 0, 1, 2]
    assert got["y"].tolist() == [0] * 7 + [1] * 2 + [2] * 3
    assert source.locate([8])[0].path == str(tree / "emu/deep/11.png")
    assert source.column("label").tolist() == ["auk"] * 7 + ["emu"] * 2 + ["owl"] * 3
    assert ManifestSource.from_folder(str(tree), image_size=2).spec["x"].shape == (3, 2, 2)


def test_fields_of_a_tree(tree):
    source = ManifestSource.from_folder(tree, ["path", "label"], filters=[["label", "!=", "emu"]], id="path")
    assert len(source) == 10
    assert source.locate([0])[0].id == "auk/03.png"
    assert not source.spec.as_mapping
    with pytest.raises(ConfigError, match=r"^resise.*resize"):
        ManifestSource.from_folder(tree, resise="crop")
    given = {"x": "path", "y": {"name": "label", "classes": ["owl", "emu", "auk"]}}
    assert read(ManifestSource.from_folder(tree, given), [0])["y"].tolist() == [2]


def test_a_tree_that_is_none(tree, tmp_path):
    (tree / "dodo").mkdir()
    with pytest.raises(MissingError, match="dodo"):
        ManifestSource.from_folder(tree)
    with pytest.raises(ConfigError, match="nope"):
        ManifestSource.from_folder(tmp_path / "nope")
    with pytest.raises(ConfigError, match="deep"):
        ManifestSource.from_folder(tree / "emu/deep")


def test_files_of_other_kinds_are_counted(tree, caplog):
    (tree / "auk/phone.HEIC").write_bytes(b"nothing")
    ManifestSource.from_folder(tree)
    (record,) = caplog.records
    assert "skipped files that are neither images nor .npy: 1 .heic, 1 .txt" in record.getMessage()
    (tree / "dodo").mkdir()
    (tree / "dodo/phone.HEIC").write_bytes(b"nothing")
    with pytest.raises(MissingError, match=r"^from_folder: .*dodo has no images .*, but 1 \.heic; convert those, or"):
        ManifestSource.from_folder(tree)
    (tree / "dodo/phone.HEIC").unlink()
    with pytest.raises(MissingError, match=r"dodo has no images or .npy files; add some, or move the folder"):
        ManifestSource.from_folder(tree)


STAGES = [["train"], ["train", "val"], ["Train", "valid", "TEST"], ["training", "validation", "evaluation"]]


@pytest.mark.parametrize("stages", STAGES, ids="-".join)
def test_folders_of_stages_are_no_classes(stages, tree, tmp_path):
    for stage in stages:
        shutil.copytree(tree, tmp_path / "img" / stage)
        (tmp_path / "img" / stage / "._owl.png").write_bytes(b"of macOS")
    with pytest.raises(ConfigError, match="has folders of stages") as caught:
        ManifestSource.from_folder(tmp_path / "img")
    for stage in stages:
        assert f"from_folder('{tmp_path}/img/{stage}')" in str(caught.value)
        assert len(ManifestSource.from_folder(tmp_path / "img" / stage)) == 12
    assert "rename one if these are the classes" in str(caught.value)
    (tmp_path / "img" / stages[0]).rename(tmp_path / "img/bus")
    assert "bus" in ManifestSource.from_folder(tmp_path / "img").spec["y"].classes


def test_classes_that_are_called_as_stages_are(tree, tmp_path):
    for name in ("train", "test"):
        shutil.copytree(tree / "owl", tmp_path / "img" / name)
    assert ManifestSource.from_folder(tmp_path / "img").spec["y"].classes == ("test", "train")


def test_errors_in_a_tree_name_the_folder_and_no_table(tree):
    (tree / "emu/deep/10.png").write_bytes(b"nothing")
    source = ManifestSource.from_folder(tree, check_files="none")
    with pytest.raises(SourceError, match=rf"^file 7 of {tree}: {tree}/emu/deep/10\.png: ") as caught:
        read(source, [7])
    assert caught.value.row == 7
    assert source.locate([7])[0].file == str(tree)
    assert [part.file for part in source.parts] == [str(tree)]
    source = ManifestSource.from_folder(tree, id="path", check_files="none")
    (tree / "emu/deep/10.png").unlink()
    with pytest.raises(MissingError, match=rf"^file 7 of {tree}, id 'emu/deep/10\.png': "):
        read(source, [7])
    with pytest.raises(ManifestError, match=rf"^{tree}, file 0, column 'label': 'auk' is not a number"):
        ManifestSource.from_folder(tree, {"y": {"name": "label", "kind": "number"}}, check_files="none")


def test_links_in_a_tree(tree, tmp_path):
    (tmp_path / "kiwi").mkdir()
    Image.fromarray(np.full((4, 4, 3), 99, np.uint8)).save(tmp_path / "kiwi/1.png")
    (tree / "kiwi").symlink_to(tmp_path / "kiwi")
    (tree / "owl/more").symlink_to(tmp_path / "kiwi")
    with pytest.raises(ConfigError, match=r"from_folder: .*owl/more' is a link|from_folder: .*kiwi' is a link"):
        ManifestSource.from_folder(tree)
    (tree / "kiwi").unlink()
    with pytest.raises(ConfigError, match=r"from_folder: .*owl/more' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    (tree / "owl/more").unlink()
    (tree / "kiwi").symlink_to(tmp_path / "kiwi")
    # A class is not left out without a word.
    with pytest.raises(ConfigError, match=r"from_folder: .*kiwi' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    source = ManifestSource.from_folder(tree, allow_external=True)
    assert source.spec["y"].classes == ("auk", "emu", "kiwi", "owl")
    assert 99 in read(source, np.arange(len(source)))["x"]


def test_the_chunk_order_keeps_files_of_a_folder_together(tmp_path):
    paths = []
    for number in range(400):
        folder = f"f{number % 4}"
        (tmp_path / folder).mkdir(exist_ok=True)
        paths.append(f"{folder}/{number}.npy")
        np.save(tmp_path / paths[-1], np.array(number))
    source = of_paths(tmp_path, paths, check_files="none")
    options = LoaderOptions(batch_size=100, shuffle="chunk", shuffle_chunks=1, seed=1, return_indices=True)
    with AsyncLoader(source, options) as loader:
        epochs = [[batch["index"].tolist() for batch in loader] for _ in range(2)]
        assert [sorted(itertools.chain(*batches)) for batches in epochs] == [list(range(400))] * 2
        assert epochs[0] != epochs[1]
        for ids in epochs[0]:
            assert len({sample % 4 for sample in ids}) == 1


# -- rows of HDF5 files ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Three compressed files of 40 rows in chunks of 10, and a table that goes through them at random."""
    values = np.random.default_rng(0).integers(0, 255, (3, 40, 4, 4, 2), dtype=np.uint8)
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", data=values[number], chunks=(10, 4, 4, 2), compression="gzip")
            file["flat"] = values[number].reshape(40, -1)[:, :5].astype(">f4")
            file["more/data"] = values[number] // 2
    order = np.random.default_rng(1).permutation(120)
    table = {
        "id": [f"{row:03d}" for row in order],
        "path": [f"{row // 40}.h5" for row in order],
        "row": order % 40,
        "y": order.astype("f4"),
    }
    return tmp_path, values.reshape(120, 4, 4, 2), order, table


def test_rows_of_hdf5_files_may_be_whole_fractions(stored):
    folder, values, order, table = stored
    source = ManifestSource(pa.table({**table, "row": (order % 40).astype("f8")}), {"x": "path"}, root=folder)
    np.testing.assert_array_equal(read(source, [3, 5])["x"], values[order[[3, 5]]])
    source.close()
    rows = [None if number == 3 else float(row) for number, row in enumerate(order % 40)]
    source = ManifestSource(
        pa.table({**table, "row": pa.array(rows)}), {"x": {"name": "path", "null": "drop"}}, root=folder
    )
    np.testing.assert_array_equal(read(source, [3])["x"], values[order[[4]]])
    source.close()
    with pytest.raises(ManifestError, match=r"row 3.*no row number; give one, or set null: drop"):
        ManifestSource(pa.table({**table, "row": pa.array(rows)}), {"x": "path"}, root=folder)
    for wrong in (0.5, 1e19, np.inf, -(2.0**60)):
        with pytest.raises(ConfigError, match="does not hold whole numbers"):
            ManifestSource(pa.table({**table, "row": (order % 40) + wrong}), {"x": "path"}, root=folder)


def test_lists_of_categories_in_several_groups_of_rows(tmp_path):
    lists = pa.array([["a"], ["b", "a"], [], ["c"], ["b"]]).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"y": lists}), tmp_path / "t.parquet", row_group_size=2)
    source = ManifestSource(tmp_path / "t.parquet", {"y": "y"})
    assert source.spec["y"].classes == ("a", "b", "c")
    wanted = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert read(source, np.arange(5))["y"].tolist() == wanted


def test_paths_that_are_taken_for_classes_are_told(tmp_path, caplog):
    ManifestSource(pa.table({"v": [[f"{number}"] for number in range(10)]}), {"v": "v"})  # may be several to a row
    assert not caplog.records
    ManifestSource(
        pa.table({"p": [f"img_{number}" for number in range(10)], "y": ["a", "b"] * 5}),
        {"x": "p", "y": "y"},
        root=tmp_path,
    )
    assert [record.getMessage()[:62] for record in caplog.records] == [
        "column 'p': each of its 10 rows is another class; if these are"
    ]


def test_class_names_with_dots_and_slashes_are_classes(tmp_path, caplog):
    for names in (["E.coli", "S.aureus"], ["v1.2", "v1.3"], ["Mr. X", "Mrs. Y"], ["one.txt"], ["a/alley", "b/beach"]):
        source = ManifestSource(pa.table({"y": names}), {"y": "y"}, root=tmp_path)
        assert source.spec["y"].classes == tuple(sorted(names))
    assert not caplog.records


def test_image_size_without_images_says_kind(tmp_path):
    with pytest.raises(ConfigError, match=r"^image_size: .*: x \(column 'p'\); set kind: image for paths"):
        ManifestSource(pa.table({"p": ["one", "two"]}), {"x": "p"}, image_size=8)


@pytest.mark.parametrize("named", [None, "more/data", "column"])
def test_rows_of_hdf5_files(named, stored):
    folder, values, order, table = stored
    table = dict(table)
    if named == "column":
        table["dataset"] = ["data" if row % 2 else "more/data" for row in order]
    field = {"name": "path", "dataset": named} if named == "more/data" else "path"
    source = ManifestSource(pa.table(table), {"x": field, "y": "y"}, id="id", root=folder, check_files="all")
    wanted = values[order]
    if named == "more/data":
        wanted = wanted // 2
    elif named == "column":
        wanted = np.where((order % 2).astype(bool)[:, None, None, None], wanted, wanted // 2)
    samples = np.random.default_rng(2).permutation(120)
    got = read(source, samples)
    np.testing.assert_array_equal(got["x"], wanted[samples])
    np.testing.assert_array_equal(got["y"], order[samples])
    where = source.locate([5])[0]
    assert (where.row, where.id, where.path) == (5, f"{order[5]:03d}", f"{folder}/{order[5] // 40}.h5")
    copied = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(read(copied, [7])["x"][0], wanted[7])
    copied.close()
    np.testing.assert_array_equal(read(copied, [7])["x"][0], wanted[7])
    copied.close()
    source.close()


def test_layout_and_type_of_rows(stored):
    folder, values, order, table = stored
    fields = {"x": {"name": "path", "layout": "NHWC", "dtype": "float32"}, "y": {"name": "path", "dataset": "flat"}}
    with contextlib.closing(ManifestSource(pa.table(table), fields, root=folder)) as source:
        assert (source.spec["x"].shape, source.spec["x"].dtype) == ((2, 4, 4), np.float32)
        assert (source.spec["y"].shape, source.spec["y"].dtype) == ((5,), np.float32)
        got = read(source, np.arange(120))
        np.testing.assert_array_equal(got["x"], values[order].transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(got["y"], values[order].reshape(120, -1)[:, :5])


def test_several_rows_of_one_sample(stored):
    folder, values, order, table = stored
    table = pa.table({**table, "other": table["path"][::-1], "other_row": (order % 40)[::-1]})
    fields = {"x": "path", "z": {"name": "other", "row": "other_row"}}
    with contextlib.closing(ManifestSource(table, fields, root=folder)) as source:
        got = read(source, [3, 80])
        np.testing.assert_array_equal(got["x"], values[order[[3, 80]]])
        np.testing.assert_array_equal(got["z"], values[order[::-1][[3, 80]]])


def test_rows_may_stand_as_text(stored):
    folder, values, order, table = stored
    lines = [f"{path},{row}" for path, row in zip(table["path"], table["row"])]
    (folder / "t.csv").write_text("\n".join(["path,row", *lines]))
    with contextlib.closing(ManifestSource(folder / "t.csv", {"x": "path"})) as source:
        np.testing.assert_array_equal(read(source, [9])["x"][0], values[order[9]])


def test_a_table_without_the_column_row_says_so(stored):
    folder, _, _, table = stored
    with pytest.raises(AsyncDataError, match="row") as caught:
        ManifestSource(pa.table({"path": table["path"]}), {"x": "path"}, root=folder)
    assert "column" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_chunk_order_decodes_every_chunk_once(workers, stored):
    folder, values, order, table = stored
    with contextlib.closing(ManifestSource(pa.table(table), {"x": "path", "y": "y"}, root=folder)) as source:
        options = LoaderOptions(batch_size=16, shuffle="chunk", shuffle_chunks=3, workers=workers, return_indices=True)
        with AsyncLoader(source, options) as loader:
            orders = []
            for epoch in range(2):
                ids = []
                for batch in loader:
                    rows = order[batch["index"].numpy()]
                    np.testing.assert_array_equal(batch["x"].numpy(), values[rows])
                    np.testing.assert_array_equal(batch["y"].numpy(), rows)
                    ids += batch["index"].tolist()
                assert sorted(ids) == list(range(120)), epoch
                orders.append(ids)
            assert orders[0] != orders[1]
        # Each group of three chunks is dealt before the next one: 30 samples are of three chunks.
        for ids in orders:
            for begin in range(0, 120, 30):
                chunks = collections.Counter(int(order[sample]) // 10 for sample in ids[begin : begin + 30])
                assert set(chunks.values()) == {10}


# -- arrays that are read straight to their place ----------------------------------------------------------------------


@pytest.fixture
def straight(monkeypatch):
    """Whether each file was read straight to its place."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not say what is in memory")
    monkeypatch.setattr(file_times, "RECENT_NS", 0)  # tests are faster
    found, of = [], fetching.filled
    monkeypatch.setattr(fetching, "filled", lambda *given: found.append(of(*given)) or found[-1])
    return found


def test_arrays_that_are_alike_are_read_straight_to_their_place(tmp_path, straight):
    arrays = [np.random.default_rng(number).normal(size=(3, 5)).astype("f4") for number in range(4)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    source = of_paths(tmp_path, [f"{number}.npy" for number in range(4)], check_files="none")
    assert np.array_equal(read(source, [2, 0, 3, 1])["x"], np.stack(arrays)[[2, 0, 3, 1]])
    assert straight == [True] * 4  # the first file was looked at before


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (np.arange(6.0).reshape(2, 3).astype(">f8"), True),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), True),
        (np.arange(6).reshape(2, 3), False),  # as many bytes, of another type
        (np.arange(6.0).reshape(3, 2), False),
        (np.arange(8.0).reshape(2, 4), False),
    ],
)
def test_an_array_that_lies_otherwise_is_decoded_or_refused(tmp_path, straight, other, same):
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", other)
    source = of_paths(tmp_path, ["a.npy", "b.npy"], check_files="none")
    if same:
        assert np.array_equal(read(source, [0, 1])["x"][1], other)
    else:
        with pytest.raises(FormatError, match=r"row 1.*b\.npy"):
            read(source, [1])


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_an_array_whose_file_is_cut_or_longer_is_refused(tmp_path, straight, change):
    np.save(tmp_path / "a.npy", np.zeros(1024 - 32, "f4"))  # a page, with its head
    whole = (tmp_path / "a.npy").read_bytes()
    assert len(whole) == 4096
    (tmp_path / "b.npy").write_bytes(whole[:change] if change < 0 else whole + bytes(change))
    source = of_paths(tmp_path, ["a.npy", "b.npy"], check_files="none")
    with pytest.raises(CorruptError, match=r"row 1.*b\.npy"):
        read(source, [1])
    assert straight == [False]


def test_an_array_of_another_type_is_not_filled_with_the_bytes_of_a_file(tmp_path, straight):
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.full((2, 3), number, "f4"))
    source = of_paths(tmp_path, ["0.npy", "1.npy"], check_files="none")
    with pytest.raises(FormatError, match=r"row 1.*1\.npy: holds float32"):
        source.read_into(np.array([1]), {"x": np.zeros((1, 2, 3), "i4")})
    parts = np.zeros((1, 2, 6), "f4")[:, :, ::2]
    source.read_into(np.array([1]), {"x": parts})
    assert (parts == 1).all()
    assert not straight


def test_an_array_that_was_written_a_moment_ago_is_looked_at_before_and_after(tmp_path, straight, monkeypatch):
    np.save(tmp_path / "0.npy", np.ones(3))
    source = of_paths(tmp_path, ["0.npy"], check_files="none")
    monkeypatch.setattr(file_times, "RECENT_NS", 2 * 10**9)
    written = (tmp_path / "0.npy").stat().st_mtime_ns
    for age, at_once in ((10**9, False), (3 * 10**9, True)):
        monkeypatch.setattr(file_times.time, "time_ns", lambda age=age: written + age)
        assert (read(source, [0])["x"] == 1).all()
        assert straight.pop() == at_once


def test_a_link_out_of_the_root_is_refused_on_every_way(tmp_path, straight):
    (tmp_path / "root").mkdir()
    np.save(tmp_path / "secret.npy", np.zeros(3))
    np.save(tmp_path / "root/a.npy", np.ones(3))
    (tmp_path / "root/out.npy").symlink_to(tmp_path / "secret.npy")
    (tmp_path / "root/in.npy").symlink_to(tmp_path / "root/a.npy")
    source = of_paths(tmp_path / "root", ["a.npy", "in.npy", "out.npy"], check_files="none")
    assert np.array_equal(read(source, [0, 1])["x"], np.ones((2, 3)))
    with pytest.raises(ManifestError, match=r"row 2.*leaves root"):
        read(source, [2])
    free = of_paths(tmp_path / "root", ["a.npy", "out.npy"], check_files="none", allow_external=True)
    assert np.array_equal(read(free, [1])["x"], np.zeros((1, 3)))


def test_single_numbers_are_decoded_since_they_become_wider(tmp_path, straight):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.array(number, "i2"))
    source = of_paths(tmp_path, [f"{number}.npy" for number in range(3)])
    assert read(source, [2, 1])["x"].tolist() == [2, 1]
    assert not straight


def test_the_first_batch_waits_for_no_pandas(tmp_path):
    pytest.importorskip("pandas")
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full(3, number, "f4"))
    rows = "".join(f"{number}.npy,{'ab'[number % 2]},{number % 2 or ''}\n" for number in range(4))
    (tmp_path / "t.csv").write_text("path,kind,even\n" + rows)
    script = (
        "import sys; from lit_async_data import AsyncLoader, ManifestSource\n"
        "source = ManifestSource(sys.argv[1], ('path', 'kind', {'name': 'even', 'null': 'ignore'}), id='path')\n"
        "with AsyncLoader(source, {'batch_size': 4}) as loader: print(next(loader)[2].tolist())\n"
        "print('pandas' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "t.csv"], capture_output=True, check=False, text=True
    )
    assert told.returncode == 0, told.stderr
    found, imported = told.stdout.splitlines()
    assert sorted(ast.literal_eval(found)) == [-100, -100, 1, 1]
    assert imported == "False"
