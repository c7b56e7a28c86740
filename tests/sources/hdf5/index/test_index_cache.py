"""Cached indexes: the same values with and without them, whatever happened to them meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import pickle
import shutil
import stat
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.sources.parts import parts_of

from lit_async_data import HDF5Source
from lit_async_data.errors import ChangedError, ConfigError
from lit_async_data.sources.hdf5.index import cache as index_cache
from lit_async_data.sources.hdf5.index import format as index_file
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.index.format import Columns, IndexKey
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.local_files import cache_files, file_times

VALUES = np.arange(20 * 6, dtype="i4").reshape(20, 6)


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    """The user's cache folder; small files count as large and new ones as old, since no program can set their ctime."""
    monkeypatch.setattr(index_cache, "FEWEST_CHUNKS", 2)
    monkeypatch.setattr(file_times, "RECENT_NS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "lit_async_data"


@pytest.fixture(params=["read", "mapped"])
def mapped(request, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0 if request.param == "mapped" else 10**6)
    return request.param == "mapped"


@pytest.fixture
def built(monkeypatch):
    """One entry for each time that an index was built."""
    built = []
    once = index.columns_of
    monkeypatch.setattr(index, "columns_of", lambda dataset: built.append(dataset.name) or once(dataset))
    return built


def age(path, seconds=100):
    """Sets the mtime back, as if the file had been written a while ago."""
    now = os.stat(path).st_mtime_ns
    os.utime(path, ns=(now, now - seconds * 10**9))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").mkdir()
    path = str(tmp_path / "data" / "x.h5")
    write(path, VALUES)
    return path


def write(path, values, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(4, 6), maxshape=(None, 6), compression="gzip", **options)
    age(path)


def source_of(path, fields=("data",), **options):
    return HDF5Source(path, list(fields), **{"index_cache": "beside"} | options)


def index_of(path, index_cache="beside"):
    (part,) = parts_of(path, ["data"], index_cache=index_cache)
    return part.fields["data"].stored.index


def opened(path, **options):
    """All samples, read by the index."""
    source = source_of(path, **options)
    assert source.chunks.reading == "decoded"
    return values(source)


def values(source):
    out = np.empty((len(source), 6), "i4")
    try:
        source.read_into(np.arange(len(source)), {"data": out})
    finally:
        source.close()
    return out


def beside(path):
    return sorted(name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path))


def kept(path):
    (name,) = beside(path)
    return os.path.join(os.path.dirname(path), name)


def key_of(path):
    with h5py.File(path) as file:
        return IndexKey.of(file["data"])


def refuse(monkeypatch, *folders):
    """Folders that cannot be written to; permissions would not hold root back."""
    once = os.open

    def refusing(name, flags, *args, **options):
        if flags & os.O_CREAT and os.path.dirname(name) in map(str, folders):
            raise PermissionError(errno.EACCES, "no", name)
        return once(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)


# -- kept and found again ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mapped")
def test_the_second_opening_builds_nothing_and_reads_the_same(path, built):
    assert (opened(path) == VALUES).all()
    assert built == ["/data"]
    assert (opened(path) == VALUES).all()
    assert built == ["/data"]


def test_a_cached_index_has_the_columns_of_a_new_one(path, mapped):
    with h5py.File(path, "r+") as file:
        file["data"].resize((32, 6))  # chunks that are not there
    age(path)
    new = index_of(path, index_cache=False)
    source_of(path)
    old = index_of(path)
    for column in ("offsets", "sizes", "masks"):
        mine, other = getattr(old, column), getattr(new, column)
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()
        assert not mine.flags.writeable
    assert (old.offsets < 0).sum() == 3
    assert (old.cache_entry is not None) == mapped


def test_a_chunk_takes_16_bytes(path):
    opened(path)
    assert os.stat(kept(path)).st_size == len(key_of(path).head()) + 16 * 5 + 4


