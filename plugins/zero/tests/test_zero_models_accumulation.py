"""Accumulations of every kind, and what travels: right to 1e-10 in fp64 against one process of plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks

WIDTH, ROWS, UPDATES = 5, 2, 2
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """``branch``: whether the last block is used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, side=False):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x + self.side(x) if side else x


def _net(dtype=torch.float64):
    torch.manual_seed(1)
    return Net().to(dtype)


def _input(number, rank):
    generator = torch.Generator().manual_seed(7 * number + rank + 1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def _config(stage, communication, **extra):
    base = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": SGD,
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
    }
    return base | extra


# A plan is what happens in one update: a list of (action, argument). Losses are means over rows.

PLANS = {
    "three micro-steps": (3, ["backward", "step", "backward", "step", "backward", "step"]),
    "several backwards in each": (2, ["backward", "backward", "step", "backward", "backward", "backward", "step"]),
    "a side branch in one micro-step": (3, ["backward", "step", "side", "step", "backward", "step"]),
    "a side branch in the first and the last": (3, ["side", "step", "backward", "step", "side", "step"]),
    "no_sync": (3, ["hold", "backward", "step", "backward", "step", "release", "side", "step"]),
    "no_sync in all": (2, ["hold", "backward", "step", "side", "step", "release"]),
    "no_sync in the middle": (3, ["side", "step", "hold", "backward", "step", "release", "backward", "step"]),
    "flush": (4, ["backward", "step", "side", "step", "backward", "flush"]),
    "gradients read early": (3, ["backward", "read", "step", "side", "read", "read", "step", "backward", "step"]),
    "gradients read in no_sync": (2, ["hold", "side", "read", "step", "release", "backward", "read", "step"]),
    "gradients read between two backwards": (1, ["backward", "read", "side", "backward", "read", "step"]),
    "gradients set early": (2, ["backward", "double", "step", "side", "step"]),
}


def _follow(engine, plan, update, weighted):
    rank = dist.get_rank() if dist.is_initialized() else 0
    hold, count, read = engine.no_sync(), 0, []
    for action in plan:
        match action:
            case "backward" | "side":
                output = engine(_input(10 * update + count, rank), action == "side")
                loss = output.square().sum() if weighted else output.square().mean()
                engine.backward(loss, weight=1 + rank + count if weighted else None)
                count += 1
            case "step":
                engine.step()
            case "flush":
                assert engine.flush()
            case "hold":
                hold.__enter__()
            case "release":
                hold.__exit__(None, None, None)
            case "read":
                read.append(dict(engine.parameters_store.iter_full("gradient")))
            case "double":
                name = "blocks.1.up.weight"
                engine.parameters_store.set_full(
                    name, 2 * engine.parameters_store.get_full(name, "gradient"), "gradient"
                )
    return read


def _train(names, communication, weighted, stages, extra):
    found = {}
    for name in names:
        for stage in stages:
            steps, plan = PLANS[name]
            config = _config(stage, communication, gradient_accumulation_steps=steps, **extra)
            with polyscale.initialize(_net(), config=config) as engine:
                read = [_follow(engine, plan, update, weighted) for update in range(UPDATES)]
                assert engine.steps == UPDATES
                found[name, stage] = dict(engine.parameters_store.iter_full()), read
    return found


def _reference(name, weighted, world):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    reads = []
    for update in range(UPDATES):
        count, total, steps, read = 0, 0, 0, []
        for action in PLANS[name][1]:
            if action in ("backward", "side"):
                for rank in range(world):
                    output = model(_input(10 * update + count, rank), action == "side")
                    (output.square().sum() if weighted else output.square().mean()).backward()
                    total += 1 + rank + count
                count += 1
            steps += action in ("step", "flush")
            if action == "read":
                read.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
            if action == "double":
                model.blocks[1].up.weight.grad *= 2
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= total if weighted else steps * world
        optimizer.step()
        optimizer.zero_grad()
        reads.append(read)
    return {key: value.detach() for key, value in model.named_parameters()}, reads


def _check(found, weighted, world):
    for (name, stage), (weights, reads) in found.items():
        expected, expected_reads = _reference(name, weighted, world)

        def close(one, other, name=name, stage=stage):
            assert one.keys() == other.keys(), (name, stage, one.keys() ^ other.keys())
            for key, value in other.items():
                torch.testing.assert_close(
                    one[key],
                    value,
                    rtol=1e-10,
                    atol=1e-10,
                    msg=lambda text, k=key: f"{name}, stage {stage}, {k}: {text}",
                )

        close(weights, expected)
        for own, right in zip(reads, expected_reads, strict=True):
            for one, other in zip(own, right, strict=True):
                close(one, other)


SOME = ["several backwards in each", "no_sync in the middle", "gradients read between two backwards"]


def test_some_accumulations(communication):
    for found in ranks(2, backend=communication).run(_train, SOME, communication, True, (1, 2, 3), {}):
        _check(found, True, 2)


def test_some_accumulations_of_one_process(communication):
    (found,) = ranks(1, backend=communication).run(_train, SOME, communication, False, (1, 2, 3), {})
    _check(found, False, 1)


@pytest.mark.long
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_accumulations(communication, weighted):
    for found in ranks(2, backend=communication).run(
        _train, list(PLANS), communication, weighted, (1, 2, 3), {}, timeout=300
    ):
        _check(found, weighted, 2)


