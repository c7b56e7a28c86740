"""`HDF5Source` over stores and over a cache: the values of the local file, from a mirror in which nothing is there."""

import contextlib
import datetime as dt
import os
import re
import threading
import time

import h5py
import numpy as np
import pytest
from support.files.mirrored import LAYOUTS, written
from support.range_server import KEYS
from support.sources.comparison import assert_same_samples
from support.sources.oracle import orders, read
from support.threads.waits import LONG

from lit_async_data import AsyncLoader, ConfigError, HDF5Source
from lit_async_data.engine.stats import Wait, explained
from lit_async_data.errors import ResumeError
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files import mirror as mirror_module
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.files.mirror import BLOCK
from lit_async_data.sources.files.transport import Transport

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
    monkeypatch.setattr(mirror_module, "GAP_BLOCKS", 0)
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


def test_what_a_batch_lacks_is_asked_for_at_once_and_not_field_by_field(server, tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "HEAD_BYTES", BLOCK)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / "bucket" / name, "w") as file:
            for key in "xy":
                file[key] = np.full((30, 2**18), 7, np.uint8)
    addresses = [f"{server.url}/bucket/{name}.h5" for name in "ab"]
    with contextlib.closing(HDF5Source(addresses, ["x", "y"])) as source:
        server.open.clear()
        before, found = len(server.ranges()), []
        reader = threading.Thread(target=lambda: found.append(read(source, np.array([10, 20, 40, 50]))))
        reader.start()
        ends = time.monotonic() + LONG
        while len(server.ranges()) < before + 8:
            assert time.monotonic() < ends, server.ranges()[before:]
            os.sched_yield()
        server.open.set()
        reader.join(LONG)
        assert all((values == 7).all() for values in found[0].values())


def test_a_run_goes_on_when_its_files_have_moved_to_a_bucket_or_back(remote, bucket, tmp_path):
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "workers": 0, "return_indices": True}

    def rest(source, state=None, **more):
        with AsyncLoader(source, options | more) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            first = [next(batches)[-1].tolist() for _ in range(2)] if state is None else []
            saved = loader.state_dict() if state is None else state
            return saved, first, [batch[-1].tolist() for batch in batches]

    fields = ["contiguous"]
    with contextlib.closing(HDF5Source(bucket / "x.h5", fields)) as local:
        state, _, wanted = rest(local)
        with pytest.raises(ResumeError, match="those that were local keep their order with shuffle='global'") as caught:
            rest(remote("s3", fields=fields), state)
        assert rest(remote("s3", fields=fields), state, shuffle="global")[2] == wanted
        state, _, wanted = rest(remote("s3", fields=fields))
        with pytest.raises(ResumeError, match="those behind a network with cache=FOLDER of the source"):
            rest(local, state)
        assert rest(remote("cache", fields=fields), state)[2] == wanted
        with pytest.raises(ResumeError, match="shuffle: chunk in the checkpoint, none now") as caught:
            rest(local, state, shuffle="none")
        assert "cache=" not in str(caught.value)


def test_a_long_list_comes_page_by_page(server, s3, bucket, monkeypatch):
    server.root = bucket.parent
    monkeypatch.setattr("lit_async_data.sources.files.stores._PAGE", 1)
    for number in (2, 10, 1):
        with contextlib.suppress(FileExistsError):
            os.link(bucket / "x.h5", bucket / f"z{number}.h5")
    files = files_module.Files(storage_options=s3)
    assert files.matching("s3://bucket/z*.h5") == [f"s3://bucket/z{number}.h5" for number in (1, 2, 10)]
    assert files._transport._answers > 3  # each page is one: whoever waits sees that the store answers
    files.close()


def warnings_of(source, caplog, **options):
    caplog.clear()
    how = {"batch_size": 4, "workers": 1, "worker_kind": "thread", **options}
    with contextlib.closing(source), AsyncLoader(source, how) as loader:
        next(iter(loader))
    return [each for each in caplog.messages if "dropped before they are used" in each]


