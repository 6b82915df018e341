"""simccl: every collective of c10d on 2 ranks of the simulated device against its definition, in every dtype."""

import pytest
import torch
import torch.distributed as dist

from polyscale.discovery import load
from polyscale.errors import PolyscaleError, RankError, UnsupportedError
from polyscale.testing import ranks

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SUMMED = [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8]
MOVED = [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
DEVICE = "sim"


def on_sim(function, *args):
    return ranks(2, accelerator="sim").run(function, *args)


def plugin_collectives(dtype):
    simccl = load("communication", "simccl")
    rank = dist.get_rank()
    buffer = simccl.allocate(6, dtype=dtype, device=torch.device(DEVICE, rank))
    mine = torch.arange(3).add(3 * rank).to(DEVICE, dtype)
    assert buffer.device == mine.device == torch.device(DEVICE, rank)
    simccl.all_gather(buffer, mine).wait()
    part = torch.empty(3, dtype=dtype, device=DEVICE)
    simccl.reduce_scatter(part, buffer.clone()).wait_host()
    summed, largest, least = mine.clone(), mine.clone(), mine.clone()
    for tensor, op in ((summed, "sum"), (largest, "max"), (least, "min")):
        simccl.all_reduce(tensor, op=op).wait()
    swapped = torch.empty(4, dtype=dtype, device=DEVICE)
    simccl.all_to_all(swapped, torch.arange(4).add(4 * rank).to(DEVICE, dtype)).wait()
    sent = mine.clone()
    simccl.broadcast(sent, 1).wait()
    peer = torch.empty(3, dtype=dtype, device=DEVICE)
    for work in [simccl.send(mine, 1 - rank), simccl.recv(peer, 1 - rank)]:
        work.wait()
    simccl.barrier().wait_host()
    return [tensor.cpu().double() for tensor in (buffer, part, summed, largest, least, swapped, sent, peer)]


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_collectives_of_the_plugin_do_what_they_are_defined_to_do(dtype):
    for rank, found in enumerate(on_sim(plugin_collectives, dtype)):
        first, second = [0, 1, 2], [3, 4, 5]
        part = [[0, 2, 4], [6, 8, 10]][rank]
        swapped = [[0, 1, 4, 5], [2, 3, 6, 7]][rank]
        expected = [first + second, part, [3, 5, 7], second, first, swapped, second, [second, first][rank]]
        assert [tensor.tolist() for tensor in found] == expected


def movements(dtype):
    """All movements of c10d; rank r's tensor holds r + 1 everywhere."""
    rank = dist.get_rank()
    mine = torch.full((2, 3), rank + 1).to(dtype).to(DEVICE)
    empty = lambda *shape: torch.zeros(shape).to(dtype).to(DEVICE)  # noqa: E731
    lists = [empty(2, 3), empty(2, 3)]
    dist.all_gather(lists, mine)
    whole = empty(4, 3)
    dist.all_gather_single(whole, mine)
    gathered = [empty(2, 3), empty(2, 3)] if rank == 1 else None
    dist.gather(mine, gathered, dst=1)
    scattered = empty(3)
    dist.scatter(scattered, list(whole[1:3].clone()) if rank == 0 else None, src=0)
    sent = mine.clone()
    dist.broadcast(sent, 0)
    uneven = empty(1 + rank, 3) if rank == 0 else empty(3, 3)
    # rank 0 sends 0 and 2 rows, rank 1 sends 1 and 1
    receives, sends = ([0, 1], [0, 2]) if rank == 0 else ([2, 1], [1, 1])
    dist.all_to_all_single(uneven, mine, receives, sends)
    pieces = [empty(2), empty(1)] if rank == 0 else [empty(1), empty(3)]
    given = [torch.full((n,), rank + 1).to(dtype).to(DEVICE) for n in ((2, 1) if rank == 0 else (1, 3))]
    dist.all_to_all(pieces, given)
    received = empty(2, 3)
    operations = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    anyone = empty(2, 3)
    if rank == 0:
        assert dist.recv(anyone) == 1
    else:
        dist.send(mine, 0)
    found = [*lists, whole, *(gathered or []), scattered, sent, uneven, *pieces, received, anyone]
    return [tensor.cpu().to(torch.complex64).real.flatten().tolist() for tensor in found]


@pytest.mark.parametrize("dtype", SUMMED + MOVED, ids=str)
def test_movements_of_c10d_carry_every_dtype(dtype):
    def once(values):
        return [1.0 if dtype == torch.bool and value else float(value) for value in values]

    ones, twos, nothing = [1] * 6, [2] * 6, [0] * 6
    for rank, found in enumerate(on_sim(movements, dtype)):
        expected = [ones, twos, ones + twos]
        expected += [ones, twos] if rank == 1 else []
        expected += [[1] * 3 if rank == 0 else [2] * 3, ones]
        expected += [[2] * 3] if rank == 0 else [[1] * 6 + [2] * 3]
        expected += [[1, 1], [2]] if rank == 0 else [[1], [2] * 3]
        expected += [[ones, twos][1 - rank], twos if rank == 0 else nothing]
        assert found == [once(values) for values in expected]


OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")


def reductions(dtype):
    rank = dist.get_rank()
    found = {}
    for name in OPERATIONS:
        operation = getattr(dist.ReduceOp, name)
        everywhere = torch.tensor([rank + 1, 4, 6 - 2 * rank]).to(dtype).to(DEVICE)
        at_root = everywhere.clone()
        dist.all_reduce(everywhere, operation)
        dist.reduce(at_root, 1, operation)
        part = torch.zeros(1, dtype=dtype, device=DEVICE)
        dist.reduce_scatter_single(part, torch.tensor([rank + 1, 6 - 2 * rank]).to(dtype).to(DEVICE), operation)
        uneven = torch.zeros(1 + rank, dtype=dtype, device=DEVICE)
        parts = list(torch.tensor([rank + 1, 4, 6 - 2 * rank]).to(dtype).to(DEVICE).split([1, 2]))
        dist.reduce_scatter(uneven, parts, operation)
        found[name] = [tensor.cpu().double().tolist() for tensor in (everywhere, at_root, part, uneven)]
    return found


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_reductions_are_the_arithmetic(dtype):
    one, two = [1, 4, 6], [2, 4, 4]
    arithmetic = {
        "SUM": [a + b for a, b in zip(one, two, strict=True)],
        "PRODUCT": [a * b for a, b in zip(one, two, strict=True)],
        "MIN": [min(pair) for pair in zip(one, two, strict=True)],
        "MAX": [max(pair) for pair in zip(one, two, strict=True)],
        "AVG": [(a + b) / 2 if dtype.is_floating_point else (a + b) // 2 for a, b in zip(one, two, strict=True)],
    }
    for rank, found in enumerate(on_sim(reductions, dtype)):
        for name, expected in arithmetic.items():
            own = [one, two][rank]
            parts = [expected[:1], expected[1:]][rank]
            scattered = [expected[[0, 2][rank]]]
            assert found[name] == [expected, expected if rank == 1 else own, scattered, parts], name


def special_reductions():
    rank = dist.get_rank()
    bits = torch.tensor([1 + rank, 6], device=DEVICE)
    found = []
    for operation in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = bits.clone()
        dist.all_reduce(tensor, operation)
        found.append(tensor.tolist())
    flags = torch.tensor([True, False, rank == 0], device=DEVICE)
    dist.all_reduce(flags)
    scaled = torch.full((4,), rank + 1.0, device=DEVICE)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.25))
    part, whole = torch.empty(2, device=DEVICE), torch.arange(4.0, device=DEVICE)
    dist.reduce_scatter_single(part, whole, dist._make_nccl_premul_sum(0.5))
    for tensor, operation in (
        (torch.ones(2, dtype=torch.int16, device=DEVICE), dist.ReduceOp.SUM),
        (torch.ones(2, device=DEVICE), dist.ReduceOp.BAND),
        (flags, dist.ReduceOp.AVG),
    ):
        with pytest.raises(RuntimeError, match="simccl does not support reductions"):
            dist.all_reduce(tensor, operation)
    return [*found, flags.tolist(), scaled.tolist(), part.tolist(), whole.tolist()]


