"""Files that a table names: where they may lie, and never a wrong value."""

import errno
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.errors import ChangedError, FormatError, ManifestError, MissingError, SourceError
from lit_async_data.sources import local_files
from lit_async_data.sources.manifest import files as stored_file
from lit_async_data.sources.manifest.files import RootDirectory


def fetched(path, most_bytes):
    return stored_file.fetched(path, most_bytes, RootDirectory("/", allow_external=True))


def test_a_file_is_read_as_a_whole(tmp_path):
    path = str(tmp_path / "a.bin")
    for content in (b"", b"x", os.urandom(100_000)):
        (tmp_path / "a.bin").write_bytes(content)
        assert fetched(path, 100_000)[0] == content
    with pytest.raises(FormatError, match=r"a.bin: 100000 bytes, more than the limit of 99999"):
        fetched(path, 99_999)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), "/dev/zero"):
        with pytest.raises(FormatError, match=f"^{path}: not a file") as found:
            fetched(path, 10)
        assert found.value.file == path
    (tmp_path / "a").write_bytes(b"")
    for path in (str(tmp_path / "none"), str(tmp_path / "a" / "b")):
        with pytest.raises(MissingError, match=f"^{path}: no such file"):
            fetched(path, 10)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="loop: cannot be read"):
        fetched(str(tmp_path / "loop"), 10)


def test_files_are_not_handed_on_to_programs(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    flags, opened = [], os.open
    monkeypatch.setattr(os, "open", lambda path, given: flags.append(given) or opened(path, given))
    fetched(str(tmp_path / "a"), 10)
    assert flags[0] & os.O_CLOEXEC
    assert flags[0] & os.O_NONBLOCK


@pytest.fixture
def before_reading(monkeypatch):
    """Has a function called before each time that a file is read."""
    read = os.read

    def before(function):
        monkeypatch.setattr(os, "read", lambda *given: (function(), read(*given))[1])

    return before


def test_a_file_is_read_by_one_call_and_short_reads_are_put_together(tmp_path, monkeypatch, before_reading):
    path, read, reads = tmp_path / "a", os.read, []
    path.write_bytes(bytes(range(100)))
    os.utime(path, ns=(1, 1))
    before_reading(lambda: reads.append(1))
    assert (fetched(str(path), 100)[0], len(reads)) == (bytes(range(100)), 1)
    monkeypatch.setattr(os, "read", lambda number, most: read(number, min(most, 7)))
    assert fetched(str(path), 100)[0] == bytes(range(100))


def test_an_input_error_is_tried_again_once(tmp_path, monkeypatch, before_reading):
    (tmp_path / "a").write_bytes(b"abc")
    left = [1]

    def fails():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "gone")

    before_reading(fails)
    monkeypatch.setattr(local_files, "PAUSE_S", 0)
    assert fetched(str(tmp_path / "a"), 10)[0] == b"abc"
    left[0] = 2
    what = rf"a: cannot be read: \[Errno {errno.EIO}\] gone; the disk or the network failed, twice"
    with pytest.raises(SourceError, match=what):
        fetched(str(tmp_path / "a"), 10)


