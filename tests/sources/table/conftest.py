"""Tables in files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def file(tmp_path):
    """Writes bytes or text: ``file("m.csv", "a,b\\n1,2\\n")`` returns the path."""

    def written(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return written


@pytest.fixture
def parquet(tmp_path):
    def written(name="m.parquet", row_group_size=None, columns=None, **more):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({**(columns or {}), **more}), path, row_group_size, write_page_checksum=True)
        return str(path)

    return written
