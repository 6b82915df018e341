"""The transport alone: ranks are threads of this process, inputs and outputs plain bytes; no torch."""

import array
import ctypes
import mmap
import os
import threading

import pytest

import polyscale_shm
from polyscale.errors import BuildError

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, ALL_TO_ALL, BARRIER = 0, 1, 2, 3, 7, 8
U8, I8, I16, I32, I64, F16, BF16, F32, F64 = range(9)
SUM, AVG, PREMUL_SUM, NONE = 0, 7, 8, 9
LARGE = 50_001  # elements: more than travels within a record, and than the smallest staging


@pytest.fixture(scope="module")
def native():
    try:
        return polyscale_shm.native()
    except BuildError as error:
        pytest.skip(str(error))


def connected(native, world, *, staging=1 << 16, read=False, socket=False):
    """Transports of one group, all in this process."""
    made = [native.Transport(rank, world, 1000 + rank) for rank in range(world)]
    name = native.serve() if socket else ""
    for rank, transport in enumerate(made):
        for other, peer in enumerate(made):
            if other != rank:
                transport.connect(other, os.getpid(), 1, peer.fd, 1000 + other, name)
    for transport in made:
        transport.start(staging, 0.0, read)
    return made


def on_all(transports, call):
    """``call(transport, rank)`` in a thread for each; what each returned or raised."""
    found = [None] * len(transports)

    def run(rank):
        try:
            found[rank] = call(transports[rank], rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(transports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def address(data):
    return data.buffer_info()[0]


WAYS = [
    pytest.param({"read": True}, id="read in place"),
    pytest.param({"read": False}, id="staged"),
    pytest.param({"read": False, "staging": 64}, id="staged in tiny chunks"),
]


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_are_those_of_python(native, world, way, count):
    if way.get("staging") == 64 and count > 1000:
        count = 5000
    rows = [array.array("d", [(rank + 1) / (i + 1) for i in range(count)]) for rank in range(world)]
    wanted = rows[0][:]
    for row in rows[1:]:
        wanted = array.array("d", [a + b for a, b in zip(wanted, row, strict=True)])

    def call(transport, rank):
        data = rows[rank][:] or array.array("d", [0.0])
        transport.run(ALL_REDUCE, F64, SUM, -1, count, address(data), address(data), 1.0, 20.0)
        return data[:count]

    transports = connected(native, world, **way)
    assert on_all(transports, call) == [wanted] * world


@pytest.mark.parametrize("way", WAYS)
def test_gathered_and_scattered(native, way):
    world, count = 3, 6000

    def call(transport, rank):
        own = array.array("q", range(rank * count, (rank + 1) * count))
        whole = array.array("q", bytes(8 * world * count))
        transport.run(ALL_GATHER, I64, NONE, -1, count, address(own), address(whole), 1.0, 20.0)
        part = array.array("q", bytes(8 * count))
        transport.run(REDUCE_SCATTER, I64, SUM, -1, count, address(whole), address(part), 1.0, 20.0)
        root = own[:]
        ends = (address(root), 0) if rank == 1 else (0, address(root))
        transport.run(BROADCAST, I64, NONE, 1, count, *ends, 1.0, 20.0)
        return list(whole), list(part), list(root)

    for rank, (whole, part, root) in enumerate(on_all(connected(native, world, **way), call)):
        assert whole == list(range(world * count))
        assert part == [3 * each for each in range(rank * count, (rank + 1) * count)]
        assert root == list(range(count, 2 * count))


@pytest.mark.parametrize("way", WAYS)
def test_uneven_pieces_and_factors(native, way):
    world = 3

    def call(transport, rank):
        sends = [4000 * (rank + to) for to in range(world)]
        receives = [4000 * (source + rank) for source in range(world)]
        data = array.array("d", [float(rank)] * sum(sends))
        into = array.array("d", bytes(8 * sum(receives)))
        transport.run_listed(
            ALL_TO_ALL, F64, NONE, -1, 0, pieces(data, sends), pieces(into, receives), True, 1.0, 20.0
        )  # fmt: skip
        assert list(into) == [float(source) for source in range(world) for _ in range(receives[source])]
        scaled = array.array("d", [1.0] * LARGE)
        at = address(scaled)
        transport.run(ALL_REDUCE, F64, PREMUL_SUM, -1, LARGE, at, at, float(10**rank), 20.0)
        return set(scaled)

    def pieces(data, counts):
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [(address(data) + 8 * start, 8 * n) for start, n in zip(starts, counts, strict=True)]

    if way.get("staging") != 64:
        assert on_all(connected(native, world, **way), call) == [{111.0}] * world


def test_half_precision_is_summed_in_fp32_and_rounded_once(native):
    one, tiny = 0x3F80, 0x3B80  # bf16: 1 and 2^-8; 1 + 2^-8 + 2^-8 is 1.0078125, the next after 1

    def call(transport, rank):
        data = array.array("H", [one if rank == 0 else tiny] * 33)
        transport.run(ALL_REDUCE, BF16, SUM, -1, 33, address(data), address(data), 1.0, 20.0)
        half = array.array("H", [0x3C00 if rank == 0 else 0x1000] * 33)  # fp16: 1 and 2^-11
        transport.run(ALL_REDUCE, F16, SUM, -1, 33, address(half), address(half), 1.0, 20.0)
        return set(data), set(half)

    for name in ("base", native.instruction_set()):
        before = native.instruction_set()
        assert native.set_instruction_set(name)
        assert on_all(connected(native, 3), call) == [({0x3F81}, {0x3C01})] * 3
        native.set_instruction_set(before)


@pytest.mark.parametrize(
    ("dtype", "code", "rows", "wanted"),
    [
        (U8, "B", ([200, 255, 1, 0], [200, 255, 2, 1]), [200, 255, 1, 0]),
        (I8, "b", ([100, -128, -1, 1], [100, -128, 0, -4]), [100, -128, -1, -2]),
        (I16, "h", ([30000, -32768, -1, 1], [30000, -32768, 0, -4]), [30000, -32768, -1, -2]),
        (I32, "i", ([7, -7, -1, 1], [0, 0, 0, -4]), [3, -4, -1, -2]),
        (I64, "q", ([2**40, -7, -1, 1], [2**40, 0, 0, -4]), [2**40, -4, -1, -2]),
    ],
)
def test_averages_of_integers_are_those_of_the_whole_sum_rounded_down(native, dtype, code, rows, wanted):
    def call(transport, rank):
        data = array.array(code, rows[rank] * 500)
        transport.run(ALL_REDUCE, dtype, AVG, -1, len(data), address(data), address(data), 1.0, 20.0)
        return list(data)

    best = native.instruction_set()
    for name in ("base", best):
        assert native.set_instruction_set(name)
        assert on_all(connected(native, 2), call) == [wanted * 500] * 2
    native.set_instruction_set(best)


def test_every_fp16_and_bf16_comes_through_each_instruction_set(native):
    patterns = array.array("H", range(1 << 16))
    best = native.instruction_set()
    for dtype, exponent in ((F16, 0x7C00), (BF16, 0x7F80)):
        quiet = (exponent >> 1 | exponent) ^ exponent  # the first bit of the mantissa
        nan = [each & 0x7FFF > exponent for each in patterns]
        for name in ("base", best):
            native.set_instruction_set(name)
            (transport,) = connected(native, 1)
            data = patterns[:]
            transport.run(ALL_REDUCE, dtype, SUM, -1, len(data), address(data), address(data), 1.0, 20.0)
            wanted = [each | quiet if is_nan else each for each, is_nan in zip(patterns, nan, strict=True)]
            assert list(data) == wanted
    native.set_instruction_set(best)


def test_a_difference_is_the_same_error_and_the_group_goes_on(native):
    transports = connected(native, 2)

    def differ(transport, rank):
        data = array.array("f", [1.0] * 5)
        transport.run(ALL_REDUCE, F32, SUM, -1, 4 + rank, address(data), address(data), 1.0, 20.0)

    def agree(transport, rank):
        transport.run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 20.0)
        return "well"

    one, two = on_all(transports, differ)
    assert isinstance(one, native.Mismatch) and str(one) == str(two)
    assert "4 elements" in str(one) and "5 elements" in str(one)
    assert on_all(transports, agree) == ["well"] * 2


def test_a_rank_that_does_not_come_is_named_and_the_group_is_lost(native):
    transports = connected(native, 2)
    with pytest.raises(native.Lost, match=r"barrier, number 1 .* timed out after 0.3 s: waiting for rank 1"):
        transports[0].run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 0.3)
    with pytest.raises(native.Lost, match="rank 1"):
        transports[0].run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 0.3)
    with pytest.raises(native.Lost, match=r"rank 0 .* gave up"):
        transports[1].run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 5.0)


