"""Credentials that expire, and a provider that renews them: in mid-run, and in reader processes."""

import contextlib
import datetime as dt
import os
import time

import numpy as np
import obstore
import pytest
from support.files.far import ROWS, VALUES, written
from support.range_server import patience
from support.sources.oracle import read
from support.threads.waits import LONG

from lit_async_data import AsyncLoader, HDF5Source, StoreError


class Provider:
    """Takes the key from a file, as tools that log in write it, and says which process asked. It expires soon."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self):
        with open(self.folder / "asked", "a") as asked:
            asked.write(f"{os.getpid()}\n")
        key = (self.folder / "key").read_text()
        known = {"access_key_id": key, "secret_access_key": "hidden", "token": key}
        return {**known, "expires_at": dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)}

    def processes(self):
        return list(map(int, (self.folder / "asked").read_text().split()))


@pytest.fixture
def provider(server, tmp_path, monkeypatch):
    written(tmp_path / "bucket" / "x.h5", monkeypatch)
    (tmp_path / "key").write_text("first")
    server.accepted = {"first"}
    return Provider(tmp_path)


def opened(server, provider, scheme="s3", *, given=False):
    options = {"endpoint_url": server.url, "credential_provider": provider, **patience(20)}
    if not given:
        region = {"region": "us-east-1"} if scheme == "s3" else {}
        return contextlib.closing(HDF5Source(f"{scheme}://bucket/x.h5", ["x"], storage_options=options | region))
    endpoint = options.pop("endpoint_url")
    options["client_options"]["allow_http"] = True
    store = obstore.store.S3Store("bucket", endpoint=endpoint, region="us-east-1", **options)
    return contextlib.closing(HDF5Source("s3://bucket/x.h5", ["x"], storage=store))


@pytest.mark.parametrize(("scheme", "given"), [("s3", False), ("gs", False), ("s3", True)])
def test_keys_are_renewed_in_mid_run(server, provider, tmp_path, scheme, given):
    with opened(server, provider, scheme, given=given) as source:
        assert np.array_equal(read(source, np.arange(4))["x"], VALUES[:4])
        (tmp_path / "key").write_text("second")
        server.accepted = {"first", "second"}
        ends = time.monotonic() + LONG
        while "second" not in server.signed:  # obstore asks no provider twice within 100 ms
            source.close()
            assert np.array_equal(read(source, np.arange(4))["x"], VALUES[:4])
            assert time.monotonic() < ends
        server.accepted = {"second"}
        assert np.array_equal(read(source, np.arange(ROWS))["x"], VALUES)
    assert len(provider.processes()) > 1


@pytest.mark.processes
def test_a_reader_process_asks_for_keys_itself(server, provider, tmp_path):
    with opened(server, provider) as source:
        (tmp_path / "key").write_text("second")
        server.accepted = {"second"}
        with AsyncLoader(source, {"batch_size": 4, "worker_kind": "process", "workers": 1}) as loader:
            assert np.array_equal(np.concatenate([np.asarray(batch[0]) for batch in loader]), VALUES)
    assert {*provider.processes()} - {os.getpid()}


def test_a_provider_that_fails_is_quoted(server, provider, tmp_path):
    (tmp_path / "key").unlink()
    with pytest.raises(StoreError, match=r"x\.h5, .* refuses these credentials; check them.*FileNotFoundError.*key"):
        opened(server, provider)