def test_bitwise_operations_bool_and_a_factor_before_the_sum():
    for rank, found in enumerate(on_sim(special_reductions)):
        part = [[0.0, 1.0], [2.0, 3.0]][rank]
        expected = [[0, 6], [3, 6], [3, 0], [True, False, True], [0.75] * 4, part, [0.0, 1.0, 2.0, 3.0]]
        assert found == expected


def coalesced():
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank = dist.get_rank()
    tensors = [torch.full((n,), rank + 1.0, device=DEVICE) for n in (1, 2, 3)]
    with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    outputs = [torch.empty(2 * n, device=DEVICE) for n in (1, 2)]
    with _coalescing_manager():
        for output, tensor in zip(outputs, tensors, strict=False):
            dist.all_gather_single(output, tensor)
    parts = [torch.empty(n, device=DEVICE) for n in (1, 2)]
    with _coalescing_manager(async_ops=True) as manager:
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_single(part, output)
    manager.wait()
    return [tensor.tolist() for tensor in (*tensors, *outputs, *parts)]


def test_coalesced_collectives():
    expected = [[3.0], [3.0] * 2, [3.0] * 3, [3.0] * 2, [3.0] * 4, [6.0], [6.0] * 2]
    assert on_sim(coalesced) == [expected, expected]


def host_tensors_and_objects():
    rank = dist.get_rank()
    host = torch.full((3,), float(rank + 1))
    dist.all_reduce(host)
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    values = [None, "from 1"] if rank == 1 else [None, None]
    dist.broadcast_object_list(values, 1)
    dist.barrier()
    even = dist.new_group([0, 1])
    tensor = torch.ones(2, device=DEVICE)
    dist.all_reduce(tensor, group=even)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    dist.all_reduce(tensor, group=alone)
    return host.tolist(), found, values, tensor.tolist(), dist.get_backend(), host.device.type


