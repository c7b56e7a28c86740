"""Tables, roots and rows by addresses: batches as of local files, and each file is fetched once with a cache."""

import contextlib
import os
import pickle
import shutil
import tempfile

import h5py
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from support.range_server import RangeServer

import lit_async_data as lad
from lit_async_data.errors import ManifestError, MissingError, SourceError

pytest.importorskip("obstore")
FIELDS, COUNT = {"x": "path", "y": "label"}, 12
HDF5 = {"x": {"name": "path", "kind": "hdf5", "dataset": "data", "row": "row"}}
LINES = [f"im/{number}.png,{'ab'[number % 2]}" for number in range(COUNT)]


@pytest.fixture
def folder(tmp_path, server):
    draw, folder = np.random.default_rng(0), tmp_path / "bucket"
    (folder / "im").mkdir()
    for number in range(COUNT):
        Image.fromarray(draw.integers(0, 255, (9, 8, 3), np.uint8)).save(folder / "im" / f"{number}.png")
    (folder / "t.csv").write_text("\n".join(["path,label", *LINES]))
    with h5py.File(folder / "x.h5", "w") as file:
        file["data"] = np.arange(COUNT * 4.0).reshape(COUNT, 4)
    rows = [f"x.h5,{COUNT - 1 - number},a" for number in range(COUNT)]
    (folder / "h.csv").write_text("\n".join(["path,row,label", *rows]))
    return folder


def batches(source):
    options = {"batch_size": 5, "shuffle": "none", "workers": 1, "worker_kind": "thread"}
    with contextlib.closing(source), lad.AsyncLoader(source, options) as loader:
        return [{key: values.clone() for key, values in batch.items()} for batch in loader]


def same(source, local):
    for found, wanted in zip(batches(source), batches(local), strict=True):
        assert all((found[key] == wanted[key]).all() for key in wanted)


@pytest.mark.parametrize("name", ["t.csv", "h.csv"])
@pytest.mark.parametrize("address", ["http", "s3 pattern", "root", "rows", "rows, root", "mount"])
def test_batches_are_as_of_local_files(folder, server, s3, name, address):
    table, options, local = f"s3://bucket/{name}", {"storage_options": s3}, str(folder / name)
    if address == "http":
        table, options = f"{server.url}/bucket/{name}", {}
    elif address == "s3 pattern":
        table = f"s3://bucket/{name[0]}*.csv"
    elif address == "root":
        table, options["root"] = local, "s3://bucket/"
    elif address.startswith("rows"):
        table = str(folder.parent / "absolute.csv")
        head, *lines = (folder / name).read_text().splitlines()
        (folder.parent / "absolute.csv").write_text("\n".join([head, *(f"s3://bucket/{line}" for line in lines)]))
        options |= {"root": "s3://bucket"} if "root" in address else {"allow_external": True}
    elif address == "mount":
        table, options = local, {"cache": str(folder.parent / "cache")}
    same(lad.ManifestSource(table, FIELDS, **options), lad.ManifestSource(local, FIELDS))


def cached(folder, server):
    server.requests.clear()
    return lad.ManifestSource(f"{server.url}/bucket/t.csv", FIELDS, cache=folder.parent / "cache")


def fetched(server):
    """Objects that came whole, and how many were compared only."""
    return [path for path, asked in server.ranges() if asked != "bytes=0-0"], len(server.requests)


def test_with_a_cache_the_next_source_fetches_the_table_alone_and_compares_each_file_once(folder, server):
    for asked in (1 + COUNT, 1):
        source = cached(folder, server)
        for _ in range(2):
            same(source, lad.ManifestSource(str(folder / "t.csv"), FIELDS))
        whole, requests = fetched(server)
        assert (len(whole), requests) == (asked, 1 + COUNT)
    kept = next((folder.parent / "cache").glob("*.whole"))
    kept.write_bytes(b"damaged" + kept.read_bytes()[7:])
    same(cached(folder, server), lad.ManifestSource(str(folder / "t.csv"), FIELDS))
    assert len(fetched(server)[0]) == 2


def test_an_image_that_changed_in_the_bucket_is_fetched_again(folder, server):
    same(cached(folder, server), lad.ManifestSource(str(folder / "t.csv"), FIELDS))
    Image.fromarray(np.full((9, 8, 3), 7, np.uint8)).save(folder / "im" / "3.png")
    source = cached(folder, server)
    same(source, lad.ManifestSource(str(folder / "t.csv"), FIELDS))
    assert [path for path in fetched(server)[0] if path.endswith("png")] == ["bucket/im/3.png"]
    reader = pickle.loads(pickle.dumps(source))  # as in a reader process, which compares nothing again
    server.requests.clear()
    same(reader, lad.ManifestSource(str(folder / "t.csv"), FIELDS))
    assert server.requests == []
    (folder / "im" / "0.png").unlink()
    with pytest.raises(MissingError, match=r"row 0 of .*t\.csv: .*/bucket/im/0\.png: no such object") as caught:
        batches(cached(folder, server))
    assert caught.value.row == 0