def test_the_cache_file_says_what_it_is(path):
    opened(path)
    text = Path(kept(path)).read_bytes()[: len(key_of(path).head())].decode()
    assert text.startswith("lit_async_data: an index of chunks, version 2; may be deleted\n")
    assert '"name": "/data"' in text
    assert len(text) % 64 == 0


def test_a_glob_over_everything_does_not_match_the_cache_file(path):
    opened(path)
    assert HDF5Source(os.path.dirname(path) + "/*", ["data"]).paths == [path]


def test_each_dataset_has_its_own_index(path, built):
    with h5py.File(path, "r+") as file:
        file.create_dataset("other", data=VALUES + 1, chunks=(2, 6))
    age(path)
    for _ in range(2):
        source = source_of(path, ["data", "other"])
        out = {name: np.empty((len(source), 6), "i4") for name in ("data", "other")}
        source.read_into(np.arange(len(source)), out)
        source.close()
        assert (out["data"] == VALUES).all()
        assert (out["other"] == VALUES + 1).all()
    assert built == ["/data", "/other"]
    assert len(beside(path)) == 2


def test_links_share_the_index_of_the_data(path, built, tmp_path):
    os.symlink(path, tmp_path / "link.h5")
    opened(path)
    assert (opened(str(tmp_path / "link.h5")) == VALUES).all()
    assert len(built) == len(beside(path)) == 1


def test_an_index_beside_the_data_moves_with_it(path, built, tmp_path):
    opened(path)
    os.rename(os.path.dirname(path), tmp_path / "moved")
    assert (opened(str(tmp_path / "moved" / "x.h5")) == VALUES).all()
    assert len(built) == 1


@pytest.mark.parametrize("name", ["x" * 252 + ".h5", "ä" * 120 + ".h5"])
def test_the_longest_file_name_is_cached_too(path, name, built):
    long = os.path.join(os.path.dirname(path), name[-250:] if name.isascii() else name)
    os.rename(path, long)
    opened(long)
    opened(long)
    assert len(built) == 1


def test_whoever_may_read_the_data_may_read_its_index(path):
    os.chmod(path, 0o640)
    umask = os.umask(0o022)
    try:
        opened(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat(kept(path)).st_mode) == 0o640


# -- nothing is left where nothing is asked for ------------------------------------------------------------------------


def test_the_index_of_a_small_file_is_not_cached(path, monkeypatch, user_cache):
    monkeypatch.setattr(index_cache, "FEWEST_CHUNKS", 6)
    opened(path)
    assert beside(path) == []
    assert not user_cache.exists()


def test_a_disabled_cache_writes_and_reads_nothing(path, built, user_cache):
    opened(path, index_cache=False)
    assert beside(path) == []
    assert not user_cache.exists()
    opened(path)
    opened(path, index_cache=False)
    assert len(built) == 3


def test_the_index_of_a_file_that_has_just_changed_is_not_cached_yet(path, monkeypatch):
    monkeypatch.setattr(file_times, "RECENT_NS", 2 * 10**9)
    now = os.stat(path).st_ctime_ns  # its time of writing was set back
    monkeypatch.setattr(file_times.time, "time_ns", lambda: now + 10**9)
    opened(path)
    assert beside(path) == []
    monkeypatch.setattr(file_times.time, "time_ns", lambda: now + 3 * 10**9)
    opened(path)
    assert len(beside(path)) == 1


def test_an_index_that_fails_verification_is_not_cached(path):
    with h5py.File(path, "r+") as file:  # an edge chunk that cannot be decoded
        file["data"].resize((18, 6))
        file["data"].id.write_direct_chunk((16, 0), b"?" * 96)
    age(path)
    assert index_of(path) is None
    assert beside(path) == []


def test_the_index_of_a_file_that_changes_meanwhile_is_not_cached(path, monkeypatch):
    once = index.columns_of

    def changing(dataset):
        columns = once(dataset)
        age(path)
        return columns

    monkeypatch.setattr(index, "columns_of", changing)
    source = source_of(path)
    assert beside(path) == []
    with pytest.raises(ChangedError):
        values(source)


