"""Whatever a store, its network or a cache folder does: right samples, or an error that names object and range."""

import contextlib
import copy
import pickle
import traceback

import h5py
import numpy as np
import pytest
from support.files.encoded_images import IMAGES
from support.files.far import ROWS, assert_right, written
from support.range_server import KEYS, patience
from support.sources.oracle import read

from lit_async_data import AsyncDataError, AsyncLoader, ConcatSource, Field, HDF5Source, SubsetSource
from lit_async_data.errors import ChangedError, ConfigError, CorruptError, FormatError, MissingError, StoreError
from lit_async_data.sources.files import stores as stores_module
from lit_async_data.sources.files.stores import SECRETS

pytest.importorskip("obstore")
# What a store asks for again, and what is an answer.
PASSING = ["ends early", "reset", "half closed", "hang", "drip", 429, 500, 503]
LASTING = ["whole", "shorter", "another place", "redirect", 301, 400, 401, 403]


@pytest.fixture(params=["s3", "http"])
def options(request, server, tmp_path, monkeypatch):
    """Arguments of a source of a file of which little comes before it is needed, with a store that gives up soon."""
    written(tmp_path / "bucket" / "x.h5", monkeypatch, compression="gzip", shuffle=True)
    keys = {"endpoint_url": server.url, **KEYS} if request.param == "s3" else {}
    path = "s3://bucket/x.h5" if request.param == "s3" else f"{server.url}/bucket/x.h5"
    return {"path": path, "fields": ["x", "z"], "storage_options": {**keys, **patience(0.3)}}


@pytest.fixture
def built(options):
    with contextlib.closing(HDF5Source(**options)) as source:
        yield source


def assert_named(error, path):
    assert (error.file, path in str(error)) == (path, True)
    assert "hidden" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("fault", PASSING + LASTING)
def test_a_fault_while_a_source_is_built(server, options, fault):
    for after in (0, 1):  # the head comes, and what libhdf5 reads then does not
        server.fault, server.after = fault, after
        with pytest.raises(StoreError, match=rf"bytes {'0' if not after else '[1-9]'}\d* to \d+: ") as caught:
            HDF5Source(**options)
        assert_named(caught.value, options["path"])
    server.times = 1 if fault in PASSING else 0
    with contextlib.closing(HDF5Source(**options)) as source:
        assert_right(source)


@pytest.mark.parametrize("fault", PASSING + LASTING)
def test_a_fault_while_samples_are_read_is_no_fault_of_these_samples(server, options, built, fault):
    server.fault = fault
    how = {"batch_size": 8, "shuffle": "none", "on_error": "skip", "workers": 1}
    with AsyncLoader(built, how) as loader, pytest.raises(StoreError, match=r"bytes \d+ to \d+: ") as caught:
        next(iter(loader))
    assert_named(caught.value, options["path"])
    assert caught.value.__notes__[0] == "in batch 0 of epoch 0, samples 0, 1, 2, … (8 in all)"
    built.close()  # and what was read ahead meanwhile fails, too
    server.times = 1 if fault in PASSING else 0
    assert_right(built)


def test_the_advice_after_a_refusal_is_an_option_that_the_store_takes(server, options):
    server.fault = 401
    with pytest.raises(StoreError, match="refuses these credentials") as caught:
        HDF5Source(**options)
    web = options["path"].startswith("http")
    assert ("{'anon': True}" in str(caught.value), "'Authorization'" in str(caught.value)) == (not web, web)
    server.fault = None
    advised = {"client_options": {"default_headers": {"Authorization": "x"}}} if web else {"anon": True}
    HDF5Source(**{**options, "storage_options": options["storage_options"] | advised}).close()


def test_a_store_that_fails_is_named_with_its_bucket(server, options):
    web, check = options["path"].startswith("http"), "check the network, the address and the credentials"
    server.fault = 400
    with pytest.raises(StoreError, match=check) as caught:
        HDF5Source(**options)
    region = "whether there is a bucket bucket, and the region: storage_options={'region': …}"
    assert (region in str(caught.value)) == (not web)
    if not web:
        with pytest.raises(StoreError, match=f"{check}, whether there is a bucket backet, and the region"):
            HDF5Source(**{**options, "path": "s3://backet/*.h5"})


