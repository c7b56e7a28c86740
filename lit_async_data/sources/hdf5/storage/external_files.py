"""Other files that a file names, and the identity by which each is known again."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_async_data.errors import CorruptError, FormatError, MissingError
from lit_async_data.sources.hdf5.storage.codecs import check_filters
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS

if TYPE_CHECKING:
    import h5py


class FileIdentity(NamedTuple):
    """The state of a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int  # time of the last write, unless a program (rsync, touch, tar) has set it
    ctime_ns: int  # time of the last change to content, permissions or names, which no program can set
    links: int  # names of the file

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity in a result of ``os.stat`` or ``os.fstat``."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink
        )

    def difference(self, now: FileIdentity, path: str) -> str | None:
        """What happened to the file since, for messages; None if only its names have changed, or nothing.

        A new or a removed name sets the ctime, and so does renaming, after which ``path`` does not lead to the file.
        """
        if (now.device, now.inode) != (self.device, self.inode):
            return "was replaced by another file"
        if now.size != self.size:
            return f"{'shrank' if now.size < self.size else 'grew'} from {self.size} to {now.size} bytes"
        if now.mtime_ns != self.mtime_ns:
            return "was written to"
        if now.ctime_ns == self.ctime_ns or now.links != self.links or not now._is_at(path):
            return None
        return "was written to and its modification time set back, or its permissions or owner were changed,"

    def _is_at(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


ExternalFiles = tuple[tuple[str, FileIdentity], ...]
# libhdf5 follows 16.
MOST_LINKS = 64


def refuse_external_link(file: h5py.File, name: str) -> None:
    """Refuse a name that leads into another file, before libhdf5 opens that: a pipe would block it for ever."""
    import h5py

    here = file.filename
    context: dict[str, Any] = {"file": here, "dataset": name, "place": f"{here}:/{name.strip('/')}"}
    folder, place, left, links = os.path.dirname(here), "", name.split("/"), 0
    while left and links < MOST_LINKS:
        part, *left = left
        if part in ("", "."):
            continue
        try:
            link = file.get(f"{place}/{part}", getlink=True)
        except LIBRARY_ERRORS:
            return  # opening it will say why
        outside = isinstance(link, h5py.ExternalLink)
        if outside and os.path.realpath(other := os.path.join(folder, link.filename)) != os.path.realpath(here):
            raise FormatError(
                f"is a link into another file, {other}; give that file as path, or allow it with allow_external=True, "
                "which sample='group' and 'dataset' do not",
                **context,
            )
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            place = place if isinstance(link, h5py.SoftLink) and link.path[:1] != "/" else ""
            left, links = [*link.path.split("/"), *left], links + 1
        else:
            place = f"{place}/{part}"
    if left:
        raise FormatError("cannot be opened, since its links lead in a circle; correct them", **context)


def external_files(dataset: h5py.Dataset, file: h5py.File, name: str, *, allowed: bool) -> ExternalFiles:
    """The other files that hold values of a dataset, with their identities.

    libhdf5 silently reads fill values where such a file is missing, and zeros or other bytes where it is too short. So
    external files are refused unless the user allows them; they must hold all values when the source is built, and
    every read checks them like the main file.
    """
    place, here = f"{file.filename}:/{name.strip('/')}", os.path.abspath(file.filename)
    context: dict[str, Any] = {"file": file.filename, "dataset": name, "place": place}
    linked = dataset.file.filename != file.filename
    if not allowed:
        _refuse(dataset, context)
    found: set[str] = set()
    _follow(dataset, context, found, frozenset())
    if linked:
        found.add(os.path.abspath(dataset.file.filename))
    found.discard(here)
    return tuple((path, FileIdentity.of(os.stat(path))) for path in sorted(found))


def _follow(dataset: h5py.Dataset, context: dict[str, Any], found: set[str], above: frozenset[tuple[str, str]]) -> None:
    """Collect the external files of a dataset, and those of the datasets it refers to, recursively."""
    import h5py

    path = os.path.abspath(dataset.file.filename)
    me = (path, dataset.name or "")
    if me in above:
        raise FormatError(f"takes values from itself, by {path}:{dataset.name}; correct the links", **context)
    access: Any = dataset.id.get_access_plist()  # knows the prefixes that HDF5_EXTFILE_PREFIX and HDF5_VDS_PREFIX set
    left = math.prod(dataset.shape or ()) * dataset.id.get_type().get_size()
    for stored, offset, size in dataset.external or ():
        folder = os.fsdecode(access.get_efile_prefix()) or os.getcwd()  # the only one that libhdf5 searches
        other = _resolved(os.fsdecode(stored), [folder], context)
        found.add(other)
        taken, there = min(size, left), os.stat(other).st_size
        end, left = offset + taken, left - taken
        if taken and there < end:
            raise CorruptError(
                f"takes bytes {offset} to {end} of {other}, which has {there}, and libhdf5 would read zeros behind "
                f"them; restore that file, or, if zeros are right: truncate -s {end} {other}",
                **context,
            )
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for part in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%b" in part.file_name or "%b" in part.dset_name:
            raise FormatError(
                f"takes values from files named by a pattern, {part.file_name}; list the files", **context
            )
        other = path
        if part.file_name != ".":
            folders = [os.fsdecode(access.get_virtual_prefix()), os.path.dirname(path), os.getcwd()]
            other = _resolved(part.file_name, [*filter(None, folders)], context)
        key = other, part.dset_name
        if key not in shapes:
            found.add(os.path.abspath(other))
            try:
                with h5py.File(other, "r", locking="best-effort") as file:
                    source = file.get(part.dset_name)
                    if not isinstance(source, h5py.Dataset):
                        raise _absent(*key, context)
                    check_filters(source, *key)
                    _follow(source, context, found, above | {me})
                    shapes[key] = source.shape or ()
            except OSError as error:
                raise _absent(*key, context) from error
        if _is_short(part, shapes[key], dataset.shape):
            raise CorruptError(
                f"takes values from {other}:/{part.dset_name.strip('/')} that its shape {shapes[key]} does not have, "
                "and libhdf5 would read other bytes; restore that file, or write the virtual dataset again",
                **context,
            )


def _is_short(part: Any, source: tuple[int, ...], virtual: tuple[int, ...]) -> bool:
    """Whether a virtual dataset of this shape takes values from outside of its source."""
    import h5py

    taken = part.src_space
    if taken.get_select_type() == h5py.h5s.SEL_ALL:
        points = part.vspace.get_select_npoints()
        if math.prod(source) <= points or not points:
            return bool(math.prod(source) < points)
        # It has grown: along its first axis only, or libhdf5 takes other values.
        block = [end - begin + 1 for begin, end in zip(*part.vspace.get_select_bounds(), strict=True)]
        return list(source[1:]) != block[len(block) - len(source) + 1 :]
    if taken.is_regular_hyperslab() and h5py.h5s.UNLIMITED in taken.get_regular_hyperslab()[2]:
        return _selected(taken, source) < _selected(part.vspace, virtual)
    _, last = taken.get_select_bounds()
    return len(last) != len(source) or any(at >= size for at, size in zip(last, source, strict=True))


def _selected(space: Any, shape: tuple[int, ...]) -> int:
    """Values of a regular selection within a shape."""
    number = 1
    for start, stride, count, block, size in zip(*space.get_regular_hyperslab(), shape, strict=True):
        whole, rest = divmod(max(size - start, 0), stride if count > 1 else max(stride, block))
        number *= min(whole * block + min(rest, block), count * block)
    return number


def _refuse(dataset: h5py.Dataset, context: dict[str, Any]) -> None:
    allow = "or allow it with allow_external=True"
    if dataset.is_virtual:
        raise FormatError(
            f"is a virtual dataset, and a missing part would be read as fill values; give the files it is "
            f"made of as path, write its values to a dataset of their own, {allow}",
            **context,
        )
    if dataset.external:
        raise FormatError(
            f"stores its values in another file, {dataset.external[0][0]}; write them to a dataset of this "
            f"file, {allow}",
            **context,
        )


def _resolved(name: str, folders: list[str], context: dict[str, Any]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    among = " or ".join(dict.fromkeys(folders))
    raise MissingError(f"takes values from {name}, which is not in {among}; restore that file", **context)


def _absent(path: str, name: str, context: dict[str, Any]) -> MissingError:
    return MissingError(
        f"takes values from {path}:/{name.strip('/')}, which cannot be opened; restore that file", **context
    )
