"""What the loop and its device wait for data, summed up and logged."""

import re

import numpy as np
import pytest
from support.device.training_loop import pretend
from support.lightning.trainer import Recorder, Recording, trainer
from waiting.on_device.fake_streams import FakeStreams

import lit_async_data as lad
from lit_async_data.engine.stats import Wait
from lit_async_data.lightning import display
from lit_async_data.testing import ArraySource

COPY_S = 0.03


def test_the_devices_share_is_told_where_it_is_known_and_else_the_loops():
    loop = Wait(10, wait_s=3.0, gap_s=1.0, busy_s=6.0)
    assert loop.share == 0.4
    assert str(loop + Wait(device_s=0.1)).endswith("the device 0.100 s: data wait 1.0 %")
    assert (loop + Wait(device_s=0.1) + Wait(device_s=0.2)).device_s == pytest.approx(0.3)
    assert Wait() + loop == loop
    assert Wait().share == 0.0


class Blind(Recorder):
    """Looks at no value: on this device none has arrived when the host asks."""

    def see(self, stage, batch, number): ...


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning")
def test_the_callback_logs_what_the_device_waited_per_step_and_per_epoch(caplog, monkeypatch):
    """Copies take time on this device, and nothing hides it."""
    streams = FakeStreams("side", {"copy": COPY_S})
    pretend(monkeypatch, lambda device: streams)
    caplog.set_level("INFO")
    monkeypatch.setattr(display, "LEAST_S", 0.0)
    monkeypatch.setattr(display, "LEAST_STEPS", 1)
    callback, logger = lad.DevicePrefetcher(), Recording()
    fit = trainer(callback, logger=logger, log_every_n_steps=1, max_epochs=2)
    source = ArraySource({"x": np.zeros((20, 5000), np.float32)})  # one large field, which travels in one copy
    with lad.AsyncLoader(source, {"batch_size": 4, "shuffle": False}) as loader:
        fit.fit(Blind(), loader)
    steps = [row["data/device_wait_ms"] for _, row in logger.rows if "data/device_wait_ms" in row]
    assert steps == pytest.approx([1e3 * COPY_S] * 10)
    assert fit.callback_metrics["data/device_wait_ms"] == pytest.approx(1e3 * COPY_S)
    assert callback.waited.device_s == pytest.approx(10 * COPY_S)
    assert re.search(r"epoch 0: the device waited \d+\.\d % of ", caplog.text)
