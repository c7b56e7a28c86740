"""h5py over a mirror: the values of the file, in few rounds of requests and with little of its data."""

import gc
import os
import threading

import h5py
import numpy as np
import pytest

from lit_async_data.errors import StoreError
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import Mirror, MirroredFile, ObjectFile, Ring
from lit_async_data.sources.files.transport import Transport


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


@pytest.fixture
def transport():
    made = Transport(8)
    yield made
    made.close()


def opened(path, folder, transport, ring=None):
    with open(path, "rb") as file:
        data = file.read()
    names = (os.path.join(folder, name) for name in ("o.data", "o.crc"))
    mirror = Mirror(*(os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names), len(data), ring)
    identity = FileIdentity.of_object("o", 1, "tag")
    return Counted("o", identity, mirror, lambda begin, end: memoryview(data[begin:end]), transport)


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
    filler = opened(tmp_path / "x.h5", tmp_path, transport)
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
    filler = opened(tmp_path / "x.h5", tmp_path, transport)
    with h5py.File(ObjectFile(filler), "r") as file:
        places = [file[name]["x"].id.get_offset() for name in file]
    with h5py.File(tmp_path / "x.h5") as own:
        assert places == [own[name]["x"].id.get_offset() for name in own]
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
    filler = opened(tmp_path / "x.h5", tmp_path, transport, Ring(2**30) if in_memory else None)
    with h5py.File(ObjectFile(filler), "r") as file, h5py.File(tmp_path / "x.h5") as own:
        for _ in range(2):  # libhdf5 reads a tree again, if its own cache is too small
            assert chunks_of(file) == chunks_of(own)
    assert (filler.nbytes < 100 * 2**12) is in_memory  # each of about 50 nodes has 2.6 KB; with blocks: a MB
    assert filler.rounds < 8


def pieces(filler, places):
    return {at: wait() for at, wait in filler.scattered(places).items()}


def test_chunks_are_read_while_leaves_come_and_a_leaf_that_did_not_come_is_fetched_again(tmp_path, transport):
    far_apart(tmp_path / "x.h5", 3000)
    filler, seen, fails = opened(tmp_path / "x.h5", tmp_path, transport, Ring(2**30)), threading.Event(), [True]
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
    data, filler = (tmp_path / "x.h5").read_bytes(), opened(tmp_path / "x.h5", tmp_path, transport, Ring(2**30))
    filler.need(np.array([2**18]), np.array([2**18 + 1]))
    places = {100: 50, 2**17 - 3: 7, 2**18 + 5: 9, len(data) - 4: 100}
    for _ in range(2):
        assert pieces(filler, places) == {at: data[at : at + size] for at, size in places.items()}
    dense = dict.fromkeys(range(0, 2**17, 4000), 3000)
    assert pieces(filler, dense) == {at: data[at : at + size] for at, size in dense.items()}
    assert not len(filler.mirror.missing(np.array([0]), np.array([2**17])))


def test_pieces_grow_where_one_is_read_after_the_other(tmp_path, transport):
    data = bytes(range(256)) * 2**14
    (tmp_path / "x").write_bytes(data)
    filler = opened(tmp_path / "x", tmp_path, transport)
    file, read = ObjectFile(filler), bytearray()
    while piece := file.read(1000):
        read += piece
    assert bytes(read) == data
    assert filler.rounds <= 9  # 64 KiB, 128 KiB … 1 MiB; not 64 pieces


def test_bytes_that_look_like_links_or_nodes_do_no_harm(tmp_path, transport):
    rng = np.random.default_rng(0)
    for signature in (b"TREE\0\1", b"TREE\1\1", b"SNOD\1\0", b"FHDB", b"OHDR"):
        data = signature + rng.integers(0, 3, 2**20, np.uint8).tobytes()
        (tmp_path / "x").write_bytes(data)
        for name in ("o.data", "o.crc"):
            (tmp_path / name).unlink(missing_ok=True)
        file = ObjectFile(opened(tmp_path / "x", tmp_path, transport))
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
    file = opened(path, tmp_path, transport)
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
