"""Small inputs that once gave a wrong number without a word: each must be right, or an error on every rank."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyscale
from polyscale.testing import ranks

STAGES = (0, 1, 2, 3)


def _config(stage, **extra):
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return {**base, **extra}


def _line(stage, **extra):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return polyscale.initialize(model, config=_config(stage, **extra))


def _weight(engine):
    return engine.parameters_store.get_full("weight").flatten().tolist()


def _error(call):
    try:
        call()
    except polyscale.PolyscaleError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _uneven_flush(stage):
    engine = _line(stage, gradient_accumulation_steps=4)
    with engine.no_sync():
        for _ in range(1 + dist.get_rank()):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    return _error(engine.flush)


def _weight_on_one_rank(stage):
    engine = _line(stage)
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


class _Opaque:
    def __init__(self, loss):
        self.loss = loss


class _ReturnsObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return _Opaque(self.layer(x).sum())


def _opaque_output():
    found = {}
    for stage in STAGES:
        with polyscale.initialize(_ReturnsObject(), config=_config(stage, gradient_accumulation_steps=2)) as engine:
            for value in (1.0, 3.0):
                engine.backward(engine(torch.full((1, 2), value)).loss)
                engine.step()
            found[stage] = engine.parameters_store.get_full("layer.weight").flatten().tolist()
    return found


def test_a_model_whose_output_torch_cannot_look_into_trains():
    for found in ranks(2).run(_opaque_output):
        for stage in STAGES:
            assert found[stage] == pytest.approx([-0.2, -0.2]), stage


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class _Mixed(nn.Module):
    """Calls its blocks once under reentrant recompute, and once more as ``how`` says."""

    def __init__(self, how):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(_Block() for _ in range(2)), how

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
            if self.how == "directly":
                x = block(x)
        return x.square().sum()


def _reentrant(how):
    found = {}
    for stage in (1, 2, 3):
        engine = polyscale.initialize(_Mixed(how), config=_config(stage))
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


def _predivided(replicate):
    found = {}
    for stage in STAGES:
        extra = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
        with _line(stage, topology={"dp_replicate": replicate, "dp_shard": -1}, **extra) as engine:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            found[stage] = _weight(engine)
    return found


@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_predividing_changes_nothing_on_any_mesh(world, replicate):
    for found in ranks(world).run(_predivided, replicate):
        for stage in STAGES:
            assert found[stage] == pytest.approx([-0.1, -0.1]), stage


def _narrow_reduction(key):
    found = {}
    narrow = {
        "communication_data_type": {"communication_data_type": "bf16", "bf16": {"enabled": True}},
        "param_dtype": {"data_types": {"param_dtype": "bf16"}},
    }[key]
    for stage in STAGES:
        extra = {
            "gradient_accumulation_steps": 33,
            "optimizer": {"type": "SGD", "params": {"lr": 33.0}},
            **narrow,
        }
        with _line(stage, **extra) as engine:
            for step in range(33):
                engine.backward(engine(torch.full((1, 2), 1.0 if step == 0 else 2.0**-8)).sum())
                engine.step()
            found[stage] = _weight(engine), engine.dtypes()["accumulation"]
    return found


@pytest.mark.parametrize("key", ["communication_data_type", "param_dtype"])
def test_gradients_are_added_in_fp32_whatever_is_sent(key):
    for found in ranks(2).run(_narrow_reduction, key):
        for stage in (0, 1) if key == "communication_data_type" else STAGES:
            assert found[stage] == ([-1.125, -1.125], "fp32"), stage


def _sequence_axis():
    topology = polyscale.Topology.build(dp_shard=1, sp=2)
    return _error(lambda: polyscale.initialize(nn.Linear(2, 1), config=_config(0), topology=topology))


def test_an_axis_that_no_plugin_implements_is_refused():
    for text in ranks(2).run(_sequence_axis):
        assert "sp = 2" in text


class _Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x):
        return self.blocks[dist.get_rank()](x).square().sum()


def _different_units(stage):
    engine = polyscale.initialize(_Either(), config=_config(stage))

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
        engine = polyscale.initialize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), config=_config(stage))
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


def test_eval_batch_keeps_what_the_user_put_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    with polyscale.initialize(model, config=_config(0), loss_fn=lambda output, target: output.sum()) as engine:
        model[1].eval()
        engine.eval_batch(iter([(torch.ones(1, 2), torch.ones(1))]))
        assert [module.training for module in model] == [True, False, True]


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)).square().sum()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["head", "embed.weight", "norm"])
def test_pins_by_plain_names_and_of_tied_weights(stage, name):
    config = _config(stage, bf16={"enabled": True}, data_types={"keep_in_fp32_modules": [name]})
    try:
        with polyscale.initialize(_Tied(), config=config) as engine:
            engine.backward(engine(torch.arange(4)))
            assert engine.step()
            assert name != "norm" and stage == 0
    except polyscale.PolyscaleError as error:
        assert ("matches no parameter" if name == "norm" else "tied weight") in str(error)


def _gradients():
    found = {}
    for stage in STAGES:
        with _line(stage, gradient_accumulation_steps=2) as engine:
            store, seen = engine.parameters_store, []
            assert store.get_full("weight", "gradient") is None
            for value in (1.0, 2.0):
                engine.backward(engine(torch.full((1, 2), value)).sum())
                seen.append(store.get_full("weight", "gradient").flatten().tolist())
                if value == 2.0:
                    store.set_full("weight", torch.full((1, 2), 8.0), "gradient")
                engine.step()
            found[stage] = seen, _weight(engine), store.get_full("weight", "gradient")
    return found


def test_gradients_can_be_read_and_set_before_the_update():
    for found in ranks(2).run(_gradients):
        for stage in STAGES:
            seen, weight, after = found[stage]
            assert seen == [[2.0, 2.0], [6.0, 6.0]], "sums over ranks and micro-steps so far"
            assert weight == pytest.approx([-0.2, -0.2]), "the gradient that was set, averaged over 4"
            assert after is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_inside_gathered_is_refused(stage):
    with (
        _line(stage) as engine,
        engine.parameters_store.gathered(["weight"]),
        pytest.raises(polyscale.PolyscaleError, match="gathered"),
    ):
        engine(torch.ones(1, 2))


def _different_optimizers():
    rate = 0.1 * (1 + dist.get_rank())
    return _error(
        lambda: polyscale.initialize(
            nn.Linear(2, 1), config=_config(0), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)
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


def test_a_callable_optimizer_over_the_parameters_it_knew_before():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    known = list(model.parameters())
    config = {**_config(2), "optimizer": None}
    del config["optimizer"]
    with polyscale.initialize(model, config=config, optimizer=lambda _: torch.optim.SGD(known, lr=0.1)) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert _weight(engine) == pytest.approx([-0.1, -0.1])


def test_train_batch_in_the_middle_of_an_accumulation():
    with _line(0, gradient_accumulation_steps=2) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(polyscale.PolyscaleError, match="train_batch"):
            engine.train_batch(iter([]))
        engine.flush()


def test_a_model_in_16_bits_keeps_its_masters_when_the_engine_is_closed():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    config = _config(0, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 2.0**-12}})
    for _ in range(2):
        with polyscale.initialize(model, config=config) as engine:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    assert model.weight.tolist() == [[1 - 2.0**-11] * 2]


def test_bf16_that_is_never_finite_ends():
    engine = _line(0, bf16={"enabled": True})
    with pytest.raises(polyscale.PolyscaleError, match="20 updates in a row"):
        for _ in range(30):
            engine.backward(engine(torch.full((1, 2), float("inf"))).sum())
            engine.step()
    engine.close()


def _penalty(stage):
    engine = polyscale.initialize(nn.Sequential(_Block(), _Block()), config=_config(stage))
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
    with polyscale.initialize(model, config=_config(stage)) as engine:
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


@pytest.mark.parametrize("stage", STAGES)
def test_evaluating_in_inference_mode_does_not_spoil_training(stage):
    torch.manual_seed(0)
    with polyscale.initialize(nn.Sequential(_Block(), _Block()), config=_config(stage)) as engine:
        with torch.inference_mode():
            first = engine(torch.ones(1, 2))
        assert not first.requires_grad
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            assert engine.step()


class _Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            for _ in range(2):
                for block in self.blocks:
                    target = block(x)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().sum()


class _ViewBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).view(-1, 2)


class _InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_ViewBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x.square().sum()


def _trained_at_every_stage(model_class):
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        with polyscale.initialize(model_class().double(), config=_config(stage)) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 2, dtype=torch.float64)))
                engine.step()
            found[stage] = dict(engine.parameters_store.iter_full())
    return found


@pytest.mark.parametrize("model", [_Teacher, _InPlace], ids=["a teacher pass without gradient", "views in place"])
def test_forwards_that_fsdp_finds_hard_are_right_at_every_stage(model):
    for found in ranks(2).run(_trained_at_every_stage, model):
        for stage in STAGES:
            for name, value in found[0].items():
                torch.testing.assert_close(found[stage][name], value, rtol=0, atol=1e-12)


def test_second_derivatives_over_shards_are_explained():
    for stage in (0, 3):
        engine = polyscale.initialize(nn.Sequential(_Block(), _Block()), config=_config(stage))
        inputs = torch.ones(1, 2, requires_grad=True)
        output = engine(inputs).sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        loss = output + slope.square().sum()
        text = _error(lambda engine=engine, loss=loss: engine.backward(loss))
        assert text == "no error" if stage == 0 else "create_graph" in text


def _warnings_about_a_loader():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("polyscale").addHandler(handler)
    data = torch.utils.data.DataLoader(list(range(8)), batch_size=4)
    polyscale.initialize(nn.Linear(2, 1), config=_config(0), data=data).close()
    logging.getLogger("polyscale").removeHandler(handler)
    return [text for text in records if "DataLoader" in text]


def test_a_dataloader_that_gives_all_ranks_the_same_samples_is_said():
    for found in ranks(2).run(_warnings_about_a_loader):
        assert len(found) == 2
        assert "DistributedSampler" in found[0] and "batch_size 4" in found[1]


def test_a_model_wrapped_in_torchs_data_parallel():
    with pytest.raises(polyscale.PolyscaleError, match=r"model\.module"):
        polyscale.initialize(nn.DataParallel(nn.Linear(2, 1)), config=_config(0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_model_has_the_names_of_the_model(stage, tmp_path):
    from safetensors.torch import load_file

    plain = nn.Sequential(_Block(), _Block())
    names = list(plain.state_dict())
    compiled = torch.compile(nn.Sequential(_Block(), torch.compile(_Block(), backend="eager")), backend="eager")
    with polyscale.initialize(compiled, config=_config(stage)) as engine:
        assert [name for name, _ in engine.parameters_store.iter_full()] == names
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save(tmp_path)
        engine.export(tmp_path / "model.safetensors")
        trained = dict(engine.parameters_store.iter_full())
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    with polyscale.initialize(plain, config=_config(0)) as engine:
        engine.load(tmp_path)
        for name, value in engine.parameters_store.iter_full():
            assert torch.equal(value, trained[name])
