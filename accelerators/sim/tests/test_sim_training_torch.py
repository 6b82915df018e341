"""What torch itself builds on a device and its backend: fully_shard with offload, tensor parallelism, both together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks

WIDTH, STEPS = 8, 3


def on_sim(function, *args, world=2):
    return ranks(world, accelerator="sim").run(with_late, function, args)


def with_late(function, args):
    """With everything late: what passes forgets no wait."""
    from polyscale_sim import faults

    faults.late(True)
    try:
        return function(*args)
    finally:
        faults.late(False)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net():
    torch.manual_seed(1)
    return Net().double()


def batch(step, part):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(output):
    return (output - 1).square().mean()


def reference(parts):
    """One process of plain torch on the joined batch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(torch.cat([batch(step, part) for part in range(parts)]))).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def fully_sharded(reshard, offload, prefetch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("sim", (2,))
    policy = OffloadPolicy() if offload is None else CPUOffloadPolicy(pin_memory=offload == "pinned")
    model = net().to("sim")  # fully_shard itself cannot move parameters to a device that is not in torch
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    if prefetch:
        model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks[1:]))
        model.blocks[2].set_modules_to_backward_prefetch(list(model.blocks[:2]))
    shard = next(model.parameters()).to_local()
    assert shard.device.type == ("sim" if offload is None else "cpu")
    assert shard.is_pinned() == (offload == "pinned")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(batch(step, dist.get_rank()).to("sim"))).backward()
        optimizer.step()
    whole = {name: value.data.to("sim").full_tensor().cpu() for name, value in model.named_parameters()}
    return whole


@pytest.mark.parametrize("offload", [None, "pageable", "pinned"])
@pytest.mark.parametrize(("reshard", "prefetch"), [(True, False), (False, False), (True, True)])
def test_fully_shard_with_late_copies_and_collectives(reshard, offload, prefetch):
    expected = reference(2)
    for found in on_sim(fully_sharded, reshard, offload, prefetch):
        close(found, expected)


def mixed_precision():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("sim", (2,))
    model = net().float().to("sim")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(4.0)  # torch multiplies before the sum (PREMUL_SUM)
    loss_of(model(batch(0, dist.get_rank()).float().to("sim"))).backward()
    return {name: value.grad.full_tensor().cpu().double() for name, value in model.named_parameters()}


def test_fully_shard_in_bf16_with_a_factor_before_the_sum():
    model = net()
    loss_of(model(torch.cat([batch(0, part) for part in range(2)]))).backward()
    for found in on_sim(mixed_precision):
        for name, parameter in model.named_parameters():
            scale = parameter.grad.abs().max()
            assert (2 * found[name] - parameter.grad).abs().max() < 0.05 * scale, name


def tensor_parallel(stage):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    topology = polyscale.Topology.build(dp_shard=2, tp=2, device_type="sim")
    model = net().to("sim")
    for block in model.blocks:
        parallelize_module(block, topology.mesh("tp"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "sim"},
    }
    with polyscale.initialize(model, config=config, topology=topology) as engine:
        for step in range(STEPS):
            engine.backward(loss_of(engine(batch(step, topology.dp_rank))))
            engine.step()
        return {name: value.cpu() for name, value in engine.parameters_store.iter_full()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tensor_parallel_under_data_parallel(stage):
    expected = reference(2)
    for found in on_sim(tensor_parallel, stage, world=4):
        close(found, expected)
