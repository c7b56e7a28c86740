"""How many requests are on their way."""

from lit_async_data.sources.files import transport as transport_module
from lit_async_data.sources.files.transport import Transport


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
