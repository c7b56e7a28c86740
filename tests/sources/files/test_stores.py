"""Answers of stores: right bytes, or an error that names the object."""

import base64
import datetime as dt
import glob
import os
import re
import warnings

import pytest
from support.range_server import patience

from lit_async_data.errors import ChangedError, FormatError, MissingError, StoreError
from lit_async_data.sources.files import stores as stores_module
from lit_async_data.sources.files.files import MOST_WHOLE_BYTES
from lit_async_data.sources.files.stores import ObjectStore

obstore = pytest.importorskip("obstore")
DATA = bytes(range(256)) * 1000


@pytest.fixture(params=["s3", "http"])
def store(request, server, s3, tmp_path):
    (tmp_path / "bucket" / "x.h5").write_bytes(DATA)
    endpoint = {"endpoint_url": server.url}
    account = {"account_name": "ours", "account_key": base64.b64encode(b"hidden" * 9).decode()}
    url, options = {
        "s3": ("s3://bucket", s3),
        "gs": ("gs://bucket", {"anon": True, **endpoint}),
        "az": ("az://bucket", {**account, **endpoint}),
        "abfss": ("abfss://bucket@ours.dfs.core.windows.net", {"sas_token": "sv=2026&sig=hidden+token", **endpoint}),
        "http": (server.url, {}),
    }[request.param]
    made = ObjectStore(url, {**options, **patience(0.3)})
    yield made
    vars(made).clear()  # pytest keeps it, and it keeps connections


EACH = pytest.mark.parametrize("store", ["s3", "gs", "az", "abfss", "http"], indirect=True)


def named(store):
    return f"{store.url}/bucket/x.h5" if store.url.startswith("http") else f"{store.url}/x.h5"


@EACH
def test_ranges_and_names_come(server, store, tmp_path):
    version, head = store.head(named(store), 1000)
    assert (version.size, bytes(head)) == (len(DATA), DATA[:1000])
    assert bytes(store.get(named(store), 5000, 9000, version)) == DATA[5000:9000]
    assert bytes(store.head(named(store), 10**6)[1]) == DATA
    if not store.url.startswith("http"):
        (tmp_path / "bucket" / "a").mkdir()
        (tmp_path / "bucket" / "a" / "y & z.h5").write_bytes(DATA)
        assert store.matching(f"{store.url}/x*", lambda call: call()) == [f"{store.url}/x.h5"]
        assert store.matching(f"{store.url}/a/*.h5", lambda call: call()) == [f"{store.url}/a/y & z.h5"]
        assert bytes(store.head(f"{store.url}/a/y & z.h5", 10)[1]) == DATA[:10]
    assert server.signed == ({"ours"} if store.url.startswith(("s3", "az")) else set())


@EACH
@pytest.mark.parametrize("ignored", [False, True])
def test_an_object_that_changes_is_noticed_also_by_a_server_that_ignores_if_match(server, store, ignored, tmp_path):
    version, _ = store.head(named(store), 10)
    if ignored:
        server.fault = "another version"
    else:
        (tmp_path / "bucket" / "x.h5").write_bytes(b"y" + DATA)
        os.utime(tmp_path / "bucket" / "x.h5", (1, 1))
    with pytest.raises(ChangedError, match=r"x\.h5, bytes 0 to 10: changed"):
        store.get(named(store), 0, 10, version)


def test_why_nothing_answers_is_said():
    """In words of the system, and not of obstore."""
    for nbytes, place in ((1, ", bytes 0 to 1"), (MOST_WHOLE_BYTES, "")):
        with pytest.raises(StoreError, match=rf"x\.h5{place}: .*\(.*Connection refused.*\); check the network"):
            ObjectStore("http://127.0.0.1:9", patience(1)).head("http://127.0.0.1:9/x.h5", nbytes)


