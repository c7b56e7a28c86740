"""Fill a cache with files of a store or of a slow mount, before a job reads them.

  python -m lit_async_data fill 's3://bucket/scans/*.h5' --cache /nvme/lit

Images and .npy files, which tables name, are kept too. A call that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from datetime import timedelta

import numpy as np

from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, StoreError, counted
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.files.transport import Started
from lit_async_data.sources.hdf5.schema.field import chosen_files
from lit_async_data.sources.manifest.columns import kind_of_path
from lit_async_data.tools.call import ACCESS, add_source_arguments, given_options
from lit_async_data.tools.terminal import progress_bar

SMALL = ("image", "npy")  # kinds of files that come whole
PIECE_BYTES, AHEAD = 2**25, 16  # what is waited for at a time; how many pieces, or small files, are on their way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="files, addresses or patterns, as a source names them")
    add_source_arguments(parser, ACCESS)


def run(arguments: argparse.Namespace) -> None:
    since, files, done = time.monotonic(), Files(**given_options(arguments, ACCESS)), 0
    if files.folder is None:
        raise ConfigError("missing; name the folder to fill", "cache")
    with closing(files), progress_bar(sys.stderr) as progress:
        paths = list(chosen_files(arguments.files, files))
        small = [path for path in paths if kind_of_path(path) in SMALL]
        files.open_all(set(paths).difference(small))
        opened = [f for path in paths if kind_of_path(path) not in SMALL and (f := files.opened(path))]
        kept, lost = [f for f in opened if f.mirror.ring is None], [f.name for f in opened if f.mirror.ring is not None]
        pieces = [(file, np.array([at])) for file in kept for at in range(0, file.mirror.size, PIECE_BYTES)]
        for number, (file, begin) in enumerate(pieces):
            progress("filling", done, sum(f.mirror.size for f in kept))
            for other, at in pieces[number : number + AHEAD]:
                other.fetch(at, at + PIECE_BYTES)
            file.need(begin, begin + PIECE_BYTES)
            done += min(PIECE_BYTES, file.mirror.size - int(begin[0]))
        started = dict[str, Started[bytes] | None]()
        for number, path in enumerate(small):
            for each in small[number : number + AHEAD]:
                if each not in started:
                    started[each] = files.start_whole(each)
            done += len(files.whole(path, started.pop(path)))
        lost += [path for path in small if not files.keeps(path)]
    if lost:
        what = f"{lost[0]}: no room for it in {files.folder.path}, nor for {len(lost) - 1:,} others of {len(paths):,}"
        raise StoreError(f"{what}; raise cache_limit, make room, or give another folder", file=lost[0])
    took = timedelta(seconds=round(time.monotonic() - since))
    sys.stdout.write(f"{files.folder.path}: {counted(len(paths), 'file')}, {readable(done)}, in {took}\n")