@pytest.mark.long
def test_accumulations_of_one_process(communication):
    (found,) = ranks(1, backend=communication).run(
        _train, list(PLANS), communication, False, (1, 2, 3), {}, timeout=300
    )
    _check(found, False, 1)


@pytest.mark.long
def test_accumulations_on_replicas_alone(communication):
    extra = {"topology": {"dp_replicate": 2, "dp_shard": -1}}
    for found in ranks(2, backend=communication).run(
        _train, list(PLANS), communication, False, (1, 2, 3), extra, timeout=300
    ):
        _check(found, False, 2)


@pytest.mark.long
def test_accumulations_on_replicas_of_shards(communication):
    extra = {"topology": {"dp_replicate": 2, "dp_shard": -1}}
    for found in ranks(4, backend=communication).run(
        _train, list(PLANS), communication, True, (1, 2, 3), extra, timeout=300
    ):
        _check(found, True, 4)


ODD = ["several backwards in each", "no_sync in the middle", "gradients read early", "flush"]


@pytest.mark.long
@pytest.mark.parametrize(
    "extra",
    [
        {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
        {"gradient_predivide_factor": 8.0, "prescale_gradients": True, "topology": {"dp_replicate": 2, "dp_shard": -1}},
    ],
    ids=["predivided", "predivided on replicas"],
)
def test_predivided_gradients_read_early_are_what_was_reduced(communication, extra):
    plans = [name for name in ODD if "read" not in name]
    for found in ranks(2, backend=communication).run(
        _train, plans, communication, False, (1, 2, 3), extra, timeout=300
    ):
        _check(found, False, 2)


def _with_keys(communication, zero):
    found = {}
    for stage in (1, 2, 3):
        config = _config(stage, communication, gradient_accumulation_steps=2)
        config["zero_optimization"] = {"stage": stage, **zero}
        name = "several backwards in each"
        with polyscale.initialize(_net(), config=config) as engine:
            read = [_follow(engine, PLANS[name][1], update, False) for update in range(UPDATES)]
            found[name, stage] = dict(engine.parameters_store.iter_full()), read
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "zero",
    [
        {"reduce_bucket_size": 1},
        {"reduce_bucket_size": 60, "overlap_comm": False},
        {"stage3_param_persistence_threshold": 10, "stage3_prefetch_bucket_size": 1},
        {"stage3_param_persistence_threshold": 1000, "stage3_model_persistence_threshold": 100},
        {"stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 10**9},
        {"stage3_prefetch_bucket_size": 10**9, "stage3_max_reuse_distance": 10**9},
        {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 300, "overlap_comm": True},
    ],
    ids=lambda zero: ",".join(key.removeprefix("stage3_") for key in zero),
)
def test_small_numbers_in_the_configuration(communication, zero):
    for found in ranks(2, backend=communication).run(_with_keys, communication, zero):
        _check(found, False, 2)


# 16 bits.


def _sixteen(communication, plugin, key):
    found = {}
    for stage in (1, 2, 3):
        config = _config(stage, communication, gradient_accumulation_steps=2, gradient_clipping=0.5)
        config[key] = {"enabled": True}
        config["backends"] = {**config["backends"], "data_parallel": plugin}
        with polyscale.initialize(_net(torch.float32), config=config) as engine:
            for update in range(4):
                for micro in range(2):
                    output = engine(_input(2 * update + micro, dist.get_rank()).float(), micro == 1)
                    engine.backward(output.float().square().mean())
                    engine.step()
            dtypes = {parameter.dtype for parameter in engine.module.parameters()}
            found[stage] = dict(engine.parameters_store.iter_full()), engine.skipped, dtypes, engine.dtypes()
    return found


@pytest.mark.long
@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_sixteen_bits_train_as_fsdp2_does(communication, key):
    expected = ranks(2).run(_sixteen, "gloo", "fsdp2", key)[0]
    for found in ranks(2, backend=communication).run(_sixteen, communication, "zero", key):
        for stage, (weights, skipped, dtypes, named) in found.items():
            right, right_skipped, _, right_named = expected[stage]
            assert (skipped, named) == (right_skipped, right_named)
            assert dtypes == {torch.bfloat16 if key == "bf16" else torch.float16}
            for name, value in right.items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3, msg=f"stage {stage}: {name}")


def _line(stage, communication, **extra):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return polyscale.initialize(model, config=_config(stage, communication, **extra))


def _narrow(communication, narrow):
    found = {}
    for stage in (1, 2, 3):
        extra = {"gradient_accumulation_steps": 33, "optimizer": {"type": "SGD", "params": {"lr": 33.0}}, **narrow}
        with _line(stage, communication, **extra) as engine:
            for step in range(33):
                engine.backward(engine(torch.full((1, 2), 1.0 if step == 0 else 2.0**-8)).sum())
                engine.step()
            found[stage] = engine.parameters_store.get_full("weight").flatten().tolist()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("narrow", "stages"),
    [
        ({"communication_data_type": "bf16", "bf16": {"enabled": True}}, (1, 2, 3)),
        ({"data_types": {"param_dtype": "bf16"}}, (1, 2, 3)),
    ],
    ids=["communication_data_type", "param_dtype"],
)
def test_gradients_are_added_in_fp32_whatever_is_sent(communication, narrow, stages):
    for found in ranks(2, backend=communication).run(_narrow, communication, narrow):
        assert all(found[stage] == [-1.125, -1.125] for stage in stages), found
