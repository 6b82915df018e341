"""Data parallelism with what it must compose with: tensor parallelism, hybrid sharding, activation recompute."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyscale
from polyscale.testing import ranks

WIDTH, MICRO, STEPS = 8, 2, 3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


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


def _net():
    torch.manual_seed(1)
    return Net().double()


def _inputs(step, part):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(MICRO, WIDTH, generator=generator, dtype=torch.float64)


def _loss(output):
    return (output - 1).square().mean()


def _reference(parts, clip):
    """One process of plain torch on the joined batch."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model(torch.cat([_inputs(step, part) for part in range(parts)]))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, norms


def _config(stage, clip, **extra):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"data_parallel": "ddp" if stage == 0 else "fsdp2"},  # zero has tests of its own
        "gradient_clipping": clip,
        **extra,
    }


def _train(engine, part):
    norms = []
    for step in range(STEPS):
        engine.backward(_loss(engine(_inputs(step, part))))
        engine.step()
        norms.append(engine.grad_norm)
    return norms


def _tensor_parallel(stage, clip, folder):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    topology = polyscale.Topology.build(dp_shard=2, tp=2)
    model = _net()
    for block in model.blocks:
        parallelize_module(block, topology.mesh("tp"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    engine = polyscale.initialize(model, config=_config(stage, clip), topology=topology)
    norms = _train(engine, topology.dp_rank)
    weights = dict(engine.parameters_store.iter_full())
    engine.save(folder, overwrite=True)
    report = engine.load(folder)
    again = dict(engine.parameters_store.iter_full())
    engine.close()
    topology.close()
    return weights, norms, again, report.restored


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_parallel_blocks_under_data_parallelism(stage, tmp_path):
    clip = 0.05
    expected, expected_norms = _reference(2, clip)
    for weights, norms, again, restored in ranks(4).run(_tensor_parallel, stage, clip, str(tmp_path)):
        assert norms == pytest.approx(expected_norms, rel=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)
            assert torch.equal(weights[name], again[name])
        assert "optimizer" in restored


def _load_plain(folder):
    with polyscale.initialize(_net(), config=_config(2, 0.0)) as engine:
        engine.load(folder)
        return dict(engine.parameters_store.iter_full())


def test_a_checkpoint_of_tensor_parallel_ranks_loads_without(tmp_path):
    saved = ranks(4).run(_tensor_parallel, 3, 0.0, str(tmp_path))[0][0]
    for found in ranks(2).run(_load_plain, str(tmp_path)):
        for name, value in saved.items():
            assert torch.equal(value, found[name]), name


def _hybrid(stage):
    config = _config(stage, 0.05, topology={"dp_replicate": 2, "dp_shard": -1})
    with polyscale.initialize(_net(), config=config) as engine:
        assert (engine.topology.size("dp_replicate"), engine.topology.size("dp_shard")) == (2, 2)
        return dict(engine.parameters_store.iter_full()) and _train(engine, engine.topology.dp_rank), dict(
            engine.parameters_store.iter_full()
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_sharding(stage):
    expected, expected_norms = _reference(4, 0.05)
    for norms, weights in ranks(4).run(_hybrid, stage):
        assert norms == pytest.approx(expected_norms, rel=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)


class Recomputed(nn.Module):
    """Calls each block ``calls`` times under activation recompute."""

    def __init__(self, calls, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.calls, self.reentrant = calls, reentrant

    def forward(self, x):
        for block in self.blocks:
            for _ in range(self.calls):
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def _recompute(stage, calls, reentrant):
    torch.manual_seed(1)
    model = Recomputed(calls, reentrant).double()
    try:
        with polyscale.initialize(model, config=_config(stage, 0.0)) as engine:
            inputs = _inputs(0, dist.get_rank()).requires_grad_()
            engine.backward(_loss(engine(inputs)))
            engine.step()
            return dict(engine.parameters_store.iter_full())
    except polyscale.UnsupportedError as error:
        return str(error)


def _recompute_reference(calls):
    torch.manual_seed(1)
    model = Recomputed(calls, False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    _loss(model(torch.cat([_inputs(0, part) for part in range(2)]))).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_right_or_refused(calls, reentrant):
    expected = _recompute_reference(calls)
    for stage in (0, 1, 2, 3):
        for found in ranks(2).run(_recompute, stage, calls, reentrant):
            if reentrant and calls == 2 and stage > 0:
                assert "use_reentrant=False" in found and "blocks.0" in found
                continue
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=f"stage {stage}: {name}")