def test_a_group_that_is_closed_wakes_the_others(native):
    transports = connected(native, 2)

    def call(transport, rank):
        if rank == 1:
            return transport.close()
        return transport.run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 20.0)

    found = on_all(transports, call)
    assert isinstance(found[0], native.Lost) and "destroyed" in str(found[0])


def test_a_group_may_be_closed_with_staged_work_under_way(native):
    count = 1 << 22  # many chunks: the lane's thread is at work on the staging block when the group closes
    rows = [array.array("d", bytes(8 * count)) for _ in range(2)]

    def call(transport, rank):
        at = address(rows[rank])
        job = transport.submit(ALL_REDUCE, F64, SUM, -1, count, at, at, 1.0, 20.0)
        transport.close()
        return transport.error_of(job)

    for said in on_all(connected(native, 2), call):
        assert said == "" or "destroyed" in said


@pytest.mark.parametrize("count", [0, 5, 5000])
@pytest.mark.parametrize("read", [True, False])
def test_messages_by_tag_and_in_order(native, read, count):
    def call(transport, rank):
        sent = [array.array("d", [10.0 * rank + i] * max(count, 1)) for i in range(3)]
        got = [array.array("d", bytes(8 * max(count, 1))) for _ in range(3)]
        jobs = [
            transport.message(True, 1 - rank, i % 2, F64, address(each), 8 * count, 20.0) for i, each in enumerate(sent)
        ]
        order = [1, 0, 2]
        jobs += [transport.message(False, 1 - rank, i % 2, F64, address(got[i]), 8 * count, 20.0) for i in order]
        for job in reversed(jobs):
            transport.wait_message(job, -1.0)
        return [set(each[:count]) for each in got]

    for rank, found in enumerate(on_all(connected(native, 2, read=read), call)):
        assert found == [({10.0 * (1 - rank) + i} if count else set()) for i in range(3)]


