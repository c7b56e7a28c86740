"""What a thread spends on its work: without waits for slots, and with those for others as if it had worked."""

import threading
import types

from lit_async_data.sources.contract import stage_clock
from lit_async_data.sources.contract.stage_clock import StageClock, Work


def test_waits_for_slots_are_no_work_and_each_take_begins_anew(monkeypatch):
    now = types.SimpleNamespace(wall=100.0, cpu=7.0)
    fake = types.SimpleNamespace(perf_counter=lambda: now.wall, thread_time=lambda: now.cpu)
    monkeypatch.setattr(stage_clock, "time", fake)
    here = StageClock()
    now.wall, now.cpu = 110.0, 10.0
    assert here.waited(106.0) == 4.0
    here.add(decode_s=1.0, stored=20, decoded=30)
    here.add(decode_s=1.0, stored=2, decoded=3)
    here.add(transform_s=0.5)
    here.add(cpu_s=2.0)
    work = here.take()
    assert work == Work(6.0, decode_s=2.0, transform_s=0.5, cpu_s=5.0, stored=22, decoded=33)
    assert work.plus(work) == Work(12.0, 4.0, 1.0, 10.0, 44, 66)
    assert work.plus(work).minus(work) == work
    assert work.read == Work(3.5, bytes=22)
    assert (Work(0.5, bytes=6_000_000).mb_per_s, Work().mb_per_s) == (12.0, 0.0)
    assert here.take() == Work()
    now.wall += 1.0
    here.add(cpu_s=3.0)  # reported by another thread's clock; no more than passed here
    assert here.take() == Work(1.0, cpu_s=1.0)
    assert Work().waited(1.0, starved=False).waited(0.5, starved=True) == Work(loop_s=1.0, slot_s=0.5)


def test_each_thread_has_its_own_sums():
    here = StageClock()
    here.add(decode_s=1.0)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(here.take()))
    thread.start()
    thread.join()
    assert taken[0].decode_s == 0
    assert here.take().decode_s == 1