# -- where -------------------------------------------------------------------------------------------------------------


def test_auto_is_the_users_folder_and_nothing_is_left_beside_the_data(path, built, user_cache):
    assert (opened(path, index_cache="auto") == VALUES).all()
    assert beside(path) == []
    (name,) = os.listdir(user_cache)
    assert name.startswith("x.h5.")
    assert stat.S_IMODE(user_cache.stat().st_mode) == 0o700
    assert (values(HDF5Source(path, ["data"])) == VALUES).all()
    assert len(built) == 1


def test_files_of_the_same_name_have_different_indexes_in_the_users_folder(path, user_cache, tmp_path):
    (tmp_path / "more").mkdir()
    other = shutil.copy2(path, tmp_path / "more" / "x.h5")
    opened(path, index_cache="auto")
    opened(str(other), index_cache="auto")
    assert len(os.listdir(user_cache)) == 2


@pytest.fixture
def nowhere(path, monkeypatch, user_cache):
    refuse(monkeypatch, os.path.dirname(path), user_cache)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("where", ["auto", "beside"])
def test_without_a_writable_folder_it_is_built_each_time_and_logged_once(path, built, caplog, where):
    shutil.copy2(path, path.replace("x.h5", "y.h5"))
    both = os.path.dirname(path) + "/*.h5"
    with caplog.at_level(logging.INFO, "lit_async_data"):
        source = source_of(both, index_cache=where)
    assert (values(source) == np.concatenate([VALUES, VALUES])).all()
    assert len(built) == 2
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "so it is built at every opening" in record.message
    assert "give another folder, or False" in record.message


def used_at(file, seconds):
    os.utime(file, (seconds, seconds))


def test_the_least_recently_used_files_of_the_users_folder_are_removed(path, monkeypatch, user_cache):
    """The third does not fit with the others. The first was used since the second was."""
    opened(path, index_cache="auto")
    (first,) = user_cache.iterdir()
    second, foreign = user_cache / f"second{index_cache.EXTENSION}", user_cache / "notes.txt"
    for other in (second, foreign):
        shutil.copy(first, other)
    used_at(second, 2000)
    used_at(first, 1000)
    used_at(foreign, 500)
    opened(path, index_cache="auto")  # marks it as used
    assert first.stat().st_mtime > 10**9
    monkeypatch.setattr(cache_files, "MOST_BYTES", 2 * first.stat().st_size + 100)
    with h5py.File(path.replace("x.h5", "z.h5"), "w") as file:
        file.create_dataset("data", data=VALUES, chunks=(4, 6), compression="gzip")
    opened(path.replace("x.h5", "z.h5"), index_cache="auto")
    (third,) = set(user_cache.iterdir()) - {first, foreign}
    assert third.name.startswith("z.h5.")


def test_an_index_larger_than_the_limit_of_the_users_folder_is_not_cached(path, monkeypatch, user_cache, caplog):
    monkeypatch.setattr(index_cache, "MOST_BYTES", 100)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        opened(path, index_cache="auto")
    assert not user_cache.exists()
    assert "the user's cache folder may hold 100" in caplog.text


def test_what_a_killed_process_left_is_removed_after_a_day(user_cache):
    user_cache.mkdir(parents=True)
    old, new = user_cache / ".a.chunks-new", user_cache / ".b.chunks-new"
    for file in (old, new):
        file.write_bytes(b"x")
    used_at(old, time.time() - cache_files.LEFT_BEHIND_S - 60)
    cache_files.trim(str(user_cache), ".chunks")
    assert list(user_cache.iterdir()) == [new]


