"""Bad samples are counted in each pass and listed once; that the batches are right is shown in test_bad_samples.py."""

import json

import numpy as np
import pytest

from lit_async_data.engine.loader.resuming import Quarantine
from lit_async_data.engine.pipeline.sample_reader import BadSample, ReadAround
from lit_async_data.errors import SourceError, TransformError
from lit_async_data.order.plan import EpochPlan
from lit_async_data.testing import ArraySource

PLAN = EpochPlan(length=100, batch_size=10, shuffle="none", seed=0, epoch=0)


def around(*bad, error=SourceError):
    return ReadAround((), tuple(BadSample(sample, sample, error("damaged")) for sample in bad))


@pytest.mark.parametrize(("most", "allowed"), [(2, 2), (0.03, 3), (0.001, 1), (0, 0)])
def test_one_more_than_allowed_is_an_error_that_lists_them(most, allowed):
    quarantine = Quarantine(ArraySource({"y": np.arange(100)}), most, None)
    for epoch in range(2):
        quarantine.begin(epoch)
        quarantine.handed_out(0, PLAN, around(*range(allowed)))
        assert quarantine.count == allowed
        with pytest.raises(SourceError, match=rf"^max_bad: {allowed + 1} bad .* at most {allowed} are") as caught:
            quarantine.handed_out(1, PLAN, around(99))
        assert len(caught.value.errors) == allowed + 1


def test_a_sample_is_listed_once_and_what_a_transform_failed_on_is_read_again(tmp_path, caplog):
    path, source = tmp_path / "bad.jsonl", ArraySource({"y": np.arange(100)})
    for epoch, loader in enumerate([Quarantine(source, 1.0, path), Quarantine(source, 1.0, path)]):
        loader.remember([50])
        loader.begin(epoch)
        loader.handed_out(3, PLAN, around(7, 50))
        loader.handed_out(4, PLAN, around(8, error=TransformError))
        assert (loader.count, loader.known, loader.samples(3), loader.samples(5)) == (3, {7, 50}, (), None)
        loader.tell()
        loader.tell()
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["id"], each["cause"]) for each in listed] == [(7, "damaged"), (8, "damaged")]
    told = " of ArraySource was read around 3 bad samples (7, 50, 8); "
    assert caplog.messages == [f"epoch {epoch}{told}{path} lists them" for epoch in range(2)]
