"""Columns of large tables, kept in a folder: the same table, or none."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import threading

import numpy as np
import pytest
from support.sources.oracle import read

from lit_async_data import ManifestSource
from lit_async_data.errors import ChangedError, ConfigError, ManifestError, MissingError

pa = pytest.importorskip("pyarrow", reason="pip install 'lit-async-data[manifest]'")
pq = pytest.importorskip("pyarrow.parquet")
# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pytest.importorskip("pyarrow.csv").read_csv(io.BytesIO(b"a\n1\n"))

from lit_async_data.sources.local_files import cache_files, file_times  # noqa: E402
from lit_async_data.sources.manifest.table import reading, table_cache  # noqa: E402
from lit_async_data.sources.manifest.table import table_reader as given  # noqa: E402

COUNT = 30
COLUMNS = {
    "id": [f"{number:03d}" for number in range(COUNT)],
    "species": [["owl", "auk", "emu"][number % 3] for number in range(COUNT)],
    "size": [None if number == 7 else number / 4 for number in range(COUNT)],
    "number": list(range(COUNT)),
}
FIELDS = {"y": "species", "n": "number", "s": {"name": "size", "null": "ignore"}}


@pytest.fixture(autouse=True)
def any_table_is_large(monkeypatch):
    monkeypatch.setattr(table_cache, "FEWEST_ROWS", 1)
    monkeypatch.setattr(file_times, "RECENT_NS", 0)


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def tables_read(monkeypatch):
    """How often a table was read from its files."""
    found, of = [], reading.read_table
    monkeypatch.setattr(
        "lit_async_data.sources.manifest.table.table.read_table", lambda *asked: found.append(asked[1]) or of(*asked)
    )
    return found


def written(folder, kind="csv", name="t", columns=None):
    path = folder / f"{name}.{kind}"
    table = pa.table(COLUMNS if columns is None else columns)
    if kind == "csv":
        pa.csv.write_csv(table, path)
    elif kind == "parquet":
        pq.write_table(table.set_column(1, "species", table["species"].dictionary_encode()), path)
    else:
        rows = table.to_pandas().to_json(orient="records", lines=True) if kind == "jsonl" else ""
        path.write_text(rows)
    return path


def values(source):
    return {key: array.tolist() for key, array in read(source, np.arange(len(source))).items()}


def same(one, other):
    return repr(values(one)) == repr(values(other))  # NaN is NaN


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("filters", [None, [["number", ">", 4]]])
def test_what_was_kept_is_the_same_table_and_is_not_read_again(tmp_path, cache, tables_read, kind, filters):
    if kind == "jsonl":
        pytest.importorskip("pandas")
    path = written(tmp_path, kind)
    options = {"id": "id", "filters": filters}
    plain = ManifestSource(path, FIELDS, **options)
    first = ManifestSource(path, FIELDS, **options, table_cache=cache)
    before = len(tables_read)
    again = ManifestSource(path, FIELDS, **options, table_cache=cache)
    assert len(tables_read) == before
    for source in (first, again):
        assert same(source, plain)
        assert source.locate([3]) == plain.locate([3])
        assert source.spec["y"].classes == ("auk", "emu", "owl")
    assert len(list(cache.iterdir())) == 1


def test_it_is_mapped_and_no_file_stays_open(tmp_path, cache):
    path = written(tmp_path)
    open_before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    source = ManifestSource(path, FIELDS, id="id", table_cache=cache)
    if open_before is None:
        pytest.skip("this system does not tell what is mapped")
    assert str(cache) in pathlib.Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) <= len(open_before) + 1
    assert same(pickle.loads(pickle.dumps(source)), source)


def test_several_files_and_rows_that_errors_name(tmp_path, cache, tables_read):
    written(tmp_path, name="a")
    written(tmp_path, name="b", columns={**COLUMNS, "id": [f"b{number}" for number in range(COUNT)]})
    options = {"id": "id", "filters": [["number", "!=", 2]], "table_cache": cache}
    ManifestSource(tmp_path / "*.csv", FIELDS, **options)
    before = len(tables_read)
    source = ManifestSource(tmp_path / "*.csv", FIELDS, **options)
    assert len(tables_read) == before
    place = source.locate([30])[0]
    assert (place.file, place.row, place.id) == (str(tmp_path / "b.csv"), 1, "b1")


def test_other_columns_filters_and_states_are_other_tables(tmp_path, cache, tables_read):
    path = written(tmp_path)
    ManifestSource(path, {"y": "species"}, table_cache=cache)
    ManifestSource(path, {"y": "number"}, table_cache=cache)
    ManifestSource(path, {"y": "number"}, filters=[["number", "<", 9]], table_cache=cache)
    assert len(tables_read) == len(list(cache.iterdir())) == 3
    changed = {**COLUMNS, "number": [number + 1 for number in range(COUNT)]}
    written(tmp_path, columns=changed)
    os.utime(path, ns=(1, 1))
    assert values(ManifestSource(path, {"y": "number"}, table_cache=cache))["y"] == changed["number"]
    assert len(tables_read) == 4


@pytest.mark.parametrize("damage", ["a bit", "the end", "everything", "another table"])
def test_what_is_damaged_is_read_anew_and_said(tmp_path, cache, damage, caplog):
    path = written(tmp_path)
    ManifestSource(path, FIELDS, table_cache=cache)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    if damage == "a bit":
        place = whole.index(b"auk")
        kept.write_bytes(whole[:place] + b"Auk" + whole[place + 3 :])
    elif damage == "another table":
        ManifestSource(path, {"y": "number"}, table_cache=cache)
        (other,) = set(cache.iterdir()) - {kept}
        kept.write_bytes(other.read_bytes())
    else:
        kept.write_bytes(whole[:-1] if damage == "the end" else b"")
    caplog.clear()
    assert same(ManifestSource(path, FIELDS, table_cache=cache), ManifestSource(path, FIELDS))
    assert re.search(r"t\.csv: .* cannot be used .*; reading the table again", caplog.text)
    caplog.clear()
    assert same(ManifestSource(path, FIELDS, table_cache=cache), ManifestSource(path, FIELDS))
    assert not caplog.text  # what was damaged has been replaced


def test_a_table_of_another_time_of_change_is_another(tmp_path, cache):
    path = written(tmp_path)
    before = os.stat(path)
    assert ManifestSource(path, ["number"], table_cache=cache).column("number")[3] == 3
    text = path.read_text()
    path.write_text(text.replace('"owl",0.25,1', '"owl",0.25,9').replace('"auk",0.25,1', '"auk",0.25,9'))
    assert len(text) == path.stat().st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    assert ManifestSource(path, ["number"], table_cache=cache).column("number")[1] == 9


def test_a_table_that_was_changed_a_moment_ago_is_not_kept_yet(tmp_path, cache, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setattr(file_times, "RECENT_NS", 2 * 10**9)
    now = [os.stat(path).st_mtime_ns + 10**9]
    monkeypatch.setattr(file_times.time, "time_ns", lambda: now[0])
    ManifestSource(path, FIELDS, table_cache=cache)
    assert not list(cache.iterdir())
    now[0] += 10**9
    ManifestSource(path, FIELDS, table_cache=cache)
    assert len(list(cache.iterdir())) == 1


def test_other_rights_are_no_other_table(tmp_path, cache):
    path = written(tmp_path)
    source = ManifestSource(path, {"n": "number"})
    path.chmod(0o600)
    os.link(path, tmp_path / "beside")
    assert source.column("species").tolist()[:2] == source.column("species").tolist()[3:5]


def test_what_cannot_be_opened_now_is_not_thrown_away(tmp_path, cache, monkeypatch, caplog):
    path = written(tmp_path)
    ManifestSource(path, FIELDS, table_cache=cache)
    (kept,) = cache.iterdir()
    os.link(kept, tmp_path / "held")  # so that its number is given to no other

    def none_left(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as context:
        context.setattr(table_cache, "read_batch", none_left)
        ManifestSource(path, FIELDS, table_cache=cache)
    assert "cannot be used" in caplog.text
    assert [os.path.samefile(each, tmp_path / "held") for each in cache.iterdir()] == [True]


def test_columns_of_several_files_are_for_those_who_may_read_all(tmp_path, cache):
    for name, mode in (("a", 0o644), ("b", 0o440)):
        written(tmp_path, name=name).chmod(mode)
    ManifestSource(tmp_path / "*.csv", {"n": "number"}, table_cache=cache)
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o440


def test_a_link_to_no_table_is_named(tmp_path):
    (tmp_path / "x.csv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MissingError, match=r"x\.csv: cannot be opened"):
        ManifestSource(tmp_path / "*.csv", {"n": "number"})


def test_a_table_in_memory_is_not_kept(cache, caplog):
    ManifestSource(pa.table(COLUMNS), FIELDS, table_cache=cache)
    assert not list(cache.iterdir())
    assert not caplog.text


def test_whoever_may_read_the_table_may_read_its_columns(tmp_path, cache):
    path = written(tmp_path)
    path.chmod(0o640)
    ManifestSource(path, FIELDS, table_cache=cache)
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kept", [False, True])
def test_a_table_that_is_written_to_while_it_is_read_is_refused(tmp_path, cache, monkeypatch, kept):
    path, of = written(tmp_path), given.Table.of

    def slowly(*asked):
        found = of(*asked)
        os.utime(path, ns=(2, 2))
        return found

    monkeypatch.setattr(given.Table, "of", slowly)
    with pytest.raises(ChangedError, match=r"t.csv: changed since the source was built"):
        ManifestSource(path, FIELDS, table_cache=cache if kept else None)
    assert not list(cache.iterdir())


def test_where_nothing_can_be_kept_the_table_is_used_as_it_was_read(tmp_path, cache, monkeypatch, caplog):
    path = written(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert same(ManifestSource(path, FIELDS, table_cache=cache), ManifestSource(path, FIELDS))
    assert "cannot be cached" in caplog.text
    assert not list(cache.iterdir())


STRANGER = 65534


def given_away(monkeypatch, file):
    """As if a file belonged to somebody else."""
    number, once = file.stat().st_ino, cache_files.owner

    def owner(status):
        return STRANGER if status.st_ino == number else once(status)

    monkeypatch.setattr(cache_files, "owner", owner)
    monkeypatch.setattr(table_cache, "owner", owner)


def really_given_away(_, file):
    os.chown(file, STRANGER, STRANGER)


def forged(path, cache):
    """Kept columns with a right head and sum, and the rows backwards; and what the true ones are."""
    true = values(ManifestSource(path, {"n": "number"}, table_cache=cache))
    (kept,) = cache.iterdir()
    batch = table_cache.read_batch(str(kept), table_cache.TableKey({str(path): (0, 0, 0, 0)}, (), None))
    kept.unlink()
    table_cache.write_batch_file(str(kept), batch.take(pa.array(range(COUNT)[::-1])), 0o644)
    assert values(ManifestSource(path, {"n": "number"}, table_cache=cache))["n"] == true["n"][::-1]
    return kept, true


@pytest.mark.parametrize("give", [given_away] + ([really_given_away] if os.geteuid() == 0 else []))
def test_columns_that_somebody_else_has_made_are_not_believed(tmp_path, cache, give, monkeypatch, tables_read):
    path = written(tmp_path)
    kept, true = forged(path, cache)
    give(monkeypatch, kept)
    content = kept.read_bytes()
    for _ in range(2):
        assert values(ManifestSource(path, {"n": "number"}, table_cache=cache)) == true
    assert kept.read_bytes() == content
    assert len(list(cache.iterdir())) == 2  # mine has another name
    assert len(tables_read) == 2


def test_columns_that_others_may_write_to_are_not_believed_and_replaced(tmp_path, cache, caplog):
    path = written(tmp_path)
    path.chmod(0o666)
    kept, true = forged(path, cache)
    assert kept.stat().st_mode & 0o022 == 0
    kept.chmod(0o664)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert values(ManifestSource(path, {"n": "number"}, table_cache=cache)) == true
    assert f"in {kept} are not trusted: others may write to it: its mode is 0o664" in caplog.text
    assert [file.stat().st_mode & 0o777 for file in cache.iterdir()] == [0o644]


def test_columns_behind_a_link_are_not_read(tmp_path, cache):
    path = written(tmp_path)
    kept, true = forged(path, cache)
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    assert values(ManifestSource(path, {"n": "number"}, table_cache=cache)) == true


def test_on_a_network_columns_are_copied_and_not_mapped(tmp_path, cache, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setattr(cache_files, "file_system", lambda _: "nfs4")
    for _ in range(2):
        source = ManifestSource(path, FIELDS, table_cache=cache)
        assert str(cache) not in pathlib.Path("/proc/self/maps").read_text()
    assert same(source, ManifestSource(path, FIELDS))


def test_small_tables_and_tables_in_memory_are_not_kept(tmp_path, cache, monkeypatch):
    ManifestSource(pa.table(COLUMNS), FIELDS, table_cache=cache)
    monkeypatch.setattr(table_cache, "FEWEST_ROWS", COUNT + 1)
    ManifestSource(written(tmp_path), FIELDS, table_cache=cache)
    assert not list(cache.iterdir())


def test_many_at_once_keep_one_file(tmp_path, cache):
    path, found, together = written(tmp_path), [], threading.Barrier(4)

    def build():
        together.wait(30)
        found.append(ManifestSource(path, FIELDS, id="id", table_cache=cache))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert all(same(source, found[0]) for source in found)
    assert len(list(cache.iterdir())) == 1


def test_errors_are_those_of_the_table(tmp_path, cache):
    path = written(tmp_path, columns={**COLUMNS, "id": ["same"] * COUNT})
    said = []
    for _ in range(2):
        with pytest.raises(ManifestError) as caught:
            ManifestSource(path, FIELDS, id="id", table_cache=cache)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("folder", ["there is none", 3, ""])
def test_what_is_no_folder_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"^table_cache: "):
        ManifestSource(written(tmp_path), FIELDS, table_cache=folder)