@pytest.mark.parametrize("fault", ["another version", "rewritten"])
def test_an_object_that_changed_is_noticed_whatever_the_server_says(server, options, built, fault, tmp_path):
    if fault == "rewritten":
        (tmp_path / "bucket/x.h5").write_bytes(bytes(5) + (tmp_path / "bucket/x.h5").read_bytes())
    else:
        server.fault = fault
    with pytest.raises(ChangedError, match=r"bytes \d+ to \d+: changed since the source was built; build it") as caught:
        read(built, np.arange(ROWS))
    assert_named(caught.value, options["path"])
    assert caught.value.sample_id is not None


class Panic(BaseException):
    """As obstore raises for a fault of its own."""


def test_a_panic_of_obstore_is_an_error_that_says_what_to_check(built, monkeypatch):
    def panics(*_, **__):
        raise Panic("called `Result::unwrap()` on an `Err` value: InvalidPort")

    monkeypatch.setattr(stores_module.obstore, "get", panics)
    with pytest.raises(StoreError, match=r"bytes \d+ to \d+: obstore failed at this request; check the address"):
        read(built, np.arange(ROWS))


@pytest.mark.parametrize("field", ["x", "z", "window", "images"])
@pytest.mark.parametrize("joined", [False, True])
def test_an_error_of_a_store_names_the_first_sample_that_needs_its_bytes(server, options, field, joined, tmp_path):
    with h5py.File(tmp_path / "bucket" / "x.h5", "a") as file:
        images = file.create_dataset("images", (ROWS,), h5py.vlen_dtype(np.uint8))
        for row in range(ROWS):
            images[row] = np.frombuffer(IMAGES[row % len(IMAGES)], np.uint8)
    window, image = Field("x", window=(0, 2)), Field("images", decode="image", image_size=8)
    one = HDF5Source(**{**options, "fields": [{"window": window, "images": image}.get(field, field)]})
    source = ConcatSource([SubsetSource(one, np.arange(3)), one]) if joined else one
    first, row = 3 * joined, 0 if field == "images" else 20  # images are fetched by blocks
    with contextlib.closing(source):
        one.close()  # it drops what came with the metadata
        server.fault = 403
        with pytest.raises(StoreError, match=r"x\.h5:/\w+, row \d+, bytes \d+ to \d+: ") as caught:
            read(source, first + np.arange(row, ROWS - 2))
        error = caught.value
        assert (error.row, error.sample_id) == (row, first + row)
        assert f":/{error.dataset}, row {row}, bytes {error.span[0]} to {error.span[1]}: " in str(error)
        server.fault = None
        read(source, first + np.arange(row, ROWS - 2))


def test_bytes_of_another_place_under_an_honest_header_do_not_decode(server, options):
    with contextlib.closing(HDF5Source(**{**options, "fields": ["z"]})) as source:
        source.close()
        server.fault = "shifted"
        with pytest.raises(CorruptError, match=r"x\.h5:/z, chunk") as caught:
            read(source, np.arange(ROWS))
    assert caught.value.sample_id is not None


def test_an_object_that_is_gone_is_missing(server, options, built, tmp_path):
    (tmp_path / "bucket/x.h5").unlink()
    region = " and the region" * options["path"].startswith("s3")
    for act in (lambda: read(built, np.arange(ROWS)), lambda: HDF5Source(**options)):
        with pytest.raises(MissingError, match=f"no such object; check the address{region}$") as caught:
            act()
        assert_named(caught.value, options["path"])


