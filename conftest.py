"""What tests and the examples of docstrings share."""

import pytest


@pytest.fixture(autouse=True)
def threads_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps readers in threads, except in tests that are marked ``processes``: each process takes 0.3 s to start."""
    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr("lit_async_data.engine.resources.system_refusal", lambda: "a test of threads")
    else:
        # Without the GIL, threads would be chosen.
        monkeypatch.setattr("lit_async_data.engine.resources.has_gil", lambda: True)


@pytest.fixture(autouse=True)
def no_seed_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what Lightning's ``seed_everything`` leaves in the environment."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
