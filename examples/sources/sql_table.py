"""A source of your own: rows of a SQL table."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source
from lit_async_data.errors import SourceError
from lit_async_data.testing import check_contract


class SQLSource(Source):
    def __init__(self, path):
        self.path = path
        with contextlib.closing(sqlite3.connect(path)) as database:
            self.rowids = np.array([row[0] for row in database.execute("SELECT rowid FROM people ORDER BY rowid")])

    def __len__(self):
        return len(self.rowids)

    @property
    def spec(self):
        return BatchSpec({key: FieldSpec((), np.dtype(np.float64)) for key in ("height", "weight")}, as_mapping=True)

    def read_into(self, samples, out):
        with contextlib.closing(sqlite3.connect(self.path)) as database:
            query = f"SELECT {', '.join(out)} FROM people WHERE rowid = ?"
            for place, number in enumerate(samples.tolist()):
                row = database.execute(query, [int(self.rowids[number])]).fetchone()  # None if the row is gone
                if row is None or None in row:
                    raise SourceError(f"sample {number}: row {self.rowids[number]} of {self.path} lacks a value")
                for array, value in zip(out.values(), row, strict=True):
                    array[place] = value


if __name__ == "__main__":
    with contextlib.closing(sqlite3.connect("people.db")) as new:
        new.execute("CREATE TABLE people (height REAL, weight REAL)")
        new.executemany("INSERT INTO people VALUES (?, ?)", [(1.5 + n / 2000, 50 + n / 20) for n in range(1000)])
        new.execute("DELETE FROM people WHERE rowid = 7")
        new.commit()
    source = SQLSource("people.db")
    check_contract(source)
    with AsyncLoader(source, {"batch_size": 64, "shuffle": True}) as loader:
        batches = list(loader)
        print(source, len(batches), "batches; the loop waited", f"{loader.stats().wait_s:.3f} s")