def test_a_message_that_cannot_be_read_is_an_error_on_both_ranks(native):
    def call(transport, rank):
        into = bytearray(4096)
        at = 64 if rank == 0 else (ctypes.c_char * 4096).from_buffer(into)  # nothing is mapped at 64
        job = transport.message(rank == 0, 1 - rank, 0, U8, at if rank == 0 else ctypes.addressof(at), 4096, 5.0)
        with pytest.raises(native.Lost) as caught:
            transport.wait_message(job, -1.0)
        return str(caught.value)

    sender, receiver = on_all(connected(native, 2, read=True), call)
    assert "send to rank 1" in sender and "Bad address" in sender
    assert "recv from rank 0" in receiver and "Bad address" in receiver


def test_a_receive_from_any_rank_ends_when_all_others_have_left(native):
    def call(transport, rank):
        if rank > 0:
            return transport.close()
        into = array.array("d", [0.0])
        job = transport.message(False, -1, 0, F64, address(into), 8, 5.0)
        with pytest.raises(native.Lost) as caught:
            transport.wait_message(job, -1.0)
        return str(caught.value)

    assert "destroyed" in on_all(connected(native, 3), call)[0]


def test_descriptors_over_a_socket(native):
    def call(transport, rank):
        memory = native.allocate(8 * LARGE)
        view = memoryview(memory).cast("B")[: 8 * LARGE].cast("d")
        for i in range(LARGE):
            view[i] = rank + 1.0
        transport.run(ALL_REDUCE, F64, SUM, -1, LARGE, memory.address, memory.address, 1.0, 20.0)
        return set(view)

    assert on_all(connected(native, 2, socket=True), call) == [{3.0}] * 2


def test_memory_that_all_have(native):
    def call(transport, rank):
        memory = transport.shared(100, 20.0)
        view = memoryview(memory)
        view[rank] = 7 + rank
        transport.run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 20.0)
        seen = bytes(view[:3])
        transport.run(BARRIER, 0, NONE, -1, 0, 0, 0, 1.0, 20.0)
        return seen, len(view) % mmap.PAGESIZE

    assert on_all(connected(native, 2), call) == [(b"\x07\x08\x00", 0)] * 2


def test_blocks_are_used_again_and_given_back(native):
    first = native.allocate(1 << 20)
    at = first.address
    assert at % 64 == 0
    assert native.is_ours(at, 1 << 20) and not native.is_ours(at, 1 << 40)
    del first
    again = native.allocate(1 << 20)
    assert again.address == at
    del again
    native.keep(0)
    try:
        large = native.allocate(8 << 20)
        memoryview(large)[:8] = b"12345678"
        spare = native.usage()[3]
        del large
        assert native.usage()[3] <= spare  # its pages went back to the system
        large = native.allocate(8 << 20)
        memoryview(large)[-8:] = b"12345678"
    finally:
        native.keep(256 << 20)


def test_memory_that_cannot_be_is_an_error(native):
    with pytest.raises(OSError):
        native.allocate(1 << 60)
    with pytest.raises(OSError):
        native.allocate(1 << 45)
