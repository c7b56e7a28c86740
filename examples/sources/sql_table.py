"""A source of your own: rows of a SQL table."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source
from lit_async_data.testing import check_contract


class SQLSource(Source):
    def __init__(self, path):
        self.path = path
        with contextlib.closing(sqlite3.connect(path)) as database:
            self._length = database.execute("SELECT COUNT(*) FROM people").fetchone()[0]

    def __len__(self):
        return self._length

    @property
    def spec(self):
        return BatchSpec({key: FieldSpec((), np.dtype(np.float64)) for key in ("height", "weight")}, as_mapping=True)

    def read_into(self, samples, out):
        with contextlib.closing(sqlite3.connect(self.path)) as database:
            for key, array in out.items():
                query = f"SELECT {key} FROM people WHERE rowid = ?"
                array[...] = [database.execute(query, [number + 1]).fetchone()[0] for number in samples.tolist()]


if __name__ == "__main__":
    with contextlib.closing(sqlite3.connect("people.db")) as new:
        new.execute("CREATE TABLE people (height REAL, weight REAL)")
        new.executemany("INSERT INTO people VALUES (?, ?)", [(1.5 + n / 2000, 50 + n / 20) for n in range(1000)])
        new.commit()
    source = SQLSource("people.db")
    check_contract(source)
    with AsyncLoader(source, {"batch_size": 64, "shuffle": True}) as loader:
        batches = list(loader)
        print(source, len(batches), "batches; the loop waited", f"{loader.stats().wait_s:.3f} s")