def test_two_stores_of_one_address_share_no_kept_file(folder, server, s3):
    other, cache = folder.parent / "other", folder.parent / "cache"
    shutil.copytree(folder, other / "bucket")
    for number in range(COUNT):
        Image.fromarray(np.full((9, 8, 3), number, np.uint8)).save(other / "bucket" / "im" / f"{number}.png")
    with RangeServer(other) as second:
        addresses = [s3, {**s3, "endpoint_url": second.url}]
        sources = [lad.ManifestSource("s3://bucket/t.csv", FIELDS, cache=cache, storage_options=o) for o in addresses]
        for _ in range(2):
            for source, place in zip(sources, (folder, other / "bucket"), strict=True):
                same(source, lad.ManifestSource(str(place / "t.csv"), FIELDS))


def test_a_file_of_a_mount_is_kept_in_its_state_alone(folder):
    def source():
        return lad.ManifestSource(str(folder / "t.csv"), {"x": "path"}, cache=folder.parent / "cache")

    before = batches(source())[0]["x"][0]
    os.replace(folder / "im" / "1.png", folder / "im" / "0.png")
    after = batches(lad.ManifestSource(str(folder / "t.csv"), {"x": "path"}, filters=[["path", "==", "im/0.png"]]))
    (folder / "im" / "1.png").write_bytes((folder / "im" / "0.png").read_bytes())
    assert (batches(source())[0]["x"][0] == after[0]["x"][0]).all()
    assert (before != after[0]["x"][0]).any()
    (folder / "im" / "0.png").unlink()
    with pytest.raises(MissingError, match=r"row 0 of .*im/0\.png: no such"):
        batches(source())


def test_rows_outside_of_the_root_are_refused(folder, server, s3):
    addresses = ["s3://other/a.png", f"{server.url}/bucket/im/0.png", "s3://bucket/../other/a.png"]
    for outside in (*addresses, "../other/a.png"):
        (folder / "bad.csv").write_text(f"path,label\n{outside},a")
        with pytest.raises(ManifestError, match="leaves root s3://bucket"):
            lad.ManifestSource(str(folder / "bad.csv"), FIELDS, root="s3://bucket", storage_options=s3)


@pytest.mark.parametrize("name", ["u.csv", "u.parquet", "u*.csv"])
def test_rows_of_a_remote_table_are_named_by_its_address(folder, s3, name):
    table = pyarrow.table({"path": ["im/0.png", "im/gone.png"], "image": [b"broken"] * 2, "label": ["1", "x"]})
    for each in ("u.csv", "u2.csv"):
        (folder / each).write_text("path,label\nim/0.png,1\nim/gone.png,x\n")
    pyarrow.parquet.write_table(table, folder / "u.parquet")

    def source(**fields):
        return lad.ManifestSource(f"s3://bucket/{name}", fields, storage_options=s3)

    address = f"s3://bucket/{name.replace('*', '2')}"  # in natural order
    found = source(x="path")
    assert (found.locate([1])[0].file, found.locate([1])[0].row, found.parts[0].file) == (address, 1, address)
    for call, file in (
        (lambda: found[1], "bucket/im/gone.png"),
        (lambda: source(y={"name": "label", "kind": "number"}), address),
        (lambda: source(x="nothing"), address),
        (lambda: source(x="image"), address),  # broken, or missing
    ):
        with pytest.raises(SourceError) as caught:
            call()
        assert str(caught.value.file).endswith(file)
        assert address in str(caught.value)
        assert tempfile.gettempdir() not in f"{caught.value} {caught.value.file}"


def test_a_joined_table_may_be_remote(folder, s3):
    (folder / "labels.csv").write_text("file,age\nx.h5,7")
    joined = {"table": "s3://bucket/labels.csv", "on": "file", "storage_options": s3}
    source = lad.HDF5Source("s3://bucket/x.h5", {"x": "data", "age": "age"}, **joined)
    assert source.column("age").tolist() == [7] * COUNT
    assert [batch["age"].tolist() for batch in batches(source)] == [[7] * 5, [7] * 5, [7] * 2]
    (folder / "labels.csv").write_text("file,age\nx.h5,old\n")
    with pytest.raises(ManifestError, match=r"s3://bucket/labels\.csv") as caught:
        lad.HDF5Source("s3://bucket/x.h5", {"x": "data", "y": lad.Field("age", kind="number")}, **joined)
    assert caught.value.file == "s3://bucket/labels.csv"


@pytest.mark.parametrize(
    ("table", "fields", "said", "file"),
    [
        ("t.csv", FIELDS, r"row 5 of .*t\.csv: s3://.*im/5\.png", "s3://bucket/im/5.png"),
        ("h.csv", HDF5, r"row 5 of .*h\.csv: .*/data, row 6, by", "s3://bucket/x.h5"),
    ],
)
def test_an_error_of_a_store_names_the_rows_of_table_and_file(*, folder, server, s3, table, fields, said, file):
    source = lad.ManifestSource(str(folder / table), fields, root="s3://bucket", storage_options=s3)
    source.close()
    server.fault = 403
    with contextlib.closing(source), pytest.raises(lad.StoreError, match=said) as caught:
        source.read_into(np.array([5]), source.spec.empty(1))
    assert (caught.value.sample_id, caught.value.file) == (5, file)
    assert (caught.value.span is None) == (table == "t.csv")
