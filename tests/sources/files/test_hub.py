"""`hf://`: files of Hugging Face, by a hub of the tests; and what it shares with other filesystems of fsspec."""

import contextlib

import h5py
import numpy as np
import pytest
from support.range_server import RangeServer
from support.sources.oracle import read

from lit_async_data import ChangedError, HDF5Source, MissingError, StoreError
from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files.mirror import BLOCK

huggingface_hub = pytest.importorskip("huggingface_hub")
VALUES = np.random.default_rng(1).integers(1, 100, (600, 64, 64)).astype("i4")  # larger than what fsspec reads ahead


@pytest.fixture
def hub(tmp_path, monkeypatch, connections_end):
    monkeypatch.setattr(files_module, "HEAD_BYTES", BLOCK)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    for revision, values in (("main", VALUES), ("v1", VALUES[::-1])):
        folder = tmp_path / "datasets" / "org" / "name" / "resolve" / revision
        folder.mkdir(parents=True)
        with h5py.File(folder / "x.h5", "w") as file:
            file["x"] = values
    with RangeServer(tmp_path) as server:
        server.accepted = {"hidden token"}
        monkeypatch.setenv("HF_TOKEN", "hidden token")
        yield server
        huggingface_hub.close_session()


def opened(hub, path, **options):
    return contextlib.closing(HDF5Source(path, ["x"], storage_options={"endpoint": hub.url, **options}))


def test_revisions_are_read_with_the_token_of_the_environment(hub):
    for revision, values in (("", VALUES), ("@main", VALUES), ("@v1", VALUES[::-1])):
        for name in ("x.h5", "*.h5"):
            with opened(hub, f"hf://datasets/org/name{revision}/{name}") as source:
                assert [path.rpartition("/")[2] for path in source.paths] == ["x.h5"]
                assert np.array_equal(read(source, np.arange(0, 600, 50))["x"], values[::50])


def test_a_revision_that_moves_is_noticed(hub, tmp_path):
    path = "hf://datasets/org/name/x.h5"
    with opened(hub, path) as source, opened(hub, path) as closed:
        read(source, np.array([0]))
        closed.close()
        with h5py.File(tmp_path / "datasets/org/name/resolve/main/x.h5", "w") as file:
            file["x"] = VALUES[::-1]
        with pytest.raises(ChangedError, match=r"bytes \d+ to \d+: changed since the source was built; build it again"):
            read(closed, np.array([599]))
        with opened(hub, path) as again:
            assert np.array_equal(read(again, np.array([599]))["x"], VALUES[:1])


def test_what_the_hub_refuses_is_named_without_the_token(hub):
    with pytest.raises(StoreError, match=r"x\.h5, bytes 0 to 16384: .*GatedRepoError: 403.*; check") as caught:
        opened(hub, "hf://datasets/org/name/x.h5", token="hidden other")
    assert "hidden" not in str(caught.value)
    for path in ("hf://datasets/org/name/none.h5", "hf://datasets/org/name@v2/x.h5"):
        with pytest.raises(MissingError, match="no such object; check the address, and the credentials if") as caught:
            opened(hub, path)
        assert caught.value.file == path
