"""Small inputs that once gave a wrong number without a word: each is an error, on every rank."""

import logging

import pytest
import torch
import torch.distributed as dist
from engine_line import STAGES, Block, config_of, line_at
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyscale
from polyscale.testing import ranks


def _error(call):
    try:
        call()
    except polyscale.PolyscaleError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _uneven_flush(stage):
    engine = line_at(stage, gradient_accumulation_steps=4)
    with engine.no_sync():
        for _ in range(1 + dist.get_rank()):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    return _error(engine.flush)


def _weight_on_one_rank(stage):
    engine = line_at(stage)
    engine.backward(engine(torch.ones(1, 2)).sum(), weight=1 if dist.get_rank() else None)
    return _error(engine.step)


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        (_uneven_flush, 0),
        (_uneven_flush, 1),
        (_weight_on_one_rank, 0),
        (_weight_on_one_rank, 1),
        (_weight_on_one_rank, 3),
    ],
)
def test_ranks_that_count_differently_are_told_so(case, stage):
    for text in ranks(2).run(case, stage):
        assert text.startswith("RankError"), text


class _Mixed(nn.Module):
    """Calls its blocks once under reentrant recompute, and once more as ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block() for _ in range(2)), how

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
            if self.how == "directly":
                x = block(x)
        return x.square().sum()


def _reentrant(how):
    found = {}
    for stage in (1, 2, 3):
        engine = polyscale.initialize(_Mixed(how), config=config_of(stage))
        inputs = torch.ones(1, 2, requires_grad=True)

        def run(engine=engine, inputs=inputs):
            first = engine(inputs)
            second = engine(inputs) if how == "two forwards" else 0.0
            engine.backward(first + second)

        found[stage] = _error(run)
        if how == "discarded":
            for _ in range(3):  # a forward that was thrown away does not count
                engine(inputs)
            run()
            engine.step()
        engine.close() if how == "discarded" else None
    return found


@pytest.mark.parametrize("how", ["directly", "two forwards", "discarded"])
def test_reentrant_recompute_that_would_lose_a_gradient_is_refused(how):
    for found in ranks(2).run(_reentrant, how):
        for text in found.values():
            if how == "discarded":
                assert text == "no error"
            else:
                assert "use_reentrant=False" in text, text


def _sequence_axis():
    topology = polyscale.Topology.build(dp_shard=1, sp=2)
    return _error(lambda: polyscale.initialize(nn.Linear(2, 1), config=config_of(0), topology=topology))


def test_an_axis_that_no_plugin_implements_is_refused():
    for text in ranks(2).run(_sequence_axis):
        assert "sp = 2" in text


class _Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.blocks[dist.get_rank()](x).square().sum()


def _different_units(stage):
    engine = polyscale.initialize(_Either(), config=config_of(stage))

    def run():
        engine.backward(engine(torch.ones(1, 2)))
        engine.step()

    return _error(run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_call_different_units_do_not_update(stage):
    for text in ranks(2).run(_different_units, stage):
        assert text.startswith("RankError") and "units" in text


def test_a_step_after_a_backward_that_raised_is_refused(tmp_path):
    def fail(_gradient):
        raise KeyError("the user's own")

    for stage in STAGES:
        engine = polyscale.initialize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), config=config_of(stage))
        before = dict(engine.parameters_store.iter_full())
        for end in ("step", "flush", "save", "close"):
            output = engine(torch.ones(1, 2).requires_grad_())
            output.register_hook(fail)
            with pytest.raises(KeyError):
                engine.backward(output.sum())
            if end in ("step", "flush"):
                with pytest.raises(polyscale.PolyscaleError, match="exception in backward"):
                    getattr(engine, end)()
            elif end == "save":
                engine.save(tmp_path / str(stage))
            for name, value in engine.parameters_store.iter_full():
                assert torch.equal(value, before[name]), "nothing moved"
        engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_inside_gathered_is_refused(stage):
    with (
        line_at(stage) as engine,
        engine.parameters_store.gathered(["weight"]),
        pytest.raises(polyscale.PolyscaleError, match="gathered"),
    ):
        engine(torch.ones(1, 2))


def _different_optimizers():
    rate = 0.1 * (1 + dist.get_rank())
    return _error(
        lambda: polyscale.initialize(
            nn.Linear(2, 1), config=config_of(0), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)
        )
    )


def test_optimizers_that_differ_between_ranks():
    for text in ranks(2).run(_different_optimizers):
        assert "0.1" in text and "0.2" in text


def test_schedules_that_cannot_be_stepped():
    model = nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(given)
    for schedule, optimizer, word in (
        (plateau, given, "metric"),
        (object(), given, "step()"),
        (plateau, None, "without"),
    ):
        config = {"train_batch_size": 1}
        with pytest.raises(polyscale.PolyscaleError, match="lr_scheduler") as error:
            polyscale.initialize(model, config=config, optimizer=optimizer, lr_scheduler=schedule)
        assert word in str(error.value)


def test_train_batch_in_the_middle_of_an_accumulation():
    with line_at(0, gradient_accumulation_steps=2) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(polyscale.PolyscaleError, match="train_batch"):
            engine.train_batch(iter([]))
        engine.flush()


def _penalty(stage):
    engine = polyscale.initialize(nn.Sequential(Block(), Block()), config=config_of(stage))
    penalty = sum(
        (p.full_tensor() if hasattr(p, "full_tensor") else p).square().sum() for p in engine.module.parameters()
    )
    return _error(lambda: engine.backward(engine(torch.ones(1, 2)).sum() + penalty))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_uses_shards_directly_is_refused(stage):
    for text in ranks(2).run(_penalty, stage):
        assert text == "no error" if stage == 0 else "uses the sharded parameter" in text


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_unfrozen_afterwards_is_refused_and_freezing_works(stage):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    with polyscale.initialize(model, config=config_of(stage)) as engine:
        engine.module[0].requires_grad_(True)
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(polyscale.PolyscaleError, match=r"'0\.weight' was unfrozen"):
            engine.step()
        engine.module[0].requires_grad_(False)
        engine.module[1].weight.requires_grad_(False)
        before = dict(engine.parameters_store.iter_full())
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        moved = [n for n, value in engine.parameters_store.iter_full() if not torch.equal(value, before[n])]
        assert moved == ["1.bias"]


def test_second_derivatives_over_shards_are_explained():
    for stage in (0, 3):
        engine = polyscale.initialize(nn.Sequential(Block(), Block()), config=config_of(stage))
        inputs = torch.ones(1, 2, requires_grad=True)
        output = engine(inputs).sum()

        def penalised(engine=engine, inputs=inputs, output=output):
            (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
            engine.backward(output + slope.square().sum())

        text = _error(penalised)
        assert text == "no error" if stage == 0 else "create_graph" in text


def _warnings_about_a_loader():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("polyscale").addHandler(handler)
    data = torch.utils.data.DataLoader(list(range(8)), batch_size=4)
    polyscale.initialize(nn.Linear(2, 1), config=config_of(0), data=data).close()
    logging.getLogger("polyscale").removeHandler(handler)
    return [text for text in records if "DataLoader" in text]


def test_a_dataloader_that_gives_all_ranks_the_same_samples_is_said():
    for found in ranks(2).run(_warnings_about_a_loader):
        assert len(found) == 2
        assert "DistributedSampler" in found[0] and "batch_size 4" in found[1]


def test_a_model_wrapped_in_torchs_data_parallel():
    with pytest.raises(polyscale.PolyscaleError, match=r"model\.module"):
        polyscale.initialize(nn.DataParallel(nn.Linear(2, 1)), config=config_of(0))
