"""Pickles for other processes: by value what they could not import; and digests."""

import importlib.util
import multiprocessing
import pickle
import subprocess
import sys
import threading
import types

import cloudpickle
import numpy as np
import pytest
import torch

from lit_async_data.sources.contract import user_code
from lit_async_data.sources.contract.user_code import PROBES, digest, dumps, importable, probes


@pytest.mark.parametrize(("length", "most", "step"), [(3, 5, 1), (5, 5, 1), (11, 6, 2), (10**12 + 1, 5, 10**12 // 4)])
def test_probes_are_evenly_spaced_with_both_ends(length, most, step):
    assert probes(length, most).tolist() == list(range(0, length, step))


def test_other_texts_values_types_and_shapes_give_other_digests():
    values, last = np.arange(2 * PROBES), np.arange(2 * PROBES)
    last[-1] = 0
    pieces = [(values,), (last,), (values.astype("u8"),), (values[:, None],), ("ab",), ("a", "b"), (["a", "b"],)]
    assert len({digest(*each) for each in pieces}) == len(pieces)
    assert digest(values[::-1][::-1], iter(["\ud800"])) == digest(values.copy(), ["\ud800"])


CODE = """
import math
SCALE = 3
def scaled(value):
    return SCALE * math.floor(value)
class Scaled:
    def __init__(self, value): self.value = value
    def __call__(self): return scaled(self.value)
"""


@pytest.fixture(params=["__mp_main__", "plugins.mine", "by_path"])
def module(request, monkeypatch, tmp_path):
    """A module that is here, and that no other process can import."""
    if request.param == "by_path":
        path = tmp_path / "by_path.py"
        path.write_text(CODE)
        spec = importlib.util.spec_from_file_location("by_path", path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    else:
        made = types.ModuleType(request.param)
        exec(CODE, vars(made))  # as multiprocessing does
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


def called_elsewhere(data):
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    run = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    return run.stdout.decode().strip()


def test_objects_of_a_module_that_only_this_process_has_are_pickled_by_value(module):
    assert not importable(module.__name__)
    data = dumps(module.Scaled(2.5), [].append)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    assert called_elsewhere(data) == "6"


@pytest.mark.parametrize(
    "value", [np.mean, torch.nn.ReLU, torch.relu, multiprocessing.Process, int, np.random.Generator]
)
def test_what_can_be_imported_is_pickled_by_name(value):
    assert len(dumps(value, [].append)) < 200
    assert pickle.loads(dumps(value, [].append)) is value


def test_what_is_pickled_inside_has_the_module_too_and_a_user_keeps_his_list(module):
    class Nested:
        def __reduce__(self):
            dumps(module.Scaled(1), [].append)
            return module.Scaled, (7.5,)

    assert called_elsewhere(dumps(Nested(), [].append)) == "21"
    cloudpickle.register_pickle_by_value(module)
    try:
        dumps(module.Scaled(1), [].append)
        assert cloudpickle.list_registry_pickle_by_value() == {module.__name__}
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_one_thread_at_a_time_pickles_by_value(module):
    # 1. A thread pickles, and its module is registered. 2. Another one finds it registered, and begins. 3. The first
    # ends, and unregisters it. 4. The other one would go on by name.
    entered = []

    class Tries:
        def __reduce__(self):
            other = threading.Thread(target=lambda: entered.append(user_code._LOCK.acquire(blocking=False)))
            other.start()
            other.join()
            return module.Scaled, (1.5,)

    assert called_elsewhere(dumps(Tries(), [].append)) == "3"
    assert entered == [False]
