"""Schedulers over real optimizers: against torch's own where one is equivalent; state; torch's by name."""

import io

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

from polyscale.config import SchedulerSection
from polyscale.config.errors import SeveralConfigErrors
from polyscale.errors import CheckpointError, ConfigError
from polyscale.schedules import build_scheduler, check_scheduler


def optimizer(kind=SGD, lr=1.0, groups=1, **options):
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr, **options)


def section(name, **params):
    return SchedulerSection(type=name, params=params)


def used(opt, scheduler, steps, key="lr"):
    """Learning rates that ``steps`` updates use."""
    values = []
    for _ in range(steps):
        values.append(opt.param_groups[0][key])
        opt.step()
        scheduler.step()
    return values


def test_each_update_uses_the_value_of_its_number_once_from_zero():
    opt = optimizer()
    scheduler = build_scheduler(opt, section("WarmupLR", warmup_max_lr=4.0, warmup_num_steps=4, warmup_type="linear"))
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    assert used(opt, scheduler, 6) == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert scheduler.get_last_lr() == [4.0]


def both(ours, theirs, steps, kind=SGD, **options):
    first, second = optimizer(kind, **options), optimizer(kind, **options)
    return used(first, build_scheduler(first, ours), steps), used(second, theirs(second), steps)


def test_linear_warm_up_equals_torchs_linear_schedule():
    ours = section("WarmupLR", warmup_min_lr=0.25, warmup_max_lr=1.0, warmup_num_steps=5, warmup_type="linear")
    mine, torchs = both(ours, lambda opt: lr_scheduler.LinearLR(opt, 0.25, 1.0, total_iters=5), 8)
    assert mine == pytest.approx(torchs, rel=1e-12)


def test_linear_decay_equals_torchs_polynomial_of_power_one():
    ours = section("WarmupDecayLR", total_num_steps=9, warmup_max_lr=1.0, warmup_num_steps=1)
    mine, torchs = both(ours, lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=8, power=1.0), 12)
    assert mine[1:] == pytest.approx(torchs[:-1], rel=1e-9, abs=1e-12)


def test_cosine_equals_torchs_annealing():
    ours = section("WarmupCosineLR", total_num_steps=13, warmup_num_steps=3, cos_min_ratio=0.1)
    mine, torchs = both(ours, lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=10, eta_min=0.1), 14)
    assert mine[3:] == pytest.approx(torchs[:11], rel=1e-9)


def test_one_cycle_equals_torchs_triangle_with_momentum():
    ours = section("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=3, cycle_second_step_size=5)

    def theirs(opt):
        return lr_scheduler.CyclicLR(opt, 0.1, 1.0, step_size_up=3, step_size_down=5)

    mine, torchs = both(ours, theirs, 9, momentum=0.9)
    assert mine == pytest.approx(torchs, rel=1e-9)
    first, second = optimizer(momentum=0.9), optimizer(momentum=0.9)
    mine = used(first, build_scheduler(first, ours), 9, key="momentum")
    assert mine == pytest.approx(used(second, theirs(second), 9, key="momentum"), rel=1e-9)
    adam = optimizer(Adam, betas=(0.5, 0.99))
    betas = used(adam, build_scheduler(adam, ours), 4, key="betas")
    assert betas == [pytest.approx((value, 0.99)) for value in mine[:4]]


def test_momentum_is_left_alone_where_there_is_none_and_asking_for_it_is_an_error():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    opt = optimizer()
    assert used(opt, build_scheduler(opt, section("OneCycle", **params)), 3, key="momentum") == [0, 0, 0]
    with pytest.raises(ConfigError, match="neither betas nor a momentum"):
        build_scheduler(optimizer(), section("OneCycle", **params, cycle_momentum=True))


def test_groups_keep_their_own_learning_rates():
    opt = SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 10.0)])
    scheduler = build_scheduler(opt, section("WarmupLR", warmup_num_steps=2, warmup_type="linear"))
    assert scheduler.get_last_lr() == [0.0, 0.0]
    opt.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5, 5.0]
    with pytest.raises(ConfigError, match="it has 3 values, and the optimizer has 2 groups"):
        build_scheduler(opt, section("WarmupLR", warmup_max_lr=[1.0, 2.0, 3.0]))


ALL = [
    section("LRRangeTest", lr_range_test_step_size=2),
    section(
        "OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=3, decay_step_size=1, decay_lr_rate=0.5
    ),
    section("WarmupLR", warmup_num_steps=5),
    section("WarmupDecayLR", total_num_steps=9, warmup_num_steps=4),
    section("WarmupCosineLR", total_num_steps=9, warmup_num_steps=4),
    section("StepLR", step_size=2, gamma=0.5),
    section("CosineAnnealingLR", T_max=7),
    section("OneCycleLR", max_lr=1.0, total_steps=12),
]


