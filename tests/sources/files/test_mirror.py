"""A mirror has the bytes of its object or says that it lacks them; each block is fetched once; h5py over a mirror."""

import gc
import os
import threading

import h5py
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lit_async_data.errors import ClosedError, SourceError, StalledError, StoreError
from lit_async_data.sources.files import mirror as mirror_module
from lit_async_data.sources.files import transport as transport_module
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import BLOCK, Mirror, MirroredFile, ObjectFile, Ring, runs
from lit_async_data.sources.files.transport import Transport

WHICH = FileIdentity.of_object("x", 1, "tag")
SIZE = 7 * BLOCK + 123
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def opened(folder, size=SIZE, ring=None):
    names = (os.path.join(folder, name) for name in ("x.data", "x.crc"))
    return Mirror(*(os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names), size, ring)


def get(begin, end):
    return memoryview(DATA[begin:end].tobytes())


def at(*blocks):
    begins = np.array(blocks, np.int64) * BLOCK
    return begins, np.minimum(begins + BLOCK, SIZE)


@pytest.fixture
def transport():
    made = Transport(8)
    yield made
    made.close()


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1), st.integers(1, 3 * BLOCK)), max_size=12),
    st.sets(st.integers(0, 7), max_size=3),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_whatever_is_not_missing_is_right_in_two_processes_and_after_a_crash(tmp_path_factory, steps, lost):
    folder = tmp_path_factory.mktemp("mirror")
    mirrors = [opened(folder), opened(folder)]
    for which, begin, length in steps:
        begins, ends = np.array([begin]), np.array([min(begin + length, SIZE)])
        for first, last in runs(mirrors[which].missing(begins, ends), 0, 2):
            mirrors[which].store(first * BLOCK, get(first * BLOCK, min(last * BLOCK, SIZE)))
        for mirror in mirrors:
            assert not len(mirror.missing(begins, ends))
            assert np.array_equal(mirror.map[begins[0] : ends[0]], DATA[begins[0] : ends[0]])
    with open(folder / "x.data", "r+b") as file:  # the CRCs are on the disk, and these bytes never got there
        for block in lost:
            file.seek(block * BLOCK)
            file.write(bytes(min(BLOCK, SIZE - block * BLOCK)))
    later = opened(folder)
    missing = set(later.missing(np.array([0]), np.array([SIZE])).tolist())
    assert lost <= missing
    for block in set(range(8)) - missing:
        assert np.array_equal(later.map[block * BLOCK :][:BLOCK], DATA[block * BLOCK :][:BLOCK])
    assert later.holds(0, SIZE) == (not missing)


def test_a_block_that_comes_again_is_not_freed_while_it_is_written(tmp_path, monkeypatch):
    mirror, pwrite = opened(tmp_path, ring=Ring(2**30)), os.pwrite
    mirror.store(0, get(0, 2 * BLOCK))
    mirror.drop(slice(0, 2))

    def interrupted(descriptor, data, at):
        written = pwrite(descriptor, data, at)
        mirror.free(slice(0, 2))
        return written

    with monkeypatch.context() as patch:
        patch.setattr(mirror_module.os, "pwrite", interrupted)
        mirror.store(0, get(0, BLOCK))
    assert np.array_equal(mirror.map[:BLOCK], DATA[:BLOCK])
    assert not mirror.map[BLOCK : 2 * BLOCK].any()


@hypothesis.given(st.sets(st.integers(0, 40)), st.integers(0, 3), st.integers(1, 6))
def test_runs_hold_all_blocks_no_wide_gaps_and_not_too_many(blocks, gap, most):
    found = runs(np.array(sorted(blocks), np.int64), gap, most)
    held = [block for run in found for block in range(*run)]
    assert blocks <= set(held)
    assert len(held) == len(set(held))
    assert held == sorted(held)
    assert all(end - begin <= most for begin, end in found)
    assert all(min(abs(block - other) for other in blocks) <= gap for block in held)


