"""How many requests are on their way, and which are next."""

import pytest

from lit_async_data.errors import StalledError
from lit_async_data.sources.files import transport as transport_module
from lit_async_data.sources.files.transport import Started, Transport


def test_the_window_doubles_while_that_raises_the_rate_and_work_waits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now[0])
    transport = Transport(64)
    transport._work = [(1, 0, None)]
    for rate, window in ((1e6, 16), (2e6, 32), (2.1e6, 32), (4e6, 64), (8e6, 64)):
        nbytes, now[0] = rate, now[0] + 1
        for _ in range(transport.window):
            transport.arrived(nbytes / transport.window)
            transport._measure()
        assert transport.window == window, rate
    transport._work = []


def test_a_slow_line_is_waited_for(monkeypatch):
    transport, now = Transport(1, timeout_s=180), [0.0]
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now[0])

    class Slow(Started):
        def exception(self, timeout=None):
            now[0] += 100
            transport.arrived(1)
            if now[0] >= 1000 and not self.done():
                self.set_result("right")
            return super().exception(0) if self.done() else None

    slow = Slow(None, transport._closings)
    slow.set_running_or_notify_cancel()
    assert transport.result_of(slow, "x") == "right"


def test_a_silent_store_is_named_after_5_s_and_again_as_the_silence_doubles(monkeypatch, caplog):
    transport, now, sent = Transport(1, timeout_s=180), [0.0], []
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now[0])

    class Silent(Started):
        def exception(self, timeout=None):
            now[0] += 3
            if sent and now[0] >= sent[0]:
                transport.arrived(sent.pop())

    def warned(name):
        caplog.clear()
        silent = Silent(None, transport._closings)
        silent.set_running_or_notify_cancel()
        with pytest.raises(StalledError, match=f"{name}: no answer for 180 s"):
            transport.result_of(silent, name)
        return [record.getMessage().partition("; waiting for at most 180 s, until")[0] for record in caplog.records]

    sent.append(15)  # then bytes come
    assert warned("s3://b/x") == [f"s3://b/x: no answer for {after} s" for after in (6, 12, 21, 42, 81, 162)]
    assert warned("s3://b/y") == []  # a store that is often silent fills no log
