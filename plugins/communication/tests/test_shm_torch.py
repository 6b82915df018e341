"""What torch builds on groups, over the backend under test, against one process: FSDP2, DDP, DTensor, TP, pipelines."""

import pytest
import torch
import torch.distributed as dist
from shm_ranks import WORLDS, on_ranks
from torch import nn

STEPS = 3
WIDTH, ROWS = 12, 8


def make_model(depth=3):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(depth)]
    return nn.Sequential(*blocks).double()


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def mine(batch):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(model, forward, share, steps=STEPS):
    """Adam on the mean square of the output of ``share(batch)``; the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = forward(share(batch_of(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone():
    model = make_model()
    train(model, model, lambda batch: batch)
    return [parameter.detach() for parameter in model.parameters()]


def agrees(found):
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(found, alone(), strict=True))


def whole(parameter):
    data = parameter.detach()
    return data.full_tensor() if hasattr(data, "full_tensor") else data


def fsdp2(reshard):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    train(model, model, mine)
    return agrees([whole(parameter) for parameter in model.parameters()])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("reshard", [pytest.param(False, marks=pytest.mark.long), True])
def test_fsdp2(world, reshard):
    assert on_ranks(world, fsdp2, reshard) == [True] * world


def hybrid_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model, mine)
    return agrees([whole(parameter) for parameter in model.parameters()])


@pytest.mark.long
def test_fsdp2_on_a_mesh_of_replicas_and_shards():
    assert on_ranks(4, hybrid_fsdp2) == [True] * 4


def narrow_fsdp2():
    """bf16 parameters and reductions: near fp64, because sums are accumulated in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return train(model, model, lambda batch: mine(batch).float())


def test_fsdp2_in_bf16():
    found = on_ranks(2, narrow_fsdp2)
    model = make_model()
    halves = [batch_of(0).chunk(2)[rank] for rank in range(2)]
    for losses, half in zip(found, halves, strict=True):
        assert losses[0] == pytest.approx(model(half).square().mean().item(), rel=0.05)


def torch_ddp(buckets_mb, hooked):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    model = make_model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=buckets_mb)
    if hooked:
        wrapped.register_comm_hook(None, allreduce_hook)
    train(model, wrapped, mine)
    return agrees(list(model.parameters()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torch_s_own_ddp(world, hooked):
    assert on_ranks(world, torch_ddp, 0.002, hooked) == [True] * world


def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for shape in ((8, 4), (7, 5), (1, 3), (3, 2, 5)):
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        placements = [Replicate(), Shard(0), Shard(1)]
        for before in placements:
            for after in placements:
                spread = distribute_tensor(full, mesh, [before])
                moved = spread.redistribute(mesh, [after])
                right = distribute_tensor(full, mesh, [after]).to_local()
                if not torch.equal(moved.to_local(), right) or not torch.equal(moved.full_tensor(), full):
                    wrong.append((shape, before, after))
        partial = DTensor.from_local(full + rank, mesh, [Partial()], run_check=False)
        total = full * world + world * (world - 1) / 2
        for after in placements:
            if not torch.equal(partial.redistribute(mesh, [after]).full_tensor(), total):
                wrong.append((shape, "partial", after))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor_redistribution(world):
    assert on_ranks(world, dtensors) == [[]] * world


def functional():
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    own = torch.full((2,), rank + 1.0)
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    found = [funcol.all_reduce(own, "sum", mesh), gather(own, 0, mesh)]
    found += [scatter(torch.arange(4.0), "sum", 0, mesh), funcol.broadcast(own, 1, mesh)]
    found += [funcol.all_to_all_single(own, [1, 1], [1, 1], mesh)]
    found += funcol.all_reduce_coalesced([own, own * 2], "sum", mesh)
    return [(tensor + 0).tolist() for tensor in found]


def test_functional_collectives():
    for rank, found in enumerate(on_ranks(2, functional)):
        scattered = [[0.0, 2.0], [4.0, 6.0]][rank]
        assert found == [[3.0] * 2, [1.0, 1, 2, 2], scattered, [2.0] * 2, [1.0, 2], [3.0] * 2, [6.0] * 2]


def autograd_through_collectives():
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh

    gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
    mesh = init_device_mesh("cpu", (2,))
    own = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    (gather(own, 0, mesh) ** 2).sum().backward()
    return own.grad.tolist()


def test_autograd_through_an_all_gather():
    assert on_ranks(2, autograd_through_collectives) == [[4.0, 4.0], [8.0, 8.0]]


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, model, lambda batch: batch)
    return agrees([whole(parameter) for parameter in model.parameters()])


@pytest.mark.parametrize("world", WORLDS)
def test_pairs_of_linears_in_tensor_parallel(world):
    assert on_ranks(world, tensor_parallel) == [True] * world


def pipelined(schedule):
    """Stage r of the model on rank r; the losses on the last, the weights of its own stage on each."""
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(depth=2 * world)
    part = model[2 * rank : 2 * rank + 2]
    stage = pipelining.PipelineStage(part, rank, world, torch.device("cpu"))
    run = getattr(pipelining, schedule)(
        stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean()
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        batch, losses = batch_of(step), []
        if rank == 0:
            run.step(batch)
        elif rank == world - 1:
            run.step(target=torch.zeros_like(batch), losses=losses)
        else:
            run.step()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in part.parameters()], [loss.item() for loss in losses]


def unpipelined(world):
    model = make_model(depth=2 * world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        losses = [part.square().mean() for part in model(batch_of(step)).chunk(4)]
        (sum(losses) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), [loss.item() for loss in losses]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", pytest.param("ScheduleGPipe", marks=pytest.mark.long)])
def test_pipelines(world, schedule):
    found = on_ranks(world, pipelined, schedule)
    weights, losses = unpipelined(world)
    for got, right in zip([each for part, _ in found for each in part], weights, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)
    assert found[-1][1] == pytest.approx(losses, rel=1e-10)


def checkpointed(folder):
    """Save sharded over all ranks with torch.distributed.checkpoint, load into a model of other numbers."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded():
        model = make_model()
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    first = sharded()
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    first(mine(batch_of(0))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, states = get_state_dict(first, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    second = sharded()
    other = torch.optim.Adam(second.parameters(), lr=0.01)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    empty, blank = get_state_dict(second, other)
    state = {"model": empty, "optimizer": blank}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(second, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    moments = zip(optimizer.state.values(), other.state.values(), strict=True)
    equal = [torch.equal(whole(a), whole(b)) for a, b in pairs]
    equal += [torch.equal(whole(a["exp_avg"]), whole(b["exp_avg"])) for a, b in moments]
    return all(equal)


def test_distributed_checkpoints(tmp_path):
    assert on_ranks(2, checkpointed, str(tmp_path / "saved")) == [True] * 2