def test_what_is_no_hdf5_file_is_named_by_its_address(server, options, tmp_path):
    (tmp_path / "bucket/x.h5").write_bytes(b"<!doctype html>" + bytes(5000))
    with pytest.raises(FormatError, match="is a web page, as a failed download leaves") as caught:
        HDF5Source(**options)
    assert_named(caught.value, options["path"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("http://localhost/x*.h5", "a web server lists no files; give the addresses as a list"),
        ("http://localhost/x.h5?signature=1", "what follows the question mark may be secret"),
        ("simplecache::s3://bucket/x.h5", "a chain of filesystems; give the last address, and cache=FOLDER"),
        ("https://me:hidden@localhost/x.h5", r"https://…@localhost/x\.h5: holds a password.*storage_options"),
        ("https://me:hid/den@localhost/x.h5", "https://…: is no host, or holds a secret, which messages would show"),
        ("webhdfs:///x.h5", "webhdfs:// cannot be read: .*; write webhdfs://HOST/NAME, or give it as storage_options"),
        ("s3://bucket", "names no object; write s3://BUCKET/NAME"),
        ("dropbox://me/x.h5", "dropbox:// cannot be read: .*dropboxdrivefs"),
    ],
)
def test_an_address_that_cannot_be_read_is_named(path, said):
    with pytest.raises(ConfigError, match=said) as caught:
        HDF5Source(path, ["x"])
    assert caught.value.option == "path"
    assert "hid/den" not in str(caught.value)
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("scheme", "given", "said"),
    [
        ("s3", {**KEYS, "colour": 1}, "colour' is not valid for store 'S3'; see obstore's options"),
        ("s3", {**KEYS, "retry_config": 5}, "cannot be used: .*not a mapping"),
        ("s3", {**KEYS, "client_options": {"timeot": "3s"}}, r"cannot be used: .*timeot.*; see obstore's options"),
        ("s3", {**KEYS, "endpoint_url": "localhost"}, "the endpoint is no address; write https://HOST"),
        ("s3", {**KEYS, "endpoint_url": "http://me:hid/den@localhost:9"}, "endpoint is no address; .* without a pass"),
        ("gs", {"anon": True, "endpoint_url": "localhost"}, "the endpoint is no address; write https://HOST"),
        ("http", {"anon": True}, "unexpected keyword argument 'anon'; see obstore's options"),
        ("gs", {"requester_pays": True}, "'requester_pays' is not valid for store 'GCS'; see"),
        ("az", {"account_name": "me", "key": "hidden"}, "'key' is not valid for store 'MicrosoftAzure'; see"),
        ("s3", "hidden", "str is not a mapping"),
    ],
)
def test_wrong_options_are_named_and_secrets_are_not(scheme, given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        HDF5Source(f"{scheme}://bucket/x.h5", ["x"], storage_options=given)
    assert caught.value.option == "storage_options"
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("options", ["s3"], indirect=True)
def test_secrets_go_to_reader_processes_only(server, options, built, caplog):
    caplog.set_level(0)
    assert_right(built)
    pickled = pickle.dumps(built)
    with AsyncLoader(built, {"batch_size": 8}) as loader:
        shown = [repr(built), repr(vars(built._opened.files)["_stores"]), str(loader.state_dict()), caplog.text]
    shown += [str(built.fingerprint()), pickled.decode("latin1")]
    assert [each for each in shown if "hidden" in each] == []
    copied = pickle.loads(pickled)
    server.fault = 403
    said = "; client_options, key, secret, token of storage_options are not in pickles, which others"
    with pytest.raises(StoreError, match=said):
        read(copied, np.arange(ROWS))
    server.fault = None
    token = SECRETS.set(True)
    with contextlib.closing(pickle.loads(pickle.dumps(built))) as there, contextlib.closing(copied):
        SECRETS.reset(token)
        assert_right(there)
        assert_right(copy.deepcopy(built))


@pytest.mark.parametrize("token", ["hush+hush/SECRET==", 'hush "SECRET" ü'])
@pytest.mark.parametrize("name", ["missing.h5", "x.h5"])
def test_tracebacks_have_no_query_which_may_be_a_token(server, tmp_path, token, name):
    (tmp_path / "bucket" / "x.h5").write_bytes(b"0" * 100)
    server.fault = 403 if name == "x.h5" else None
    with pytest.raises(AsyncDataError) as caught:
        HDF5Source(f"{server.url}/bucket/{name}", ["x"], storage_options={"query": f"token={token}", **patience(1)})
    told = "".join(traceback.format_exception(caught.value))
    assert "hush" not in told
    assert "SECRET" not in told


def test_a_store_reads_its_own_bucket_only():
    store = pytest.importorskip("obstore.store").S3Store("mine", endpoint="http://127.0.0.1:1", skip_signature=True)
    with pytest.raises(ConfigError, match=r"s3://other/x\.h5: the store is that of mine") as caught:
        HDF5Source("s3://other/x.h5", ["x"], storage=store)
    assert caught.value.option == "storage"
