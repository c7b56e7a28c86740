"""Stores of other projects, and stores that the user made: the values, a list, and a change that is noticed."""

import contextlib
import pickle
import urllib.request

import fsspec
import numpy as np
import pytest
from support.files.far import ROWS, assert_right, written
from support.range_server import KEYS, patience
from support.real_servers import certificate, hadro, moto, nginx
from support.sources.oracle import read

from lit_async_data import ChangedError, HDF5Source, MissingError, StoreError

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("connections_end")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The bytes of a file."""
    written(tmp_path / "x.h5", monkeypatch, compression="gzip")
    return (tmp_path / "x.h5").read_bytes()


def assert_noticed(source, change):
    """Also by a source whose files were closed meanwhile."""
    assert_right(source)
    source.close()
    change()
    with pytest.raises(ChangedError, match="changed since the source was built"):
        read(source, np.arange(ROWS))
    source.close()


def test_s3_of_moto(data):
    with moto() as url:

        def put(name, content):
            request = urllib.request.Request(f"{url}/{name}", content, method="PUT")
            request.add_header("Content-Type", "application/octet-stream")
            request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
            urllib.request.urlopen(request).close()

        put("bucket", b"")
        for name in ("a/x9.h5", "a/x10.h5", "a/b/x1.h5"):
            put(f"bucket/{name}", data)
        options = {"endpoint_url": url, "key": "a", "secret": "b", "region": "us-east-1", **patience(20)}
        with contextlib.closing(HDF5Source("s3://bucket/a/x*.h5", ["x", "z"], storage_options=options)) as source:
            assert source.paths == ["s3://bucket/a/x9.h5", "s3://bucket/a/x10.h5"]
            assert_right(source)
        source = HDF5Source("s3://bucket/a/x9.h5", ["x", "z"], storage_options=options)
        assert_noticed(source, lambda: put("bucket/a/x9.h5", data + b"\0"))
        for path in ("s3://nothing/x.h5", "s3://bucket/nothing.h5"):
            with pytest.raises(MissingError, match="no such object; check the address"):
                HDF5Source(path, ["x"], storage_options=options)


@pytest.fixture
def folder(data, tmp_path):
    """A folder of buckets."""
    (tmp_path / "buckets" / "bucket").mkdir(parents=True)
    (tmp_path / "buckets" / "bucket" / "x.h5").write_bytes(data)
    return tmp_path / "buckets"


@pytest.mark.long
def test_signatures_of_hadro_which_is_far_away(folder):
    slow = "--latency-ms", "20", "--bandwidth-mbps", "16"
    with hadro(folder, "--access-key", KEYS["key"], "--secret-key", KEYS["secret"], *slow) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "region": "us-east-1", **patience(20)}
        right = {"key": KEYS["key"], "secret": KEYS["secret"]}
        refusals = {"s3://bucket/x.h5": "the store refuses these credentials; check them", "s3://bucket/*.h5": "403"}
        for path, said in refusals.items():
            with contextlib.closing(HDF5Source(path, ["x", "z"], storage_options=options | right)) as source:
                assert_right(source)
            for wrong in (right | {"secret": "another secret"}, right | {"key": "another key"}, {"anon": True}):
                with pytest.raises(StoreError, match=said) as caught:
                    HDF5Source(path, ["x"], storage_options=options | wrong)
                assert caught.value.file == path
                assert "another" not in str(caught.value)


@pytest.mark.long
def test_tls_of_hadro(folder, tmp_path, monkeypatch):
    authority, cert, key = certificate(tmp_path)
    with hadro(folder, "--tls-cert", str(cert), "--tls-key", str(key)) as port:
        url = f"https://127.0.0.1:{port}"
        trusting = {"client_options": {"root_certificate": authority.read_text()}}
        for path, options in (("s3://bucket/x.h5", {"endpoint_url": url}), (f"{url}/bucket/x.h5", {})):
            with pytest.raises(StoreError, match=r"x\.h5, bytes 0 to 16384: .*\(.*InvalidCertificate, UnknownIssuer\)"):
                HDF5Source(path, ["x"], storage_options=options | patience(20))
            with contextlib.closing(HDF5Source(path, ["x", "z"], storage_options=options | trusting)) as source:
                assert_right(source)
            with monkeypatch.context() as environment:
                environment.setenv("SSL_CERT_FILE", str(authority))
                with contextlib.closing(HDF5Source(path, ["x", "z"], storage_options=options)) as source:
                    assert_right(source)


def test_nginx(data, tmp_path):
    (tmp_path / "scratch").mkdir()
    with nginx(tmp_path, tmp_path / "scratch") as url:
        source = HDF5Source(f"{url}x.h5", ["x", "z"], storage_options=patience(20))
        assert_noticed(source, lambda: (tmp_path / "x.h5").write_bytes(data + b"\0"))


def test_a_filesystem_of_fsspec_that_the_user_made(data):
    memory = fsspec.filesystem("memory")
    for name in ("/a/x9.h5", "/a/x10.h5"):
        memory.pipe_file(name, data)
    for path in ("memory://a/x*.h5", "/a/x*.h5"):
        with contextlib.closing(HDF5Source(path, ["x", "z"], storage=memory)) as source:
            assert [each.rpartition("/")[2] for each in source.paths] == ["x9.h5", "x10.h5"]
            assert_right(source)
    with contextlib.closing(HDF5Source("memory://a/x9.h5", ["x"])) as source:
        assert_right(source)
    assert_noticed(HDF5Source("/a/x9.h5", ["x"], storage=memory), lambda: memory.pipe_file("/a/x9.h5", data + b"\0"))
    memory.rm("/a", recursive=True)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_store_of_obstore_that_the_user_made(data, tmp_path, kind):
    store = obstore.store.MemoryStore() if kind == "memory" else obstore.store.LocalStore(tmp_path)
    obstore.put(store, "a/x.h5", data)
    with contextlib.closing(HDF5Source("a/*.h5", ["x", "z"], storage=store)) as source:
        assert source.paths == ["a/x.h5"]
        assert_right(source)
        copied = pickle.loads(pickle.dumps(source))
    said = r"a/x\.h5: storage is not in pickles, which others may read: build"
    with contextlib.closing(copied), pytest.raises(StoreError, match=said):
        read(copied, np.arange(ROWS))
    assert_noticed(HDF5Source("a/x.h5", ["x"], storage=store), lambda: obstore.put(store, "a/x.h5", data + b"\0"))