def test_two_processes_may_trim_the_folder_at_once(user_cache, monkeypatch):
    """1. A has listed the files. 2. B removes one. 3. A removes what it has listed."""
    user_cache.mkdir(parents=True)
    for number in range(3):
        (user_cache / f"{number}.chunks").write_bytes(b"x" * 10)
        used_at(user_cache / f"{number}.chunks", 1000 + number)
    once = os.unlink
    monkeypatch.setattr(os, "unlink", lambda file: (once(file), once(file)))
    cache_files.trim(str(user_cache), ".chunks", 10)
    assert [file.name for file in user_cache.iterdir()] == ["2.chunks"]


def test_on_a_network_file_system_an_index_is_read_and_not_mapped(path, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    opened(path)
    assert index_file.read_columns(kept(path), key_of(path)).mapped_from == kept(path)
    for kind in ("nfs4", "fuse.sshfs", "lustre", None):
        monkeypatch.setattr(cache_files, "file_system", lambda _, kind=kind: kind)
        columns = index_file.read_columns(kept(path), key_of(path))
        assert columns.mapped_from is None
        assert len(columns.offsets) == 5
    assert (opened(path) == VALUES).all()


def test_the_kind_of_a_file_system_is_that_of_its_mount(tmp_path):
    with open("/proc/self/status") as info:
        assert cache_files.file_system(info.fileno()) == "proc"
        assert not cache_files.on_network(info.fileno())


@pytest.mark.parametrize("home", ["relative", ""])
def test_a_relative_cache_folder_is_ignored(path, monkeypatch, home, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda name: name)
    assert (opened(path, index_cache="auto") == VALUES).all()
    assert os.listdir() == []


def test_a_folder_can_be_chosen(path, built, tmp_path, user_cache, monkeypatch):
    (tmp_path / "chosen").mkdir()
    monkeypatch.chdir(tmp_path)
    opened(path, index_cache="chosen")
    opened(path, index_cache=tmp_path / "chosen")
    assert len(built) == len(os.listdir("chosen")) == 1
    assert beside(path) == []
    assert not user_cache.exists()


@pytest.mark.parametrize("wrong", [None, True, 3, "atuo", b"x"])
def test_other_values_of_index_cache_are_refused(path, wrong):
    with pytest.raises(ConfigError, match=r"^index_cache: .* False$"):
        HDF5Source(path, ["data"], index_cache=wrong)


# -- stale -------------------------------------------------------------------------------------------------------------


def touched(path):
    age(path, 5)
    return VALUES


def rewritten(path):
    write(path, VALUES + 1)
    return VALUES + 1


def replaced(path):
    """By a copy of other values, of the same size and time."""
    was = os.stat(path)
    write(path + "2", VALUES[::-1])
    os.utime(path + "2", ns=(was.st_mtime_ns, was.st_mtime_ns))
    os.replace(path + "2", path)
    return VALUES[::-1]


def appended(path):
    with h5py.File(path, "r+") as file:
        file["data"].resize((24, 6))
        file["data"][20:] = 7
    age(path)
    return np.concatenate([VALUES, np.full((4, 6), 7)])


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("change", [touched, rewritten, replaced, appended])
def test_the_index_of_a_changed_file_is_rebuilt_and_the_log_says_so(path, built, caplog, change):
    opened(path)
    expected = change(path)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        assert (opened(path) == expected).all()
    assert len(built) == 2
    assert f"{path}:/data: the cached index in {kept(path)} is unusable" in caplog.text
    assert "it describes another state of the data file" in caplog.text
    assert (opened(path) == expected).all()
    assert len(built) == 2


@pytest.mark.parametrize("change", [lambda path: os.chmod(path, 0o640), lambda path: os.link(path, path + "2")])
def test_a_change_of_the_ctime_alone_discards_the_index(path, built, caplog, change):
    """It may have been written to, and its time set back."""
    opened(path)
    change(path)
    with caplog.at_level(logging.WARNING, "lit_async_data"):
        assert (opened(path) == VALUES).all()
    assert len(built) == 2
    assert not caplog.records


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(IndexKey) if field.compare])
def test_each_part_of_the_key_counts(path, field):
    opened(path)
    key = key_of(path)
    value = getattr(key, field)
    other = {int: 1, str: "other", tuple: (5, 6)}[type(value)]
    with pytest.raises(ValueError, match="another state"):
        index_file.read_columns(kept(path), dataclasses.replace(key, **{field: other}))