def test_an_endpoint_of_the_environment_may_be_plain_http(server, tmp_path, monkeypatch):
    (tmp_path / "bucket" / "x.h5").write_bytes(DATA)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = ObjectStore("s3://bucket", patience(20))
    assert bytes(store.head("x.h5", 10)[1]) == DATA[:10]
    vars(store).clear()


def test_an_object_whose_changes_nobody_would_notice_is_refused(server, store):
    server.fault = "no version"
    with pytest.raises(StoreError, match=r"x\.h5: its server sends neither ETag nor Last-Modified"):
        store.head(named(store), 10)


def test_a_try_ends_when_no_bytes_come_and_not_when_they_come_slowly(server, tmp_path):
    (tmp_path / "bucket" / "x.h5").write_bytes(DATA)
    options = patience(0.3)
    options["client_options"] = {"read_timeout": dt.timedelta(seconds=0.3)}
    store, server.fault, server.times = ObjectStore(server.url, options), "drip", 1
    assert bytes(store.head(f"{server.url}/bucket/x.h5", len(DATA))[1]) == DATA
    assert [asked for _, _, asked in server.requests] == [f"bytes=0-{len(DATA) - 1}", f"bytes=1024-{len(DATA) - 1}"]
    vars(store).clear()


def test_bytes_count_as_they_come(server, tmp_path):
    (tmp_path / "bucket" / "x.h5").write_bytes(8 * DATA)
    store, came = ObjectStore(server.url, patience(20)), []
    store.arrived = came.append
    store.head(f"{server.url}/bucket/x.h5", len(8 * DATA))
    assert sum(came) == len(8 * DATA)
    assert len(came) > 1
    vars(store).clear()


def test_an_empty_object_is_named_as_such(server, store, tmp_path):
    (tmp_path / "bucket" / "x.h5").write_bytes(b"")
    with pytest.raises(FormatError, match=r"x\.h5: is empty; check the address"):
        store.head(named(store), 10)
    server.fault = 416
    (tmp_path / "bucket" / "x.h5").write_bytes(DATA)
    with pytest.raises(StoreError, match=r"bytes 0 to 10: .*416"):
        store.head(named(store), 10)


NAMES = ["a.h5", ".a.h5", "x[1].h5", "x1.h5", "b/a.h5", "b/.a.h5", ".b/a.h5", "b/c/a.h5", "b/c/.d/a.h5"]
NAMES += ["^a", "]x", "-x"]
PATTERNS = ["*", "*.h5", ".*", "**", "**/*", "**/*.h5", "b/**", "*/a.h5", "?a.h5", "[.]a.h5", "x[[]1].h5", "x[!1].h5"]
PATTERNS += ["[]]x", "[!]", "[^a]a", "[!a]*", "[-]x", "b/**/a.h5", "**.h5", ".b/*", "[!]]x", "x[", "[a&&b]*", "[~~a]*"]
PATTERNS += ["-x/**", "*/**", "**/**", "**/c/**", "[b-a]", "x[/]1"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_on_a_disk(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [name for name in NAMES if re.fullmatch(stores_module.pattern_as_regex(pattern), name)]
    assert set(found) == set(filter(os.path.isfile, glob.glob(pattern, recursive=True)))


def test_a_name_with_brackets_is_found_as_on_a_disk_and_a_pattern_without_matches_gives_a_hint(server, s3, tmp_path):
    for name in ("x[1].h5", "x1.h5", "y1.h5"):
        (tmp_path / "bucket" / name).write_bytes(DATA)
    store = ObjectStore("s3://bucket", s3)
    for pattern, name in (("x[1].h5", "x[1].h5"), ("x[[]1].h5", "x[1].h5"), ("y[1].h5", "y1.h5")):
        assert store.matching(f"s3://bucket/{pattern}", lambda call: call()) == [f"s3://bucket/{name}"]
    with pytest.raises(MissingError, match=r"check the pattern; a bracket that is part of a name is written \[\[\]"):
        store.matching("s3://bucket/z[1].h5", lambda call: call())
    vars(store).clear()
