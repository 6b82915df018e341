"""Checkpoints go from any stage of zero to any other, to ddp and fsdp2 and back; and what the store gives and takes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks, tiny_gpt2

BATCH, BEFORE, AFTER, WIDTH = 12, 2, 3, 5
KINDS = {
    "zero1": ("zero", 1),
    "zero2": ("zero", 2),
    "zero3": ("zero", 3),
    "ddp": ("ddp", 0),
    "fsdp1": ("fsdp2", 1),
    "fsdp3": ("fsdp2", 3),
}
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + self.frozen(x)


class Net(nn.Module):
    """A tied head, a convolution (4 dimensions), parameters of 13, 1 and 0 elements, an idle layer, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.mix = nn.Conv2d(1, 1, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.odd = nn.Parameter(torch.rand(13))
        self.scalar = nn.Parameter(torch.tensor(0.9))
        self.empty = nn.Parameter(torch.empty(4, 0))
        self.idle = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.mix(hidden[None, None])[0, 0] * 0.1
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden * self.scalar) + self.odd[:11] * self.odd[-1] + self.empty.sum()
        return nn.functional.cross_entropy(logits, (tokens + 1) % 11)


def _net():
    torch.manual_seed(4)
    return Net().double()


def _engine(kind, communication, optimizer="AdamW", **extra):
    plugin, stage = KINDS[kind]
    if not (dist.is_initialized() and plugin == "zero"):
        communication = "auto"
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "backends": {"accelerator": "cpu", "data_parallel": plugin, "communication": communication},
        **extra,
    }
    return polyscale.initialize(_net(), config=config)


