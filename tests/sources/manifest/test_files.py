"""Files that a table names: where they may lie, and never a wrong value."""

import contextlib
import errno
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.failures import raising

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
    (tmp_path / "loop").symlink_to("loop")
    wrong = {str(tmp_path / "pipe"): "not a file", str(tmp_path): "not a file", "/dev/zero": "not a file"}
    wrong |= {str(tmp_path / "none"): "no such file", str(tmp_path / "loop"): "cannot be read"}
    for path, said in wrong.items():
        with pytest.raises(SourceError, match=f"^{path}: {said}") as found:
            fetched(path, 10)
        assert found.value.file == path
        assert isinstance(found.value, MissingError) is (said == "no such file")


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


@pytest.mark.parametrize(
    ("number", "failures", "pauses", "said"),
    [
        (errno.EIO, 1, 1, ""),
        (errno.ESTALE, 1, 1, ""),
        (errno.EIO, 2, 1, r"gone; the disk or the network failed, twice"),
        (errno.EMFILE, 1, 0, r"gone; .*ulimit -n"),
    ],
)
def test_an_input_error_is_tried_again_once(*, number, failures, pauses, said, tmp_path, monkeypatch, before_reading):
    (tmp_path / "a").write_bytes(b"abc")
    left, slept = [OSError(number, "gone")] * failures, []
    before_reading(lambda: left and raising(left.pop())())
    monkeypatch.setattr(local_files.time, "sleep", slept.append)
    what = rf"a: cannot be read: \[Errno {number}\] {said}"
    with pytest.raises(SourceError, match=what) if said else contextlib.nullcontext():
        assert fetched(str(tmp_path / "a"), 10)[0] == b"abc"
    assert slept == [local_files.PAUSE_S] * pauses


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


def test_a_root_may_be_a_link_and_is_meant_from_where_it_was_named(root, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("root")
    monkeypatch.chdir(tmp_path)
    within = RootDirectory("link")
    monkeypatch.chdir("/")
    assert fetched(within.checked(within.path_of("in/a.jpg")), 10)[0] == b"a"
    with pytest.raises(ManifestError, match="leaves root"):
        within.checked(within.path_of("out/a.jpg"))
    assert RootDirectory("/").checked(RootDirectory("/").path_of("etc/passwd")) == "/etc/passwd"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("data:image/png,", "an address, not a path; write s3:"),
        (r"C:\x", "a path of Windows; give"),
        ("a\0b", "not a path"),
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
    for name in ("$DATA", "~"):  # a file that is called so is meant
        open(os.path.join(root, name), "w").close()
        assert within.path_of(name) == os.path.join(root, name)
    assert within.path_of(f"file://{root}/a%23b?c#d") == os.path.join(root, "a#b?c#d")
    for path in ("file:///a%00b", f"file://other{root}/in/a.jpg", "~/../x", "file:///etc/passwd"):
        with pytest.raises(ManifestError, match=r"not a path|no address|leaves root"):
            within.path_of(path)


@given(path=st.text(st.sampled_from("ab./~"), min_size=1, max_size=12))
def test_no_words_lead_out(path):
    try:
        joined = RootDirectory("/data/set").path_of(path)
    except ManifestError:
        assert not os.path.normpath(os.path.join("/data/set", os.path.expanduser(path))).startswith("/data/set/")
    else:
        assert os.path.normpath(joined) == "/data/set" or os.path.normpath(joined).startswith("/data/set/")
