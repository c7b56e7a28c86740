"""`HDF5Source` over stores and over a cache: the values of the local file, from a mirror in which nothing is there."""

import contextlib
import os

import numpy as np
import pytest
from support.files.mirrored import LAYOUTS, written
from support.range_server import KEYS
from support.sources.comparison import assert_same_samples
from support.sources.oracle import orders, read

from lit_async_data import AsyncLoader, ConfigError, HDF5Source
from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files import mirrored as mirrored_module
from lit_async_data.sources.files.mirror import BLOCK

pytest.importorskip("obstore")
WAYS = ["http", "s3", "cache", "little memory"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A folder with the file x.h5."""
    folder = tmp_path_factory.mktemp("mirrored") / "bucket"
    folder.mkdir()
    written(folder / "x.h5")
    return folder


@pytest.fixture
def remote(server, s3, bucket, tmp_path, monkeypatch):
    """A source of that file, by a way; none of its bytes come before they are needed."""
    monkeypatch.setattr(files_module, "HEAD_BYTES", BLOCK)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    monkeypatch.setattr(mirrored_module, "GAP_BLOCKS", 0)
    server.root = bucket.parent
    made = contextlib.ExitStack()

    def source(way, **options):
        address, more = {
            "http": (f"{server.url}/bucket/x.h5", {}),
            "s3": ("s3://bucket/x.h5", {"storage_options": s3}),
            "cache": (bucket / "x.h5", {"cache": tmp_path / "cache"}),
            "little memory": ("s3://bucket/x.h5", {"storage_options": s3, "cache_limit": 4 * BLOCK}),
        }[way]
        return made.enter_context(contextlib.closing(HDF5Source(address, **{**options, **more})))

    with made:
        yield source


def assert_same(found, wanted, samples):
    for key, values in wanted.items():
        assert_same_samples(found[key], values[samples], key=key, samples=samples)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_values_of_the_local_file(remote, bucket, layout, way):
    with contextlib.closing(HDF5Source(bucket / "x.h5", **LAYOUTS[layout])) as local:
        wanted, sizes = read(local, np.arange(len(local))), local.fingerprint()
    source = remote(way, **LAYOUTS[layout])
    assert source.fingerprint() == sizes
    for samples in orders(len(local)):
        assert_same(read(source, samples), wanted, samples)
    source.close()
    assert_same(read(source, samples[:0]), wanted, samples[:0])


@pytest.mark.parametrize("way", ["s3", "little memory"])
@pytest.mark.parametrize("shuffle", ["chunk", "global"])
def test_threads_read_ahead_in_any_order(remote, bucket, way, shuffle):
    for layout in ("gzip", "windows", "images", "by h5py"):
        with contextlib.closing(HDF5Source(bucket / "x.h5", **LAYOUTS[layout])) as local:
            wanted = read(local, np.arange(len(local)))
        source = remote(way, **LAYOUTS[layout])
        options = {"batch_size": 4, "shuffle": shuffle, "workers": 2, "return_indices": True}
        with AsyncLoader(source, options) as loader:
            for _ in range(2):
                seen = []
                for batch in loader:
                    samples = (batch["index"] if isinstance(batch, dict) else batch[-1]).numpy()
                    values = batch if isinstance(batch, dict) else dict(zip(source.spec.fields, batch))
                    assert_same({key: values[key].numpy() for key in wanted}, wanted, samples)
                    seen += samples.tolist()
                assert sorted(seen) == list(range(len(local)))


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_reader_processes_have_mirrors_of_their_own_and_the_credentials(remote, server, bucket, way):
    layout = {"fields": {"x": "gzip", "y": "big endian", "z": "variable"}}
    with contextlib.closing(HDF5Source(bucket / "x.h5", **layout)) as local:
        wanted = read(local, np.arange(len(local)))
    options = {"batch_size": 5, "shuffle": "none", "workers": 2, "worker_kind": "process"}
    with AsyncLoader(remote(way, **layout), options) as loader:
        for number, batch in enumerate(loader):
            samples = np.arange(5 * number, min(5 * number + 5, len(local)))
            assert_same({key: batch[key].numpy() for key in wanted}, wanted, samples)
    assert server.signed == (set() if way in ("http", "cache") else {KEYS["key"]})


def test_a_second_source_takes_everything_from_the_cache(remote, server, bucket, tmp_path, s3):
    options = {"fields": ["gzip", "big endian"], "cache": tmp_path / "cache", "storage_options": s3}
    for _ in range(3):
        server.requests.clear()
        with contextlib.closing(HDF5Source("s3://bucket/x.h5", **options)) as source:
            read(source, np.arange(len(source)))
    # What the first one read ahead and did not need may come with the second.
    assert server.requests == [("GET", "bucket/x.h5", "bytes=0-0")]


@pytest.mark.parametrize("way", ["s3", "cache"])
def test_other_files_are_refused_since_the_mirror_would_be_searched_for_their_datasets(remote, way):
    with pytest.raises(ConfigError, match="allow_external: other files are not read through cache, storage"):
        remote(way, fields=["single"], allow_external=True)


def test_a_pattern_lists_the_bucket(server, s3, bucket):
    server.root = bucket.parent
    for name in ("y10.h5", "y9.h5"):
        with contextlib.suppress(FileExistsError):
            os.link(bucket / "x.h5", bucket / name)
    with contextlib.closing(HDF5Source("s3://bucket/y*.h5", ["single"], storage_options=s3)) as source:
        assert source.paths == ["s3://bucket/y9.h5", "s3://bucket/y10.h5"]
        assert len(source) == 46