@pytest.mark.parametrize("change", [99, 101, 0, "other"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, before_reading, change):
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    os.utime(path, ns=(1, 1))

    def changing():
        if change == "other":  # and keeps its size
            with open(path, "r+b") as file:
                file.write(b"other")
        else:
            os.truncate(path, change)
            os.utime(path, ns=(1, 1))

    before_reading(changing)
    with pytest.raises(ChangedError, match="a: changed while it was read"):
        fetched(str(path), 1000)


def test_a_file_of_a_moment_ago_is_read_twice(tmp_path, monkeypatch, before_reading):
    """A write that goes on sets the time when it begins, and not again."""
    path, reads = tmp_path / "a", []
    path.write_bytes(bytes(100))
    when = path.stat().st_mtime_ns

    def writing():
        reads.append(1)
        with open(path, "r+b") as file:
            file.write(bytes([len(reads)]))
        os.utime(path, ns=(when, when))

    before_reading(writing)
    monkeypatch.setattr(stored_file.time, "time_ns", lambda: when + 10**9)
    with pytest.raises(ChangedError, match="a: changed while it was read"):
        fetched(str(path), 1000)
    reads.clear()
    for later in (3 * 10**9, -3 * 10**9):  # also where clocks disagree
        monkeypatch.setattr(stored_file.time, "time_ns", lambda later=later: when + later)
        fetched(str(path), 1000)
    assert len(reads) == 2


@pytest.fixture
def root(tmp_path):
    """A root with a file in a folder, links to both, and a link to a folder and a file outside."""
    for name in ("root/in", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.jpg").write_bytes(b"a")
    folder = tmp_path / "root"
    (folder / "to_in").symlink_to("in")
    (folder / "to_a.jpg").symlink_to("in/a.jpg")
    (folder / "out").symlink_to("../elsewhere")
    (folder / "in" / "out.jpg").symlink_to(tmp_path / "elsewhere" / "a.jpg")
    return str(folder)


def test_paths_inside_are_joined(root):
    within = RootDirectory(root)
    below = ("in/a.jpg", "./in//a.jpg", "in/../in/a.jpg", "to_in/a.jpg", "to_a.jpg", "12:30.jpg")
    for path in (*below, f"{root}/in/a.jpg"):
        joined = within.path_of(path)
        assert joined == os.path.join(root, path)
        assert within.checked(joined) == joined
        assert within.checked(joined) == joined


@pytest.mark.parametrize("path", ["../elsewhere/a.jpg", "in/../../elsewhere/a.jpg", "/etc/passwd", "..", "../root2/a"])
def test_paths_that_leave_by_their_words_are_refused(root, path):
    with pytest.raises(ManifestError) as found:
        RootDirectory(root).path_of(path)
    assert str(found.value).startswith(f"{path}: leaves root {root}; ")
    assert RootDirectory(root, allow_external=True).path_of(path) == os.path.join(root, path)


# By its words the last one is root/a.jpg; but the link leads to another folder first, and .. from there is outside.
@pytest.mark.parametrize(
    ("path", "link"),
    [("out/a.jpg", "out"), ("in/out.jpg", "in/out.jpg"), ("in/../out/a.jpg", "in/../out"), ("out/../a.jpg", "out")],
)
def test_paths_that_leave_by_links_are_refused(root, path, link):
    within = RootDirectory(root)
    joined = within.path_of(path)
    to = os.path.realpath(os.path.join(root, link))
    for _ in range(2):
        what = f"{joined}: leaves root {root} through the link {root}/{link} to {to}; "
        with pytest.raises(ManifestError, match=re.escape(what)):
            within.checked(joined)
    assert RootDirectory(root, allow_external=True).checked(joined) == joined


def test_a_root_that_is_a_link_itself(root, tmp_path):
    (tmp_path / "link").symlink_to("root")
    within = RootDirectory(str(tmp_path / "link"))
    assert within.checked(within.path_of("in/a.jpg")) == str(tmp_path / "link" / "in" / "a.jpg")
    with pytest.raises(ManifestError, match="leaves root"):
        within.checked(within.path_of("out/a.jpg"))
    assert RootDirectory("/").path_of("etc/passwd") == "/etc/passwd"
    assert RootDirectory("/").checked("/etc/passwd")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("data:image/png,", "an address, not a path; write s3:"),
        *((path, "a path of Windows; give") for path in (r"\\host\x", r"C:\x", "d:/x")),
        *((path, "not a path; give the path of a file") for path in ("", "a\0b")),
    ],
)
def test_what_is_no_path_here_is_refused_even_where_paths_may_leave(root, path, what):
    for outside in (False, True):
        with pytest.raises(ManifestError) as found:
            RootDirectory(root, allow_external=outside).path_of(path)
        assert str(found.value).startswith((f"{path}: {what}", f"{path!r}: {what}"))


def test_an_address_is_a_path_that_leaves_a_local_root(root):
    for path in ("http://a/b", "HTTPS://a", "s3://b/x"):
        assert RootDirectory(root, allow_external=True).path_of(path) == path
        with pytest.raises(ManifestError, match="leaves root"):
            RootDirectory(root).path_of(path)


def test_a_path_may_begin_as_in_a_shell_or_be_a_file_url(root, monkeypatch):
    monkeypatch.setenv("HOME", root)
    monkeypatch.setenv("DATA", "in")
    within = RootDirectory(root)
    for path in ("~/in/a.jpg", "$DATA/a.jpg", "${DATA}/a.jpg", f"file://{root}/in/a.jpg"):
        assert within.path_of(path) == os.path.join(root, "in/a.jpg")
    for name in ("$DATA", "~", "~root"):  # a file that is called so is meant
        open(os.path.join(root, name), "w").close()
        assert within.path_of(name) == os.path.join(root, name)
    assert within.path_of(f"file://{root}/a%23b?c#d") == os.path.join(root, "a#b?c#d")
    for path in ("file:///a%00b", "file://[x/a"):
        with pytest.raises(ManifestError, match=r"not a path|no address"):
            within.path_of(path)
    with pytest.raises(ManifestError, match="no address"):
        within.path_of(f"file://other{root}/in/a.jpg")
    assert within.path_of("in/$DATA.jpg") == os.path.join(root, "in/$DATA.jpg")
    for path in ("~/../x", "file:///etc/passwd"):
        with pytest.raises(ManifestError, match="leaves root"):
            within.path_of(path)


def test_a_root_is_meant_from_where_it_was_named(root, monkeypatch):
    monkeypatch.chdir(os.path.dirname(root))
    within = RootDirectory("root")
    monkeypatch.chdir("/")
    assert fetched(within.checked(within.path_of("in/a.jpg")), 10)[0] == b"a"


@given(path=st.text(st.sampled_from("ab./~"), min_size=1, max_size=12))
def test_no_words_lead_out(path):
    try:
        joined = RootDirectory("/data/set").path_of(path)
    except ManifestError:
        assert not os.path.normpath(os.path.join("/data/set", os.path.expanduser(path))).startswith("/data/set/")
    else:
        assert os.path.normpath(joined) == "/data/set" or os.path.normpath(joined).startswith("/data/set/")
