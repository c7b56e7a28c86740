"""What goes to a reader process, and what cannot."""

import logging
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.processes import loader_of
from support.sources.reader_sources import Numbers

from lit_async_data import AsyncLoader
from lit_async_data.engine.processes.shared_memory import SharedFile
from lit_async_data.errors import ConfigError, MemoryBudgetError

pytestmark = pytest.mark.processes


def test_python_code_is_read_ahead_in_a_process_and_by_the_loop_where_it_cannot_go(monkeypatch, caplog):
    with AsyncLoader(Numbers(), {"batch_size": 10, "shuffle": False}) as loader:
        assert loader.footprint.workers[:3] == ("process", 1, "Python code reads the samples")
        assert [batch["y"].tolist() for batch in loader] == np.arange(100).reshape(10, 10).tolist()
    source = Numbers(act=threading.Lock().release)  # a lock cannot be pickled
    caplog.set_level(logging.INFO)
    with AsyncLoader(source, {"batch_size": 10, "shuffle": False}) as loader:
        assert [batch["y"].tolist() for batch in loader] == np.arange(100).reshape(10, 10).tolist()
        assert loader.footprint.workers.kind == "caller"
    assert "Numbers: no workers (it cannot be pickled (TypeError: " in caplog.text
    loader = loader_of(source)
    with pytest.raises(ConfigError, match=r"^worker_kind: Numbers cannot go .*pickle.*; .* set worker_kind=thread"):
        next(loader)


def test_a_source_of_the_users_own_program_travels_by_value(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy as np\n"
        "from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source\n"
        "class Mine(Source):\n"
        "    spec = BatchSpec({'y': FieldSpec((), np.dtype('i8'))}, as_mapping=True)\n"
        "    def __len__(self): return 10\n"
        "    def read_into(self, samples, out): out['y'][...] = samples + OFFSET\n"
        "OFFSET = 5\n"
        "with AsyncLoader(Mine(), dict(batch_size=10, shuffle=False, worker_kind='process')) as loader:\n"
        "    print(next(iter(loader))['y'].tolist())\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]\n", done.stderr


def test_a_source_for_which_there_is_no_room_is_an_error_that_says_so(monkeypatch):
    def without_room(self, _):
        self.folder, self.file = "/dev/shm", open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(SharedFile, "__init__", without_room)
    error = pytest.raises(MemoryBudgetError, match=r"for a copy of the source .*No space left")
    with loader_of(Numbers()) as loader, error:
        next(loader)


def test_a_source_of_large_arrays_goes_to_a_process_only_on_demand(monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.processes.shared_memory.MOST_COPIED_BYTES", 100)
    assert loader_of(Numbers(), worker_kind="auto").footprint.workers.why.startswith("a copy of it takes ")
    assert loader_of(Numbers()).footprint.workers.kind == "process"