def test_host_tensors_objects_and_groups_beside_the_device():
    expected = ([3.0] * 3, [{"rank": 0}, {"rank": 1}], [None, "from 1"], [2.0] * 2, "cpu:gloo,sim:simccl", "cpu")
    assert on_sim(host_tensors_and_objects) == [expected, expected]


def functional():
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (2,))
    rank = dist.get_rank()
    mine = torch.full((2,), rank + 1.0, device=DEVICE)
    found = [funcol.all_reduce(mine, "avg", mesh), funcol.all_gather_single(mine, 0, mesh)]
    found.append(funcol.reduce_scatter_single(torch.arange(4.0, device=DEVICE), "sum", 0, mesh))
    found.append(funcol.broadcast(mine, 1, mesh))
    found.append(funcol.all_to_all_single(mine, [1, 1], [1, 1], mesh))
    whole = torch.arange(12.0, device=DEVICE).view(4, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    sums = (rows.sum(0)).redistribute(mesh, [Replicate()])
    assert rows.sum(0).placements == (Partial("sum"),)
    found += [columns.to_local(), columns.full_tensor(), sums.to_local()]
    return [tensor.cpu().flatten().tolist() for tensor in found]


def test_functional_collectives_and_dtensor():
    columns = [[0.0, 1, 3, 4, 6, 7, 9, 10], [2.0, 5, 8, 11]]
    for rank, found in enumerate(on_sim(functional)):
        expected = [[1.5, 1.5], [1.0, 1, 2, 2], [[0.0, 2], [4.0, 6]][rank], [2.0, 2], [1.0, 2]]
        expected += [columns[rank], [float(n) for n in range(12)], [18.0, 22, 26]]
        assert found == expected


def mismatches():
    rank = dist.get_rank()
    simccl = load("communication", "simccl")
    tensor = torch.ones(3 + rank, device=DEVICE)
    said = []
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(torch.ones(2, device=DEVICE, dtype=[torch.float32, torch.float64][rank])),
        lambda: dist.broadcast(torch.ones(2, device=DEVICE), rank),
        lambda: dist.all_reduce(torch.ones(4, device=DEVICE)) if rank else dist.barrier(),
        lambda: dist.all_reduce(torch.ones(4, device=DEVICE), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]),
        lambda: dist.all_gather_single(torch.empty(2 * tensor.numel(), device=DEVICE), tensor),
        lambda: dist.all_to_all_single(tensor, tensor.clone(), [1, 2 + rank], [1, 2 + rank]),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
    with pytest.raises(RankError, match="call different collectives"):
        simccl.all_reduce(tensor).wait()
    dist.all_reduce(tensor[:3])
    return said, tensor[:3].tolist()


def test_what_ranks_call_differently_is_an_error_on_both_and_the_group_goes_on():
    (one, summed), (two, _) = on_sim(mismatches)
    assert one == two
    assert summed == [2.0] * 3
    assert "rank 0 all_reduce (sum) of 3 elements of float32, rank 1 all_reduce (sum) of 4 elements" in one[0]
    assert "elements of float32, rank 1 all_reduce (sum) of 2 elements of float64" in one[1]
    assert "with root 0, rank 1 broadcast of 2 elements of float32 with root 1" in one[2]
    assert "rank 0 barrier, rank 1 all_reduce" in one[3]
    assert "(sum)" in one[4] and "(max)" in one[4]
    assert "rank 0 all_gather of 3" in one[5]
    assert "sends 2 elements to rank 1, which expects 1" in one[6]


def refusals():
    strided = torch.ones(4, 2, device=DEVICE).t()
    two, three = torch.zeros(2, device=DEVICE), torch.zeros(3, device=DEVICE)
    for call in (
        lambda: dist.all_reduce(strided),
        lambda: dist.all_gather_single(three, two),
        lambda: dist.reduce_scatter_single(two, three),
        lambda: dist.all_gather_single(torch.zeros(4), two),
        lambda: dist.all_gather([two, three], two),
        lambda: dist.all_to_all_single(three, three.clone()),
        lambda: dist.all_to_all([two] * 2, [two] * (3 + dist.get_rank())),
        lambda: dist.all_to_all([two] * 3, [two] * 3),
        lambda: dist.all_to_all([two, two.long()], [two] * 2),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    simccl = load("communication", "simccl")
    with pytest.raises(PolyscaleError, match="not contiguous"):
        simccl.all_reduce(strided)
    with pytest.raises(UnsupportedError, match="int16 over simccl"):
        simccl.all_reduce(three.to(torch.int16))
    dist.all_reduce(two)
    return two.tolist()


def test_bad_calls_are_refused_on_this_rank_before_anything_is_sent():
    assert on_sim(refusals) == [[0.0, 0.0]] * 2