def test_a_copy_of_the_same_size_and_time_is_another_file(path):
    shutil.copy2(path, path + "2")
    mine = key_of(path)
    copy = dataclasses.replace(key_of(path + "2"), mtime_ns=mine.mtime_ns, ctime_ns=mine.ctime_ns)
    assert copy.head() != mine.head()
    assert dataclasses.replace(copy, inode=mine.inode).head() == mine.head()


def test_an_index_of_another_version_is_rebuilt(path, built, monkeypatch):
    opened(path)
    monkeypatch.setattr(index_file, "VERSION", 3)
    opened(path)
    opened(path)
    assert len(built) == 2


# -- of others ---------------------------------------------------------------------------------------------------------

STRANGER = 65534


def given_away(monkeypatch, file):
    """As if a file belonged to somebody else."""
    number, once = os.stat(file).st_ino, cache_files.owner
    monkeypatch.setattr(cache_files, "owner", lambda status: STRANGER if status.st_ino == number else once(status))


def really_given_away(_, file):
    os.chown(file, STRANGER, STRANGER)


WAYS = [given_away] + ([really_given_away] if os.geteuid() == 0 else [])


def forged(path):
    """An index with a valid head and checksum, in which all chunks but the first and the last are permuted."""
    columns = index_file.read_columns(kept(path), key_of(path))
    order = np.array([0, 2, 3, 1, 4])
    os.remove(kept(path))
    IndexCache("beside").store(
        key_of(path), columns._replace(offsets=columns.offsets[order], sizes=columns.sizes[order])
    )
    return kept(path)


@pytest.mark.parametrize("give", WAYS)
def test_an_index_of_another_user_is_not_trusted(path, built, caplog, give, monkeypatch):
    monkeypatch.setattr(index, "PROBES", 2)  # without random ones: it would pass
    opened(path)
    file = forged(path)
    give(monkeypatch, file)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        assert (opened(path) == VALUES).all()
    assert len(built) == 2
    assert f"{file} is not trusted: it belongs to user {STRANGER}" in caplog.text
    assert len(beside(path)) == 2  # the foreign one stays, and ours has another name
    assert (opened(path) == VALUES).all()
    assert len(built) == 2


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_an_index_that_others_may_write_to_is_not_trusted_and_replaced(path, built, caplog, mode):
    opened(path)
    os.chmod(kept(path), mode)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        assert (opened(path) == VALUES).all()
    assert f"others may write to it: its mode is {mode:#o}" in caplog.text
    assert len(built) == 2
    assert stat.S_IMODE(os.stat(kept(path)).st_mode) & 0o022 == 0


def test_the_owner_of_the_data_is_trusted_unless_there_are_several(path, monkeypatch, tmp_path):
    file = tmp_path / "kept"
    file.write_bytes(b"x")
    given_away(monkeypatch, file)
    cache_files.opened(str(file), {STRANGER}).close()
    with pytest.raises(cache_files.ForeignError, match=f"user {STRANGER}"):
        cache_files.opened(str(file), {STRANGER, 1000})


def test_files_of_others_in_a_shared_folder_stop_nobody(path, built, monkeypatch, tmp_path):
    (tmp_path / "chosen").mkdir()
    opened(path, index_cache=tmp_path / "chosen")
    (squatter,) = (tmp_path / "chosen").iterdir()
    given_away(monkeypatch, squatter)
    before = squatter.read_bytes()
    for _ in range(2):
        opened(path, index_cache=tmp_path / "chosen")
    assert len(built) == 2
    assert squatter.read_bytes() == before
    assert len(list((tmp_path / "chosen").iterdir())) == 2


