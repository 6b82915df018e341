"""zero with tensor parallelism (DTensor parameters) and with replicas of shards, against one process of plain torch."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

pytestmark = pytest.mark.long
WIDTH, MICRO, STEPS = 8, 2, 3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _net(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


def _inputs(step, part, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(MICRO, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def _loss(output):
    return (output.double() - 1).square().mean()


def _reference(parts, clip):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model(torch.cat([_inputs(step, part) for part in range(parts)]))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, norms


def _config(stage, communication, **extra):
    base = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.05,
        "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
    }
    return base | extra


def _train(engine, part, dtype=torch.float64):
    norms = []
    for step in range(STEPS):
        engine.backward(_loss(engine(_inputs(step, part, dtype))))
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def _spread(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    # Replicated DTensors in the middle of plain tensors: their gradients come as partial sums.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    join = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    for style in (cut, SequenceParallel(sequence_dim=0), join):
        parallelize_module(model.norm, mesh, style)


def _tensor_parallel(stage, communication, folder, dtype, extra):
    topology = polyscale.Topology.build(dp_shard=2, tp=2)
    model = _net(dtype)
    _spread(model, topology.mesh("tp"))
    engine = polyscale.initialize(model, config=_config(stage, communication, **extra), topology=topology)
    norms = _train(engine, topology.dp_rank, dtype)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16 if "bf16" in extra else dtype}
    weights = dict(engine.parameters_store.iter_full())
    engine.save(folder, overwrite=True)
    engine.export(f"{folder}/model.safetensors")
    report = engine.load(folder)
    again = dict(engine.parameters_store.iter_full())
    engine.close()
    topology.close()
    return weights, norms, again, report.restored


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensor_parallel_blocks(stage, communication, tmp_path):
    from safetensors.torch import load_file

    expected, expected_norms = _reference(2, 0.05)
    for weights, norms, again, restored in ranks(4, backend=communication).run(
        _tensor_parallel, stage, communication, str(tmp_path), torch.float64, {}
    ):
        assert norms == pytest.approx(expected_norms, rel=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
            assert torch.equal(weights[name], again[name])
        assert "optimizer" in restored
    exported = load_file(str(tmp_path / "model.safetensors"))
    assert all(torch.equal(exported[name], weights[name]) for name in expected)
    for found in ranks(2, backend=communication).run(_load_plain, communication, str(tmp_path)):
        assert all(torch.equal(found[name], weights[name]) for name in expected)


def _load_plain(communication, folder):
    with polyscale.initialize(_net(), config=_config(3, communication)) as engine:
        engine.load(folder)
        return dict(engine.parameters_store.iter_full())


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_blocks_in_bf16(stage, communication, tmp_path):
    expected, _ = _reference(2, 0.05)
    extra = {"bf16": {"enabled": True}}
    for weights, _, again, _ in ranks(4, backend=communication).run(
        _tensor_parallel, stage, communication, str(tmp_path), torch.float32, extra
    ):
        for name, value in expected.items():
            assert weights[name].dtype == torch.float32
            torch.testing.assert_close(weights[name].double(), value, rtol=0, atol=5e-2, msg=name)
            assert torch.equal(weights[name], again[name])


def _hybrid(stage, communication, replicate):
    config = _config(stage, communication, topology={"dp_replicate": replicate, "dp_shard": -1})
    with polyscale.initialize(_net(), config=config) as engine:
        norms = _train(engine, engine.topology.dp_rank)
        return norms, dict(engine.parameters_store.iter_full()), dict(engine.parameters_store.iter_full("exp_avg"))


@pytest.mark.parametrize(("world", "replicate"), [(4, 2), (4, 4), (2, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_shards(stage, world, replicate, communication):
    expected, expected_norms = _reference(world, 0.05)
    for norms, weights, moments in ranks(world, backend=communication).run(_hybrid, stage, communication, replicate):
        assert norms == pytest.approx(expected_norms, rel=1e-10)
        assert moments.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)


class Branches(nn.Module):
    """Four layers, of which each rank uses two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x, used):
        for number in used:
            x = x + self.layers[number](x)
        return x


USED = [(0, 1), (0, 1), (3, 0), (2, 3)]


def _branches(stage, communication):
    torch.manual_seed(1)
    config = _config(stage, communication, topology={"dp_replicate": 2, "dp_shard": -1}, gradient_clipping=0.0)
    config["backends"]["options"] = {"zero": {"unit_classes": ["Linear"]}}
    with polyscale.initialize(Branches().double(), config=config) as engine:
        rank = engine.topology.dp_rank
        for step in range(STEPS):
            engine.backward(_loss(engine(_inputs(step, rank), USED[rank])))
            engine.step()
        return dict(engine.parameters_store.iter_full())


@pytest.mark.parametrize("stage", [1, 2])
def test_replicas_that_use_different_layers(stage, communication):
    torch.manual_seed(1)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(4):
            (_loss(model(_inputs(step, rank), USED[rank])) / 4).backward()
        optimizer.step()
    for found in ranks(4, backend=communication).run(_branches, stage, communication):
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-10, msg=name)