def _go_on(engine, steps):
    """Train with one row of convolution per rank left out of account: each rank takes whole batches in turn."""
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.steps)
        tokens = torch.randint(0, 11, (4, BATCH // 4), generator=generator)
        rank, world = dist.get_rank(), dist.get_world_size()
        own = tokens[rank * 4 // world : (rank + 1) * 4 // world]
        micro = [engine(row) for row in own]
        loss = sum(micro) / len(micro)
        engine.backward(loss)
        assert engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total / world))
    return losses


def _state(engine, names=("parameter",)):
    return {kind: dict(engine.parameters_store.iter_full(kind)) for kind in names}


def _states(engine):
    names = {n for fqn in engine.parameters_store.infos for n in engine.parameters_store.state_names(fqn)}
    return _state(engine, ("parameter", *sorted(names)))


def _save(folder, communication, kinds, optimizer):
    found = {}
    for kind in kinds:
        with _engine(kind, communication, optimizer) as engine:
            _go_on(engine, BEFORE)
            engine.save(f"{folder}/{kind}")
            engine.export(f"{folder}/{kind}.safetensors")
            saved = _states(engine)
            found[kind] = saved, _go_on(engine, AFTER), _states(engine)
    return found


def _load(folder, communication, pairs, optimizer):
    found = {}
    for saved, kind in pairs:
        with _engine(kind, communication, optimizer) as engine:
            report = engine.load(f"{folder}/{saved}")
            assert "optimizer" in report.restored
            loaded = _states(engine)
            found[saved, kind] = loaded, _go_on(engine, AFTER), _states(engine)
    return found


def _same(one, other, exactly, what):
    assert one.keys() == other.keys(), what
    for kind in one:
        assert one[kind].keys() == other[kind].keys(), (what, kind, one[kind].keys() ^ other[kind].keys())
        for name, value in one[kind].items():
            tolerance = 0 if exactly else 1e-10
            torch.testing.assert_close(
                other[kind][name], value, rtol=0, atol=tolerance, msg=f"{what}: {kind} of {name}"
            )


def _exchange(folder, communication, worlds, pairs, optimizer):
    first, second = worlds
    kinds = list(dict.fromkeys(saved for saved, _ in pairs))
    saved = ranks(first, backend=communication).run(_save, str(folder), communication, kinds, optimizer, timeout=400)[0]
    for found in ranks(second, backend=communication).run(
        _load, str(folder), communication, pairs, optimizer, timeout=400
    ):
        for (name, kind), (loaded, losses, last) in found.items():
            what = f"{name} on {first} ranks to {kind} on {second}"
            _same(saved[name][0], loaded, True, what)
            assert losses == pytest.approx(saved[name][1], rel=1e-10), what
            _same(saved[name][2], last, False, what)
    return saved


QUICK = [("ddp", "zero3"), ("zero3", "ddp"), ("zero1", "fsdp3")]
SOME = [*QUICK, ("zero1", "zero3"), ("zero3", "zero2"), ("zero2", "ddp"), ("fsdp3", "zero1"), ("zero3", "fsdp3")]
EVERY = [(a, b) for a in KINDS for b in KINDS if "zero" in a + b]


def test_checkpoints_are_exchanged(tmp_path, communication):
    from safetensors.torch import load_file

    saved = _exchange(tmp_path, communication, (2, 2), QUICK, "AdamW")
    files = {kind: load_file(f"{tmp_path}/{kind}.safetensors") for kind in saved}
    assert files["ddp"].keys() == _net().state_dict().keys() and files["ddp"]["odd"].shape == (13,)
    for kind, tensors in files.items():
        _same({"": files["ddp"]}, {"": tensors}, False, kind)
        for name, value in saved[kind][0]["parameter"].items():
            assert torch.equal(tensors[name], value), (kind, name)


@pytest.mark.long
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_checkpoints_are_exchanged_between_worlds(tmp_path, communication, worlds):
    _exchange(tmp_path, communication, worlds, [("zero3", "zero2"), ("zero1", "zero3")], "AdamW")


WORLDS = [(2, 2), (2, 1), (1, 2), (2, 4), (4, 2)]
CASES = [(communication, "AdamW", worlds) for communication in ("gloo", "shm") for worlds in WORLDS]
# States of other optimizers reach files the same way over every communication.
CASES += [("gloo", name, worlds) for name in OPTIMIZERS if name != "AdamW" for worlds in ((2, 1), (2, 4))]


@pytest.mark.long
@pytest.mark.parametrize(("communication", "optimizer", "worlds"), CASES)
def test_every_checkpoint_is_exchanged(tmp_path, communication, optimizer, worlds):
    pairs = EVERY if (optimizer, worlds) == ("AdamW", (2, 2)) else SOME
    _exchange(tmp_path, communication, worlds, pairs, optimizer)


# Fewer elements than ranks.


class Small(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.only = nn.Parameter(torch.linspace(0.5, 1.0, size))

    def forward(self, x):
        return (x * self.only).square().sum()


def _small(folder, communication, size):
    from safetensors.torch import load_file

    found = []
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
            "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
        }
        for _ in range(2):  # the second one goes on
            with polyscale.initialize(Small(size), config=config) as engine:
                if found and found[-1][0] == stage:
                    engine.load(f"{folder}/{stage}")
                engine.backward(engine(torch.ones(())))
                engine.step()
                engine.save(f"{folder}/{stage}")
                engine.export(f"{folder}/{stage}.safetensors")
                weights = dict(engine.parameters_store.iter_full())
            dist.barrier()
            assert torch.equal(load_file(f"{folder}/{stage}.safetensors")["only"], weights["only"])
            found.append((stage, weights["only"]))
    return found


def _check_small(found, size):
    model = Small(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        optimizer.step()
        expected.append(model.only.detach().clone())
    for (_, weight), right in zip(found, expected * 3, strict=True):
        assert weight.shape == (size,)
        torch.testing.assert_close(weight, right, rtol=0, atol=1e-6)


def test_one_element_on_two_ranks(tmp_path, communication):
    for found in ranks(2, backend=communication).run(_small, str(tmp_path), communication, 1):
        _check_small(found, 1)


@pytest.mark.long
def test_thirteen_elements_on_four_ranks(tmp_path, communication):
    for found in ranks(4, backend=communication).run(_small, str(tmp_path), communication, 13):
        _check_small(found, 13)


# The store.


def _store(communication):
    for kind in ("zero1", "zero2", "zero3"):
        with _engine(kind, communication) as engine:
            store = engine.parameters_store
            expected = {name: value.detach() for name, value in _net().named_parameters(remove_duplicate=False)}
            found = dict(store.iter_full())
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            names = ["blocks.1.up.weight", "odd", "scalar", "empty", "head.weight"]
            with store.gathered(names) as whole:
                assert all(torch.equal(whole[store.canonical(name)], expected[name]) for name in names)
                assert torch.equal(engine.module.blocks[1].up.weight, expected["blocks.1.up.weight"])
            with pytest.raises(polyscale.PolyscaleError, match="written inside gathered"):  # noqa: SIM117
                with store.gathered(names) as whole:
                    whole["odd"].data.add_(1)
            with store.gathered([engine.module.odd, engine.module.blocks[2].down.weight], modify=True) as whole:
                for value in whole.values():
                    value.fill_(3.0 + dist.get_rank())  # rank 0's is kept
                engine.module.blocks[2].down.weight.data[0] = 5.0
            expected["odd"] = torch.full((13,), 3.0, dtype=torch.float64)
            expected["blocks.2.down.weight"] = torch.full((WIDTH, 3 * WIDTH), 3.0, dtype=torch.float64)
            expected["blocks.2.down.weight"][0] = 5.0
            for name in ("blocks.0.down.weight", "mix.weight", "scalar", "embed.weight", "blocks.0.frozen.bias"):
                value = torch.rand(expected[name].shape, dtype=torch.float64)
                store.set_full(name, value)
                expected[name] = value
            expected["head.weight"] = expected["embed.weight"]
            found = dict(store.iter_full())
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            model = _net()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(expected[name])
            tokens = torch.arange(6) % 11
            with torch.no_grad():  # the module computes with them
                torch.testing.assert_close(engine(tokens), model(tokens), rtol=1e-12, atol=0)
            _go_on(engine, 1)
            store.set_full("odd", torch.ones(13, dtype=torch.float64), "exp_avg")
            assert torch.equal(store.get_full("odd", "exp_avg"), torch.ones(13, dtype=torch.float64))
            assert store.get_full("idle.weight", "exp_avg") is None


def test_what_the_store_gives_and_takes(communication):
    ranks(2, backend=communication).run(_store, communication)


def _weights(start, stage, communication):
    torch.manual_seed(5)
    if start == "meta":
        with torch.device("meta"):
            model = tiny_gpt2()
    elif start == "deferred":
        with polyscale.partitioned_init():
            model = tiny_gpt2()
    else:
        model = tiny_gpt2()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "backends": {
            "accelerator": "cpu",
            "data_parallel": "zero" if stage else "ddp",
            "communication": communication,
        },
    }
    with polyscale.initialize(model, config=config, seed=11) as engine:
        tokens = torch.arange(8)[None]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)  # every parameter has arrived in the modules
        engine.step()
        return {**dict(engine.parameters_store.iter_full()), **dict(engine.module.named_buffers())}


def _starts(communication):
    return {
        start: [_weights(start, stage, communication) for stage in (0, 1, 2, 3)]
        for start in ("real", "deferred", "meta")
    }


@pytest.mark.long
def test_every_start_gives_the_same_weights(communication):
    for found in ranks(2, backend=communication).run(_starts, communication, timeout=120):
        for start, (expected, *others) in found.items():
            for other in others:
                assert other.keys() == expected.keys()
                for name, value in expected.items():
                    torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6, msg=f"{start}: {name}")
        for name, value in found["real"][0].items():
            assert torch.equal(value, found["deferred"][0][name])