def test_each_block_is_fetched_once_and_a_reader_waits_for_what_is_on_its_way(tmp_path, transport):
    mirror = opened(tmp_path)
    open_, asked = threading.Event(), []

    def slow(begin, end):
        asked.append((begin // BLOCK, -(-end // BLOCK)))
        assert open_.wait(10)
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, slow, transport)
    first = filler.fetch(*at(0, 1))
    assert filler.fetch(*at(1)) == first
    reader = threading.Thread(target=filler.need, args=at(0, 7))
    reader.start()
    open_.set()
    reader.join(10)
    assert sorted(asked) == [(0, 2), (7, 8)]
    filler.need(*at(0, 1, 7))
    assert len(asked) == 2


def test_what_somebody_waits_for_overtakes_what_is_read_ahead(tmp_path):
    mirror, transport, open_, asked = opened(tmp_path), Transport(1), threading.Event(), []

    def slow(begin, end):
        asked.append(begin // BLOCK)
        assert open_.wait(10)
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, slow, transport)
    filler.fetch(*at(0))
    while not asked:
        pass
    for block in (3, 4, 5, 6):
        filler.fetch(*at(block))
    filler.fetch(*at(7), urgent=True)
    reader = threading.Thread(target=filler.need, args=at(4, 6))  # which are on their way
    reader.start()
    while not all(filler._coming[filler._asked[block]].urgent for block in (4, 6)):
        pass
    filler.fetch(*at(4), urgent=True)
    open_.set()
    for block in (3, 5):
        filler.need(*at(block))
    reader.join(10)
    assert asked == [0, 7, 4, 6, 3, 5]
    transport.close()


def test_an_error_reaches_who_waits_and_the_range_can_be_fetched_again(tmp_path, transport):
    mirror = opened(tmp_path)
    left = [2]

    def failing(begin, end):
        left[0] -= 1
        if left[0] >= 0:
            raise SourceError("x: gone")
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, failing, transport)
    for _ in range(2):
        with pytest.raises(SourceError, match="gone"):
            filler.need(*at(2))
    filler.need(*at(2))
    assert np.array_equal(mirror.map[2 * BLOCK : 3 * BLOCK], DATA[2 * BLOCK : 3 * BLOCK])


def test_no_answer_is_an_error_and_closing_frees_who_waits(tmp_path, monkeypatch):
    mirror = opened(tmp_path)
    monkeypatch.setattr(transport_module, "POLL_S", 0.001)
    transport, open_, begun = Transport(1, timeout_s=0), threading.Event(), threading.Event()

    def stuck(begin, end):
        begun.set()
        assert open_.wait(10)
        return get(begin, end)

    with pytest.raises(StalledError, match="x: no answer for 0 s"):
        MirroredFile("x", WHICH, mirror, stuck, transport).need(*at(0))
    assert begun.wait(10)
    (waiting,) = MirroredFile("y", WHICH, mirror, stuck, transport)._started(*at(1), urgent=False)
    transport.close()
    with pytest.raises(ClosedError, match="y: the source was closed"):
        transport.result_of(waiting, "y")
    open_.set()
    transport.close()


class Counted(MirroredFile):
    """Counts the times that somebody asked for bytes that nobody had asked for, and the bytes that came."""

    rounds = nbytes = 0

    def _started(self, begins, ends, *, urgent):
        last = self._last
        coming = super()._started(begins, ends, urgent=urgent)
        self.rounds += self._last > last
        return coming

    def scattered(self, places):
        rounds = self.rounds
        functions = super().scattered(places)
        self.rounds = rounds + 1
        return functions

    def _answer(self, begin, end):
        self.nbytes += end - begin
        return super()._answer(begin, end)


def mirrored(path, folder, transport, ring=None):
    data = path.read_bytes()
    return Counted(
        "x", WHICH, opened(folder, len(data), ring), lambda begin, end: memoryview(data[begin:end]), transport
    )


def written(path, libver):
    with h5py.File(path, "w", libver=libver) as file:
        values = np.arange(20_000 * 64, dtype="i4").reshape(20_000, 64)
        file.create_dataset("x", data=values, chunks=(2, 64), shuffle=True, compression="lzf")
        for number in range(300):
            file[f"groups/g{number:03}/y"] = number
            file[f"groups/g{number:03}"].attrs["label"] = f"l{number}"


def chunks_of(file):
    found = []
    file["x"].id.chunk_iter(lambda each: found.append((each.chunk_offset, each.byte_offset, each.size)))
    return found


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_everything_is_as_in_the_file_and_few_wait(tmp_path, transport, libver):
    written(tmp_path / "x.h5", libver)
    filler = mirrored(tmp_path / "x.h5", tmp_path, transport)
    with h5py.File(ObjectFile(filler), "r") as file, h5py.File(tmp_path / "x.h5") as own:
        assert chunks_of(file) == chunks_of(own)
        rounds = filler.rounds
        for name in own["groups"]:
            assert file[f"groups/{name}/y"][()] == own[f"groups/{name}/y"][()]
            assert file[f"groups/{name}"].attrs["label"] == own[f"groups/{name}"].attrs["label"]
        assert np.array_equal(file["x"][::999], own["x"][::999])
    assert rounds < 12


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_groups_far_apart_are_fetched_together(tmp_path, transport, libver):
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        for number in range(40):
            file[f"g{number:02}/x"] = np.full(2**17, number, "u1")
    filler = mirrored(tmp_path / "x.h5", tmp_path, transport)
    with h5py.File(ObjectFile(filler), "r") as file:
        assert len({file[name]["x"].id.get_offset() for name in file}) == 40
    assert filler.rounds < 12  # and not one for each group


