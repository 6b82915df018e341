"""What comes with torch and transformers: recompute, torch.compile, normalisation; and small numbers of the options."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks, tiny_gpt2

STAGES, WIDTH, STEPS = (1, 2, 3), 6, 3


def _config(stage, communication, **extra):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
    }
    return base | extra


def _close(found, expected):
    for stage, weights in found.items():
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=f"stage {stage}: {name}")


# GPT-2 of transformers, which recomputes its blocks.


def _gpt2():
    torch.manual_seed(1)
    return tiny_gpt2(layers=2, width=8, vocabulary=31, positions=8).double()


def _tokens(step, rank):
    return torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def _train_gpt2(communication, recomputes):
    found = {}
    for reentrant in recomputes:
        for stage in STAGES:
            model = _gpt2()
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})  # the older name is deprecated since transformers 5
            model.train()
            with polyscale.initialize(model, config=_config(stage, communication)) as engine:
                for step in range(STEPS):
                    tokens = _tokens(step, dist.get_rank())
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                    engine.step()
                found[reentrant, stage] = dict(engine.parameters_store.iter_full())
    return found


@pytest.mark.long
def test_gpt2_with_recompute(communication):
    model = _gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(2):
            tokens = _tokens(step, rank)
            (model(input_ids=tokens, labels=tokens).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    for found in ranks(2, backend=communication).run(_train_gpt2, communication, (False, True)):
        _close(found, expected)


# Blocks that are compiled, or hold buffers.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Net(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _net(block=Block):
    torch.manual_seed(1)
    return Net(block).double()


def _input(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9 * step + rank)).double()


def _reference():
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(2):
            (model(_input(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _compiled(communication, how):
    found = {}
    for stage in STAGES:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.compile, about itself
            model = _net()
            for number, block in enumerate(model.blocks):
                if how == "in place":
                    block.compile(backend="aot_eager")
                else:
                    model.blocks[number] = torch.compile(block, backend="aot_eager")
            with polyscale.initialize(model, config=_config(stage, communication)) as engine:
                graphs = []
                for step in range(STEPS):
                    engine.backward(engine(_input(step, dist.get_rank())).square().mean())
                    engine.step()
                    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
                assert graphs[0] > 0 and len(set(graphs)) == 1, "nothing is compiled again"
                with torch.no_grad():
                    engine(_input(0, 0))
                found[stage] = dict(engine.parameters_store.iter_full())
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_compiled_blocks(communication, how):
    for found in ranks(2, backend=communication).run(_compiled, communication, how, timeout=200):
        _close(found, _reference())


def _normed(communication):
    found = {}
    for stage in STAGES:
        with polyscale.initialize(_net(Normed), config=_config(stage, communication)) as engine:
            for step in range(STEPS):
                engine.backward(engine(_input(step, dist.get_rank())).square().mean())
                engine.step()
            buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
            found[stage] = dict(engine.parameters_store.iter_full()), buffers
    return found


@pytest.mark.long
def test_batch_norm_keeps_the_statistics_of_its_rank(communication):
    models = [_net(Normed) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(_input(step, rank)).square().mean().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            one.grad = (one.grad + other.grad) / 2
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for rank, found in enumerate(ranks(2, backend=communication).run(_normed, communication)):
        expected = {name: value.detach() for name, value in models[rank].named_parameters()}
        _close({stage: weights for stage, (weights, _) in found.items()}, expected)
        for _, buffers in found.values():
            for name, value in models[rank].named_buffers():
                torch.testing.assert_close(buffers[name], value, rtol=0, atol=1e-12)


# An idle head.


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Block()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.trunk(x))


def _idle(communication):
    found = []
    for stage in STAGES:
        torch.manual_seed(1)
        optimizer = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
        config = _config(stage, communication, optimizer=optimizer)
        with polyscale.initialize(Heads().double(), config=config) as engine:
            states = []
            for step in range(4):
                engine.backward(engine(_input(step, dist.get_rank()), step % 2).square().mean())
                engine.step()
                store = engine.parameters_store
                kinds = ("parameter", "exp_avg", "exp_avg_sq", "step")
                states.append({kind: store.get_full("heads.1.weight", kind) for kind in kinds})
            found.append(states)
    return found


def test_an_idle_head_and_its_states_stay_as_they_are(communication):
    for found in ranks(2, backend=communication).run(_idle, communication):
        for first, second, third, fourth in found:
            assert first["exp_avg"] is None and second["exp_avg"] is not None
            for kind, value in second.items():
                assert torch.equal(value, third[kind]), kind
                assert not torch.equal(value, fourth[kind]), kind