def test_probed_chunks_are_random(path, monkeypatch):
    many = np.resize(VALUES, (4 * 2000, 6))
    write(path, many)
    monkeypatch.setattr(FileIdentity, "with_pieces", lambda self, *_: self)  # which reads pieces of its own
    found, once = [], os.pread
    monkeypatch.setattr(index.system, "pread", lambda *asked: found[-1].append(asked[1:]) or once(*asked))
    for _ in range(3):
        found.append([])
        source_of(path)
    drawn = {tuple(sorted(places)) for places in found}
    assert len(drawn) == 3  # of 2000 chunks, 3 are drawn each time


# -- damaged -----------------------------------------------------------------------------------------------------------


def test_every_changed_byte_is_detected(path, mapped):
    opened(path)
    file, key = kept(path), key_of(path)
    content = Path(file).read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        Path(file).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|another state"):
            index_file.read_columns(file, key)
    Path(file).write_bytes(content)
    assert index_file.read_columns(file, key).mapped_from == (file if mapped else None)


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:30],
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"\0",
        lambda content: b"\0" * len(content),
        lambda content: content[:-50] + b"\0" * 50,
    ],
)
def test_a_damaged_index_is_rebuilt_with_a_warning(path, built, caplog, damage):
    opened(path)
    content = Path(kept(path)).read_bytes()
    Path(kept(path)).write_bytes(damage(content))
    assert (opened(path) == VALUES).all()
    assert len(built) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "it is damaged" in record.message
    assert Path(kept(path)).read_bytes() == content


@pytest.mark.parametrize("column", ["offsets", "sizes", "masks"])
@pytest.mark.parametrize("value", [-2, 1, 10**6])
def test_an_intact_but_wrong_index_is_rebuilt(path, built, caplog, column, value):
    """As if the file had been replaced by one with the same key."""
    opened(path)
    key = key_of(path)
    columns = index_file.read_columns(kept(path), key)
    false = getattr(columns, column).copy()
    false[0] = value % 2**32 if column != "offsets" else value
    os.remove(kept(path))
    IndexCache("beside").store(key, columns._replace(**{column: false}))
    assert (opened(path) == VALUES).all()
    assert len(built) == 2
    assert "the cached index of chunks is wrong; building it again" in caplog.text


def test_a_plausible_index_is_still_probed(path, built):
    opened(path)
    key = key_of(path)
    columns = index_file.read_columns(kept(path), key)
    os.remove(kept(path))
    IndexCache("beside").store(
        key, columns._replace(offsets=columns.offsets[::-1].copy(), sizes=columns.sizes[::-1].copy())
    )
    assert (opened(path) == VALUES).all()
    assert len(built) == 2


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_only_regular_files_are_read_and_links_are_not_written_through(path, what, tmp_path):
    opened(path)
    name = kept(path)
    shutil.copy(name, tmp_path / "elsewhere")
    os.remove(name)
    {
        "link": lambda: os.symlink(tmp_path / "elsewhere", name),
        "folder": lambda: os.mkdir(name),
        "pipe": lambda: os.mkfifo(name),
    }[what]()
    before = os.stat(tmp_path / "elsewhere")
    assert (opened(path) == VALUES).all()
    assert os.stat(tmp_path / "elsewhere").st_mtime_ns == before.st_mtime_ns
    if what == "folder":
        assert os.path.isdir(name)
    else:
        assert stat.S_ISREG(os.lstat(name).st_mode)


def test_a_full_disk_leaves_nothing_behind(path, monkeypatch, user_cache):
    class Full:
        def __init__(self, file):
            self.file, self.left, self.fileno = file, 100, file.fileno

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(bytes(data)[: self.left])
            raise OSError(errno.ENOSPC, "no space left")

    made = []

    def full(path, mode, opener):
        made.append(Full(open(path, mode, opener=opener)))  # noqa: SIM115
        return made[-1]

    monkeypatch.setattr(index_file, "open", full, raising=False)
    assert (opened(path) == VALUES).all()
    assert made
    assert beside(path) == []
    assert not user_cache.exists()


