"""Rows, reports, packs and measurements of files behind a network; a cache that is filled before a job."""

import contextlib
import json
import os
import shlex

import h5py
import numpy as np
import pytest
from PIL import Image

from lit_async_data import ClosedError, HDF5Source, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.reading import open_reader, read
from lit_async_data.sources.contract.source import Part, Remote
from lit_async_data.tools.doctor import advice

pytest.importorskip("obstore")


@pytest.fixture
def folder(tmp_path, server, monkeypatch):
    """Three files, and a table of images."""
    folder = tmp_path / "bucket"
    draw = np.random.default_rng(0)
    for number in range(3):
        with h5py.File(folder / f"scan{number}.h5", "w") as file:
            images = draw.integers(0, 255, (20, 16, 16, 3), np.uint8)
            file.create_dataset("images", data=images, chunks=(4, 16, 16, 3), compression="gzip")
            file["labels"] = np.arange(20) % 5
    (folder / "im").mkdir()
    for number in range(12):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / "im" / f"{number}.png")
    lines = [f"im/{number}.png,{'ab'[number % 2]}" for number in range(12)]
    (folder / "t.csv").write_text("\n".join(["path,label", *lines]))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def typed(folder, server, monkeypatch):
    """The options of a command by which the server is S3."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return ["--storage-options", json.dumps({"endpoint_url": server.url, "secret": "hidden secret", "key": "a"})]


def written(capsys, *arguments):
    """What a command prints for programs, or for people."""
    assert main(list(arguments)) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "hidden" not in out
    return json.loads(out) if "--json" in arguments else out


@pytest.mark.parametrize("way", ["http", "s3", "cache"])
def test_rows_are_those_of_the_local_file(folder, server, s3, way):
    path, options = {
        "http": (f"{server.url}/bucket/scan1.h5", {}),
        "s3": ("s3://bucket/scan1.h5", {"storage_options": s3}),
        "cache": (str(folder / "scan1.h5"), {"cache": "cache"}),
    }[way]
    with h5py.File(folder / "scan1.h5") as file, open_reader(path, **options) as reader:
        for name in ("images", "labels"):
            for rows in (None, slice(3, 17), [7, 0, -1]):
                wanted = file[name][()] if rows is None else file[name][()][rows]
                assert np.array_equal(reader.read(name, rows), wanted)
    with pytest.raises(ClosedError, match="its reader is closed"):
        reader.read("labels")
    assert read(f"{path}:/labels", [7, -1], storage_options=options.get("storage_options")).tolist() == [2, 4]


@pytest.mark.parametrize("given", ["s3://bucket/scan*.h5", "s3://bucket/scan1.h5", "s3://bucket/t.csv"])
def test_inspect_prints_lines_that_read_the_address(folder, typed, s3, capsys, given):
    report = written(capsys, "inspect", given, *typed, "--cache", "cache", "--json")
    (shown,) = report["suggestions"]
    assert shown["samples"] == {"s3://bucket/scan*.h5": 60, "s3://bucket/scan1.h5": 20, "s3://bucket/t.csv": 12}[given]
    assert (report["bytes"] is None) == given.endswith(".h5")
    assert '"secret": "…"' in shown["python"]
    assert f'"{given}"' in shown["python"]
    assert 'cache="cache"' in shown["python"]
    assert 'secret: "…"' in shlex.split(shown["command"])[-1] or 'secret: "…"' in shown["command"]
    names = {}
    secret = shown["python"].replace('"secret": "…"', '"secret": "hidden secret"').replace('"key": "…"', '"key": "a"')
    exec(secret, names)
    with contextlib.closing(names["source"]) as source:
        assert len(source) == shown["samples"]


def test_every_sample_is_checked(folder, typed, capsys):
    said = written(capsys, "inspect", "s3://bucket/scan*.h5", "--check-all", *typed)
    assert "0 of 60 samples of s3://bucket/scan0.h5 and 2 more" in said
    (folder / "im" / "3.png").write_bytes(b"no image")
    assert main(["inspect", "s3://bucket/t.csv", "--check-all", *typed]) == 1
    assert "1 of 12 samples" in capsys.readouterr().out


def test_a_pack_of_addresses_has_the_values_of_local_files(folder, typed, capsys):
    written(capsys, "pack", "s3://bucket/scan*.h5", *typed, "-o", "p.h5")
    with contextlib.closing(HDF5Source("bucket/scan*.h5", {"x": "images"}, layout="NHWC")) as local:
        assert (read("p.h5:/x") == np.concatenate([read(f"{path}:/images") for path in local.paths])).all()
    assert main(["pack", "s3://bucket/scan*.h5", *typed, "-o", "s3://bucket/p.h5"]) == 2
    assert "output: s3://bucket/p.h5: pack writes files of this machine" in capsys.readouterr().err


def test_the_doctor_says_that_it_measures_the_network(typed, capsys):
    text = written(capsys, "doctor", "s3://bucket/scan*.h5", *typed, "--seconds", "0.05")
    assert "by decoding, over the network" in text
    assert "cache=FOLDER (--cache) keeps what was fetched" in text
    report = written(capsys, "doctor", "bucket/scan1.h5", "--seconds", "0.05", "--json")
    assert (report["remote"], report["advice"]) == (None, [])


@pytest.mark.parametrize(
    ("groups", "remote", "said"),
    [
        (1, Remote(2**30, 2**12, None), ["cache=FOLDER"]),
        (100, Remote(2**30, 2**12, "folder"), ["100 groups in 1 file open one after the other: h5repack -S PAGE"]),
        (1, Remote(2**30, 2**18, "folder"), ["a request brings 4.0 KiB only: pack"]),
    ],
)
def test_the_doctor_advises_by_what_an_epoch_fetches(groups, remote, said):
    class Facts:
        chunks = type("Layout", (), {"remote": remote})
        parts = tuple(Part("x.h5", f"g{number}", "", 1, "") for number in range(groups))

    first, *others = advice(Facts)
    assert f"about {remote.requests:,} requests" in first
    assert [each[: len(start)] for each, start in zip(others, said, strict=True)] == said


def filled(capsys, *arguments):
    return written(capsys, "fill", "s3://bucket/scan*.h5", "s3://bucket/im/*.png", *arguments)


@pytest.fixture
def little(monkeypatch):
    """Files come in several pieces."""
    monkeypatch.setattr("lit_async_data.sources.files.files.HEAD_BYTES", 2**14)
    monkeypatch.setattr("lit_async_data.tools.fill.PIECE_BYTES", 2**13)


@pytest.mark.usefixtures("little")
def test_after_fill_no_bytes_are_fetched(folder, server, s3, typed, capsys):
    nbytes = sum(path.stat().st_size for path in [*folder.glob("*.h5"), *folder.glob("im/*")])
    out = filled(capsys, *typed, "--cache", "cache")
    assert "cache: 15 files, " in out
    assert f"{nbytes / 1024:.1f} KiB" in out
    requests = len(server.requests)
    assert filled(capsys, *typed, "--cache", "cache").partition(" in ")[0] == out.partition(" in ")[0]
    again = [(path, asked) for _, path, asked in server.requests[requests:] if "." in path]
    names = [path.relative_to(folder.parent) for path in [*folder.glob("*.h5"), *folder.glob("im/*")]]
    assert sorted(again) == sorted((str(name), "bytes=0-0") for name in names)  # which version it is
    requests = len(server.ranges())
    options = {"cache": "cache", "storage_options": s3}
    with contextlib.closing(HDF5Source("s3://bucket/scan*.h5", ["images"], **options)) as source:
        for sample in range(0, len(source), 7):
            source[sample]
    assert {asked for _, asked in server.ranges()[requests:]} == {"bytes=0-0"}
    requests = len(server.ranges())
    with contextlib.closing(ManifestSource("s3://bucket/t.csv", {"x": "path"}, **options)) as source:
        assert [int(source[sample]["x"][0, 0, 0]) for sample in range(12)] == list(range(12))
        assert len(server.ranges()[requests:]) == 1 + 12
        source.close()
        assert [int(source[sample]["x"][0, 0, 0]) for sample in range(12)] == list(range(12))
        assert len(server.ranges()[requests:]) == 1 + 12  # each is compared once
    assert {asked for path, asked in server.ranges()[requests:] if path.endswith(".png")} == {"bytes=0-0"}


def test_fill_takes_slow_mounts(folder, capsys):
    assert "cache: 3 files" in written(capsys, "fill", "bucket/scan*.h5", "--cache", "cache")
    blocks = sum(os.stat(f"cache/{name}").st_blocks for name in os.listdir("cache") if name.endswith(".data"))
    assert blocks * 512 >= sum(path.stat().st_size for path in folder.glob("*.h5"))


def test_fill_says_what_found_no_room(typed, capsys):
    command = ["fill", "s3://bucket/scan*.h5", "s3://bucket/im/*.png", *typed]
    assert main([*command, "--cache", "cache", "--cache-limit", "1KB"]) == 2
    error = capsys.readouterr().err
    assert "no room for it in " in error
    assert "of 15; raise cache_limit" in error
    assert main(command) == 2
    assert "cache: missing; name the folder to fill" in capsys.readouterr().err


def test_options_of_a_store_are_json(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "s3://bucket/x.h5", "--storage-options", "{anon: true}"])
    said = """argument --storage-options: invalid JSON (such as '{"anon": true}') value: '{anon: true}'"""
    assert said in capsys.readouterr().err