@pytest.fixture
def large(server, tmp_path, monkeypatch):
    """The address of a file that does not come whole."""
    monkeypatch.setattr(files_module, "MOST_MEMORY", 2**16)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    values = np.random.default_rng(0).integers(0, 255, (3000, 2048), np.uint8)
    with h5py.File(tmp_path / "bucket" / "x.h5", "w") as file:
        file["x"] = values
        file.create_dataset("z", data=values, chunks=(8, 2048), compression="gzip", compression_opts=0)
    return f"{server.url}/bucket/x.h5"


@pytest.mark.parametrize("shuffle", ["chunk", "global", "none"])
@pytest.mark.parametrize("field", ["x", "z"])
def test_memory_that_drops_what_is_fetched_ahead_is_warned_about(large, tmp_path, caplog, shuffle, field):
    def warned(limit):
        return warnings_of(HDF5Source(large, [field], cache_limit=limit), caplog, shuffle=shuffle, shuffle_chunks=4)

    (said,) = warned("100KB")
    needed = int(re.search(r"the order needs (\d+); set cache_limit=\1, smaller", said)[1])
    assert 500_000 < needed <= os.path.getsize(tmp_path / "bucket" / "x.h5")
    assert not warned(needed)
    assert warned(needed - 1)


def test_who_follows_the_verdict_and_keeps_a_remote_file_in_a_folder_fetches_it_once(large, server, tmp_path):
    """Its requests stand for the wait: 100 ms each, beside steps of 10 ms."""

    def second_epoch(**options):
        how = {"batch_size": 100, "shuffle": False, "workers": 1, "worker_kind": "thread"}
        with AsyncLoader(HDF5Source(large, ["x"], **options), how) as loader:
            steps = sum(1 for _ in loader)
            before = len(server.ranges())
            assert sum(1 for _ in loader) == steps
            wait_s = 0.1 * (len(server.ranges()) - before)
            work = Work(wait_s, cpu_s=0.001, starved=steps)
            return explained(loader, Wait(steps, wait_s, 0.0, 0.01 * steps), work, workers=1)

    before = second_epoch(cache_limit="4MB")
    assert (before.cause, before.hint) == ("read", "cache")
    after = second_epoch(cache=tmp_path / "cache")
    assert (after.cause, after.waited.wait_s) == ("loop", 0.0)


def test_a_store_that_tries_for_longer_is_waited_for_until_it_gives_up(monkeypatch):
    waited = []
    monkeypatch.setattr(files_module, "Transport", lambda timeout_s: waited.append(timeout_s) or Transport(1))
    for tried, waits in ((dt.timedelta(minutes=10), 660), (dt.timedelta(seconds=1), 180), (None, 180)):
        Files(storage_options={"retry_config": {"retry_timeout": tried}} if tried else {})
        assert waited.pop() == waits


@pytest.mark.parametrize("kind", ["fletcher", "skipped filters"])
def test_chunks_that_are_cached_as_they_are_stored_outlive_their_blocks_in_memory(server, tmp_path, kind):
    values = np.random.default_rng(0).integers(1, 1 << 30, (4096, 256), "i4")
    with h5py.File(tmp_path / "bucket" / "x.h5", "w") as file:
        options = {"fletcher32": True} if kind == "fletcher" else {"compression": "gzip"}
        data = file.create_dataset("x", values.shape, "i4", chunks=(4, 256), **options)
        if kind == "fletcher":
            data[...] = values
        for first in range(0, len(values), 4) if kind != "fletcher" else ():
            data.id.write_direct_chunk((first, 0), values[first : first + 4].tobytes(), filter_mask=1)
    options = {"batch_size": 32, "shuffle": "chunk", "workers": 2, "worker_kind": "thread", "seed": 1}
    source = HDF5Source(f"{server.url}/bucket/x.h5", {"x": "x"}, cache_limit=2**19)
    with contextlib.closing(source), AsyncLoader(source, {**options, "return_indices": True}) as loader:
        for batch in loader:
            assert np.array_equal(batch["x"].numpy(), values[batch["index"].numpy()])
