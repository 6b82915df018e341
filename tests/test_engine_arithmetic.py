"""What a step computes: the divisor, several backwards, weights, no_sync, flush, clipping, 16-bit accumulation.

Every expected number is worked out by hand or by one process of plain torch.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import count_collectives, ranks

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


def _two_backwards():
    result = {}
    for stage in STAGES:
        with _line(stage) as engine:
            for value in (1.0, 10.0):
                engine.backward(engine(torch.full((1, 2), value)).sum())
            assert engine.step()
            result[stage] = _weight(engine)
    return result


def test_two_backwards_before_a_step_add_at_every_stage():
    for outcome in ranks(2).run(_two_backwards):
        for stage in STAGES:
            assert outcome[stage] == pytest.approx([-1.1, -1.1], abs=1e-6), stage


def _bf16_accumulation():
    result = {}
    for stage in STAGES:
        extra = {
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": 33,
            "optimizer": {"type": "SGD", "params": {"lr": 33.0}},
        }
        with _line(stage, **extra) as engine:
            for step in range(33):
                engine.backward(engine(torch.full((1, 2), 1.0 if step == 0 else 2.0**-8)).sum())
                engine.step()
            result[stage] = _weight(engine), engine.dtypes()
    return result


def test_bf16_gradients_accumulate_in_fp32_at_every_stage():
    for outcome in ranks(2).run(_bf16_accumulation):
        for stage in STAGES:
            weights, dtypes = outcome[stage]
            assert weights == [-1.125, -1.125], stage
            assert dtypes == {
                "parameter": "bf16",
                "gradient": "bf16",
                "accumulation": "fp32",
                "reduction": "fp32",
                "master": "fp32",
            }


def _weighted():
    rank = dist.get_rank()
    result = {}
    for stage in STAGES:
        with _line(stage, gradient_accumulation_steps=2) as engine:
            # rank 0 sees 3 + 1 items, rank 1 sees 1 + 5; each item has input 1.
            for items in (3, 1) if rank == 0 else (1, 5):
                engine.backward(engine(torch.ones(items, 2)).sum(), weight=items)
                engine.step()
            result[stage] = _weight(engine), engine.grad_norm
    return result


def test_weights_make_a_mean_over_items_of_all_ranks():
    for outcome in ranks(2).run(_weighted):
        for stage in STAGES:
            weights, norm = outcome[stage]
            assert weights == pytest.approx([-0.1, -0.1], abs=1e-7), stage
            assert norm == pytest.approx(2**0.5, rel=1e-6)


def _held_and_flushed():
    result = {}
    for stage in STAGES:
        with _line(stage, gradient_accumulation_steps=3) as engine:
            with engine.no_sync():
                engine.backward(engine(torch.full((1, 2), 1.0)).sum())
            engine.step()
            engine.backward(engine(torch.full((1, 2), 2.0)).sum())
            engine.step()
            assert engine.flush()
            first = _weight(engine)
            # All micro-steps held: what they left is reduced at the update.
            for _ in range(3):
                with engine.no_sync():
                    engine.backward(engine(torch.full((1, 2), 6.0)).sum())
                updated = engine.step()
            assert updated
            assert not engine.flush()
            result[stage] = first, _weight(engine)
    return result


def test_no_sync_and_flush_lose_nothing_at_any_stage():
    for outcome in ranks(2).run(_held_and_flushed):
        for stage in STAGES:
            first, second = outcome[stage]
            assert first == pytest.approx([-0.15, -0.15], abs=1e-7), stage
            assert second == pytest.approx([-0.75, -0.75], abs=1e-6), stage


def _clipped():
    result = {}
    for stage in STAGES:
        with _line(stage, gradient_clipping=1.0) as engine:
            engine.backward(engine(torch.tensor([[3.0, 4.0]])).sum())
            engine.step()
            result[stage] = engine.grad_norm, engine.clip_factor, _weight(engine)
    return result


def test_grad_norm_is_before_clipping_and_the_factor_is_reported():
    for outcome in ranks(2).run(_clipped):
        for stage in STAGES:
            norm, factor, weights = outcome[stage]
            assert norm == pytest.approx(5.0, rel=1e-6)
            assert factor == pytest.approx(0.2, rel=1e-5)
            assert weights == pytest.approx([-0.06, -0.08], rel=1e-5)


def _predivided():
    result = {}
    for stage in STAGES:
        extra = {"prescale_gradients": True, "gradient_predivide_factor": 4.0}
        with _line(stage, **extra) as engine:
            engine.backward(engine(torch.tensor([[3.0, 4.0]])).sum())
            engine.step()
            result[stage] = engine.grad_norm, _weight(engine)
    return result


def test_predividing_does_not_change_the_update():
    for outcome in ranks(2).run(_predivided):
        for stage in STAGES:
            assert outcome[stage][0] == pytest.approx(5.0, rel=1e-6)
            assert outcome[stage][1] == pytest.approx([-0.3, -0.4], rel=1e-6)


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def _collectives():
    found = {}
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        of_units = {"backends": {"data_parallel": "fsdp2"}}
        engine = polyscale.initialize(_Blocks(), config=_config(stage, gradient_accumulation_steps=3, **of_units))
        for _ in range(2):  # the second accumulation is counted: the first makes torch's lazy state
            with count_collectives() as counted:
                for _ in range(3):
                    engine.backward(engine(torch.ones(1, 8)))
                    engine.step()
        found[stage] = counted["all_gather"], counted["reduce_scatter"]
        engine.close()
    return found


def test_number_of_collectives_of_each_stage():
    units = 4  # three blocks and the root
    for found in ranks(2).run(_collectives):
        assert found[1] == (units, units), "gathered once, reduced once an accumulation"
        assert found[2] == (3 * units, 3 * units), "gathered and reduced in every micro-step"
        # The blocks are gathered again for backward, except the last one used; the root stays gathered.
        gathers, reductions = found[3]
        assert reductions == 3 * units
        assert 3 * units < gathers <= 3 * (2 * units - 1)


def _train_batches():
    data = [(torch.full((1, 2), float(value)), torch.zeros(1, 1)) for value in range(1, 5)]
    result = {}
    for stage in STAGES:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        engine = polyscale.initialize(
            model,
            config=_config(stage, gradient_accumulation_steps=2),
            loss_fn=lambda output, target: (output - target).abs().mean(),
        )
        iterator = iter(data)
        evaluated = float(engine.eval_batch(iter(data)))
        losses = [float(engine.train_batch(iterator)), float(engine.train_batch(iterator))]
        try:
            engine.train_batch(iterator)
        except StopIteration:
            losses.append("end")
        try:
            engine.train_batch(iter(data[:1]))
        except polyscale.PolyscaleError as error:
            losses.append(str(error))
        engine.flush()
        engine.close()
        result[stage] = evaluated, losses
    return result


def test_train_batch_runs_one_accumulation_and_says_when_data_ends_inside():
    for outcome in ranks(2).run(_train_batches):
        for stage in STAGES:
            evaluated, losses = outcome[stage]
            assert evaluated == pytest.approx(3.0)
            # Mean input 1.5, so each weight falls by 0.15; then inputs 3 and 4 at weight 0.85.
            assert losses[:2] == pytest.approx([3.0, 5.95])
            assert losses[2] == "end"
            assert "1 of 2 micro-batches" in losses[3] and "flush" in losses[3]


def _large_norm():
    result = {}
    for stage in STAGES:
        model = nn.Linear(3000, 1000, bias=False)
        with polyscale.initialize(model, config=_config(stage)) as engine:
            generator = torch.Generator().manual_seed(7)
            x = torch.randn(1, 3000, generator=generator)
            y = torch.randn(1000, generator=generator)
            engine.backward((engine(x) * y).sum())
            engine.step()
            result[stage] = engine.grad_norm, float(x.double().norm() * y.double().norm())
    return result


def test_the_norm_of_many_elements_is_right_in_fp32():
    """Squares added one after another in fp32 are off by 1e-4 and more at millions of elements."""
    for outcome in ranks(2).run(_large_norm):
        for stage, (found, right) in outcome.items():
            assert found == pytest.approx(right, rel=2e-6), stage
