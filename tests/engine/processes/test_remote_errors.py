"""Errors of a reader process are raised at their place."""

import pytest
from support.processes import loader_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import Numbers

from lit_async_data.errors import CorruptError, ReadError

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (acts.fail, ReadError, r"batch 3 of epoch 0 \(samples 30, 31, 32, .*OSError: \[Errno 5\]"),
        (acts.fail_strangely, ReadError, "batch 3 of epoch 0 .*UnpicklableError: odd and even"),
        (acts.damage, CorruptError, "x.h5:/data, row 33: bad"),
    ],
)
def test_an_error_comes_at_its_place_with_type_sample_and_traceback(act, kind, message):
    with loader_of(Numbers(33, act)) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        with pytest.raises(kind, match=message) as caught:
            next(loader)
        assert (caught.value.stage, caught.value.worker) == ("read", 0)
        assert caught.value.sample_id == (33 if act is acts.damage else 30)
        notes = "\n".join(caught.value.__notes__)
        assert "In reader process" in notes
        assert f"in {act.__name__}" in notes  # the traceback
        assert isinstance(caught.value.__cause__, OSError) == (act is acts.fail)
        assert [next(loader)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]