@pytest.mark.parametrize("chosen", ALL, ids=lambda chosen: chosen.type)
def test_stopping_and_resuming_equals_going_on(chosen):
    through, stopped, resumed = (optimizer(Adam, lr=0.5) for _ in range(3))
    expected = used(through, build_scheduler(through, chosen), 10)
    scheduler = build_scheduler(stopped, chosen)
    used(stopped, scheduler, 4)
    saved = io.BytesIO()
    torch.save({"optimizer": stopped.state_dict(), "scheduler": scheduler.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again = build_scheduler(resumed, chosen)
    resumed.load_state_dict(state["optimizer"])
    again.load_state_dict(state["scheduler"])
    assert used(resumed, again, 6) == expected[4:]
    assert resumed.param_groups[0]["betas"] == through.param_groups[0]["betas"]


def test_a_state_sets_the_values_of_its_update_even_without_the_optimizers_state():
    opt, fresh = optimizer(), optimizer(lr=7.0)
    scheduler = build_scheduler(opt, section("WarmupLR", warmup_num_steps=4, warmup_type="linear"))
    used(opt, scheduler, 2)
    again = build_scheduler(fresh, section("WarmupLR", warmup_num_steps=4, warmup_type="linear"))
    again.load_state_dict(scheduler.state_dict())
    assert (fresh.param_groups[0]["lr"], again.get_last_lr()) == (0.5, [0.5])


def test_a_state_of_another_schedule_or_number_of_groups_is_refused():
    warm = build_scheduler(optimizer(), section("WarmupLR"))
    cosine = build_scheduler(optimizer(), section("WarmupCosineLR", total_num_steps=2000))
    with pytest.raises(CheckpointError, match=r"'WarmupLR'.*WarmupCosineLR"):
        cosine.load_state_dict(warm.state_dict())
    with pytest.raises(CheckpointError, match="1 groups"):
        build_scheduler(optimizer(groups=2), section("WarmupLR")).load_state_dict(warm.state_dict())
    with pytest.raises(CheckpointError, match="None"):
        warm.load_state_dict({"last_epoch": 3})


def test_last_batch_iteration_goes_on_after_it():
    opt = optimizer()
    build_scheduler(opt, section("WarmupLR", warmup_num_steps=4, warmup_type="linear", last_batch_iteration=1))
    assert opt.param_groups[0]["lr"] == 0.5


def test_a_tensor_learning_rate_keeps_its_memory():
    lr = torch.tensor(1.0)
    opt = Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr, foreach=False, capturable=False)
    scheduler = build_scheduler(opt, section("WarmupLR", warmup_num_steps=4, warmup_type="linear"))
    memory = opt.param_groups[0]["lr"].data_ptr()
    opt.step()
    scheduler.step()
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    assert (float(opt.param_groups[0]["lr"]), opt.param_groups[0]["lr"].data_ptr()) == (0.25, memory)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (section("WarmupLRs"), r"scheduler\.type = 'WarmupLRs': .*Did you mean 'WarmupLR'.*StepLR"),
        (section("steplr", step_size=1), "Did you mean 'StepLR'"),
        (section("StepLR"), r"without scheduler\.params\.step_size"),
        (section("StepLR", step_size=2, gama=0.1), r"Unknown key scheduler\.params\.gama: .*'gamma'"),
        (section("LambdaLR"), "needs a function"),
        (section("ReduceLROnPlateau"), r"needs a metric.*over engine\.optimizer.*step\(metric\).*engine\.track"),
        (section("StepLR", step_size="ten"), r"scheduler\.params\.step_size = 'ten': StepLR expects a whole number"),
        (section("StepLR", step_size=2.5), "expects a whole number"),
        (section("StepLR", step_size=True), "expects a whole number"),
        (section("StepLR", step_size=2, gamma="nan"), "expects a finite number"),
        (section("StepLR", step_size=2, gamma=float("inf")), "expects a finite number"),
        (section("MultiStepLR", milestones=[2, "x"]), "or a list of them"),
        (section("OneCycleLR", max_lr=1.0, total_steps=9, three_phase="yes"), "expects true or false"),
        (section("SequentialLR"), "other schedulers"),
        (section("LRScheduler"), "no such schedule"),
        (section("Optimizer"), "no such schedule"),
    ],
)
def test_a_wrong_schedule_is_refused_before_there_is_an_optimizer(chosen, message):
    for call in (lambda: check_scheduler(chosen), lambda: build_scheduler(optimizer(), chosen)):
        with pytest.raises(ConfigError, match=message):
            call()


def test_a_value_that_torch_refuses_is_our_error():
    with pytest.raises(ConfigError, match=r"scheduler OneCycleLR with max_lr 1.*torch refuses it"):
        build_scheduler(optimizer(), section("OneCycleLR", max_lr=1))


def test_every_mistake_in_the_parameters_is_told_at_once():
    for wrong in (section("StepLR", gama=1, gamma="x"), section("WarmupDecayLR", warmup_tpe=1, warmup_num_steps=0)):
        with pytest.raises(SeveralConfigErrors) as error:
            check_scheduler(wrong)
        assert len(error.value.errors) == 3


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (section("WarmupLR", warmup_max_lr="1e-1", warmup_num_steps="4"),
         section("WarmupLR", warmup_max_lr=0.1, warmup_num_steps=4)),
        (section("OneCycle", cycle_min_lr=["1e-2"], cycle_max_lr=".5"),
         section("OneCycle", cycle_min_lr=[0.01], cycle_max_lr=0.5)),
        (section("StepLR", step_size="2", gamma="5e-1"), section("StepLR", step_size=2, gamma=0.5)),
        (section("MultiStepLR", milestones=["1", "1e0"], gamma="0.5"),
         section("MultiStepLR", milestones=[1, 1], gamma=0.5)),
        (section("OneCycleLR", max_lr="1e-1", total_steps="9"), section("OneCycleLR", max_lr=0.1, total_steps=9)),
    ],
)  # fmt: skip
def test_numbers_may_be_written_as_text(text, number):
    first, second = optimizer(Adam), optimizer(Adam)
    check_scheduler(text)
    assert used(first, build_scheduler(first, text), 5) == used(second, build_scheduler(second, number), 5)