# -- several at once ---------------------------------------------------------------------------------------------------


def test_two_processes_may_write_the_same_index(path, built, monkeypatch):
    """1. A has written its file. 2. B writes and names its own. 3. A names its own."""
    once, meanwhile = os.replace, []

    def replacing(new, name):
        if not meanwhile:
            meanwhile.append("B")
            assert (opened(path) == VALUES).all()
            assert beside(path) != [os.path.basename(name)]  # A's is there too, under another name
        once(new, name)

    monkeypatch.setattr(os, "replace", replacing)
    assert (opened(path) == VALUES).all()
    assert len(built) == 2
    assert index_file.read_columns(kept(path), key_of(path)).sizes.all()


def test_a_file_with_the_same_index_is_not_replaced(path):
    """Over NFS, a file that is replaced is gone for those on other machines who have mapped it."""
    opened(path)
    key, before = key_of(path), os.stat(kept(path))
    IndexCache("beside").store(key, index_file.read_columns(kept(path), key))
    assert os.stat(kept(path)).st_ino == before.st_ino


def test_a_map_outlives_the_file_it_was_made_from(path, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    source = source_of(path)
    os.remove(kept(path))
    assert (values(source) == VALUES).all()


def test_a_pickled_source_maps_the_same_file(path, built, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    source = pickle.loads(pickle.dumps(source_of(path)))
    assert kept(path) in Path("/proc/self/maps").read_text()
    assert (values(source) == VALUES).all()
    assert len(built) == 1
    del source
    assert kept(path) not in Path("/proc/self/maps").read_text()


def test_a_pickle_does_not_grow_with_a_mapped_index(path, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    small = len(pickle.dumps(source_of(path)))
    write(path, np.resize(VALUES, (2000, 6)))
    assert len(pickle.dumps(source_of(path))) < small + 100


def test_without_its_file_a_pickled_index_is_rebuilt(path, built, monkeypatch):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    pickled = pickle.dumps(source_of(path))
    os.remove(kept(path))
    assert (values(pickle.loads(pickled)) == VALUES).all()
    assert len(built) == 2


@pytest.mark.parametrize("change", [touched, os.remove])
def test_without_its_file_a_pickled_index_of_changed_data_is_an_error(path, monkeypatch, change):
    monkeypatch.setattr(index_file, "MOST_READ_BYTES", 0)
    pickled = pickle.dumps(source_of(path))
    os.remove(kept(path))
    change(path)
    with pytest.raises(ChangedError, match=rf"{path}:/data: has changed since .* build the source again"):
        pickle.loads(pickled)


def test_an_index_in_memory_is_pickled_as_it_is(path, built):
    source = pickle.loads(pickle.dumps(source_of(path, index_cache=False)))
    assert (values(source) == VALUES).all()
    assert len(built) == 1


@pytest.mark.usefixtures("mapped")
def test_a_fork_reads_by_the_index_of_its_parent(path, built):
    source = source_of(path)
    child = os.fork()
    if not child:
        os._exit(0 if (values(source) == VALUES).all() and len(built) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- many --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ten_million_chunks_take_at_most_24_bytes_each(path, tmp_path):
    many = 10**7
    key = dataclasses.replace(key_of(path), shape=(many, 6), chunk=(1, 6))
    offsets = np.random.default_rng(0).permutation(many)
    columns = Columns(offsets, np.full(many, 24, "u4"), np.zeros(many, "u4"))
    IndexCache(tmp_path).store(key, columns)
    found = IndexCache(tmp_path).load(key)
    assert found is not None
    assert os.stat(found.mapped_from).st_size <= 24 * many
    assert all((mine == other).all() for mine, other in zip(found[:3], columns[:3]))
    os.remove(found.mapped_from)