def far_apart(path, chunks):
    """A B-tree whose nodes are far apart."""
    with h5py.File(path, "w", libver="earliest") as file:
        data = file.create_dataset("x", (chunks, 4096), "u1", chunks=(1, 4096))
        for number in range(chunks):
            data.id.write_direct_chunk((number, 0), bytes(4096))


@pytest.mark.parametrize("in_memory", [True, False])
def test_nodes_far_apart_come_without_what_is_around_them_unless_they_are_kept(tmp_path, transport, in_memory):
    far_apart(tmp_path / "x.h5", 3000)
    filler = mirrored(tmp_path / "x.h5", tmp_path, transport, Ring(2**30) if in_memory else None)
    with h5py.File(ObjectFile(filler), "r") as file, h5py.File(tmp_path / "x.h5") as own:
        for _ in range(2):  # libhdf5 reads a tree again, if its own cache is too small
            assert chunks_of(file) == chunks_of(own)
    assert (filler.nbytes < 100 * 2**12) is in_memory  # each of about 50 nodes has 2.6 KB; with blocks: a MB
    assert filler.rounds < 8


def pieces(filler, places):
    return {at: wait() for at, wait in filler.scattered(places).items()}


def test_chunks_are_read_while_leaves_come_and_a_leaf_that_did_not_come_is_fetched_again(tmp_path, transport):
    far_apart(tmp_path / "x.h5", 3000)
    filler, seen, fails = mirrored(tmp_path / "x.h5", tmp_path, transport, Ring(2**30)), threading.Event(), [True]
    get, last = filler._get, (tmp_path / "x.h5").read_bytes().rindex(b"TREE\1\0")

    def late(begin, end):
        if begin == last and (not seen.wait(10) or fails.pop()):
            raise StoreError("it broke")
        return get(begin, end)

    filler._get, offsets = late, []
    with h5py.File(ObjectFile(filler), "r") as file:

        def read(each):
            offsets.append(each.byte_offset)
            seen.set()

        with pytest.raises(StoreError, match="it broke"):
            file["x"].id.chunk_iter(read)
        assert 2900 < len(offsets) < 3000
        fails.append(False)
        offsets.clear()
        file["x"].id.chunk_iter(read)
    assert len(offsets) == 3000


def test_small_pieces_are_those_of_the_file_whether_or_not_their_blocks_are_there(tmp_path, transport):
    written(tmp_path / "x.h5", "latest")
    data, filler = (tmp_path / "x.h5").read_bytes(), mirrored(tmp_path / "x.h5", tmp_path, transport, Ring(2**30))
    filler.need(np.array([2**18]), np.array([2**18 + 1]))
    places = {100: 50, 2**17 - 3: 7, 2**18 + 5: 9, len(data) - 4: 100}
    for _ in range(2):
        assert pieces(filler, places) == {at: data[at : at + size] for at, size in places.items()}
    dense = dict.fromkeys(range(0, 2**17, 4000), 3000)
    assert pieces(filler, dense) == {at: data[at : at + size] for at, size in dense.items()}
    assert not len(filler.mirror.missing(np.array([0]), np.array([2**17])))


@pytest.mark.parametrize("signature", [b"TREE\0\1", b"TREE\1\1", b"SNOD\1\0", b"FHDB", b"OHDR"])
def test_bytes_that_look_like_links_or_nodes_do_no_harm(tmp_path, transport, signature):
    data = signature + np.random.default_rng(0).integers(0, 3, 2**20, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    file = ObjectFile(mirrored(tmp_path / "x", tmp_path, transport))
    for size in (4, 8, 30, 512, 2616, 4096):
        file.seek(0)
        assert file.read(size) == data[:size]


@pytest.fixture
def eager_collection():
    """Each few objects, the collector looks at all that come from now on."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("eager_collection")
def test_collection_in_a_thread_that_fetches_waits_for_no_reader(tmp_path):
    path, cycles = tmp_path / "x.h5", [[h5py.h5s.create_simple((1,))] for _ in range(3)]
    written(path, "latest")
    for cycle in cycles:
        cycle.append(cycle)
    del cycle
    transport, kept = Transport(2, timeout_s=2), []
    file = mirrored(path, tmp_path, transport)
    get = file._get

    def collecting(begin, end):
        if cycles:  # the first read, for which h5py waits
            cycles.clear()  # now garbage, with objects of h5py, whose lock the reader has
            kept.extend([] for _ in range(1000))
            gc.set_threshold(0)
        return get(begin, end)

    file._get = collecting
    with h5py.File(ObjectFile(file), "r") as opened_file:
        assert (opened_file["x"][::100] == np.arange(20_000 * 64).reshape(20_000, 64)[::100]).all()
    assert gc.isenabled()
    assert not cycles
    transport.close()
