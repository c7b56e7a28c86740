"""Readers that are paused as often as can be."""

from __future__ import annotations

from lit_async_data.host.pipeline import slowdown_probe


def pause_often(monkeypatch):
    """Has every `SlowdownProbe` pause with every second batch or so, whatever is ready, and until nothing is."""
    for name, value in {"FIRST": 1, "RETRY": 1, "BETWEEN": 1, "LEAST_READY": 0, "FULL": 0, "LEAST_LEFT": 0}.items():
        monkeypatch.setattr(slowdown_probe, name, value)
    monkeypatch.setattr(slowdown_probe, "MOST_COST", 1e9)
    monkeypatch.setattr(slowdown_probe, "PATIENCE", 1e9)
