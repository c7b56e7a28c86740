from types import SimpleNamespace

from support.threads.waits import LONG

from lit_async_data.engine.prefetch.reader_thread import ReaderThread


def test_memory_that_was_given_to_the_thread_goes_back_if_the_pass_ends_before_it_is_used():
    # 1. The thread asks for memory. 2. The consumer gives it. 3. The pass ends. 4. The thread sees both.
    released = []

    def prepared(batch, ask):
        block = ask(lambda: "block")
        return SimpleNamespace(error=None, release=lambda: released.append(block))

    reader = ReaderThread(iter([1, 2]), prepared, depth=1)
    assert reader._reader() is not None
    assert reader.arrived.wait(LONG)
    with reader._lock:
        reader.serve()
        reader._closed = True
    assert reader.close()
    assert released == ["block"]


def test_memory_of_what_was_read_ahead_goes_back_with_the_pass():
    released = []
    batch = SimpleNamespace(error=None, release=lambda: released.append(1))
    reader = ReaderThread(iter([1, 2]), lambda *_: batch, depth=1)
    assert reader._reader() is not None
    assert reader.arrived.wait(LONG)
    assert reader.close()
    assert released == [1]
