"""Waits for other threads, without a sleep."""

LONG = 60  # seconds until a test gives up


def until(reads, true):
    """Waits as the consumer of a `Pipeline` or a `ReaderThread` does."""
    while not true():
        assert reads.arrived.wait(LONG)
