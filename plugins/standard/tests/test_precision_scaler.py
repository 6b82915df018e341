"""Loss scalers against the documented rules, worked out by hand: one table row is one run of updates."""

import pytest

from polyscale.errors import CheckpointError, ConfigError
from polyscale_standard.precision import DynamicLossScaler, StaticLossScaler

GOOD, BAD = False, True


def scales(scaler, outcomes):
    seen = []
    for outcome in outcomes:
        scaler.update(outcome)
        seen.append(scaler.scale)
    return seen


@pytest.mark.parametrize(
    ("settings", "outcomes", "expected"),
    [
        pytest.param({"window": 3}, [GOOD] * 7, [16, 16, 32, 32, 32, 64, 64], id="doubles after each whole window"),
        pytest.param({"hysteresis": 1}, [BAD] * 3, [8, 4, 2], id="without patience each overflow halves"),
        pytest.param({"hysteresis": 2}, [BAD] * 4, [16, 8, 4, 2], id="hysteresis delays only the first halving"),
        pytest.param({"hysteresis": 3}, [BAD] * 4, [16, 16, 8, 4], id="hysteresis 3 bears two overflows"),
        pytest.param(
            {"hysteresis": 1, "window": 3},
            [GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD],
            [16, 16, 8, 8, 8, 16, 16],
            id="an overflow starts the window anew",
        ),
        pytest.param(
            {"hysteresis": 2, "window": 3},
            [GOOD, GOOD, BAD, GOOD, GOOD, GOOD],
            [16, 16, 16, 16, 16, 32],
            id="a borne overflow starts the window anew too",
        ),
        pytest.param(
            {"hysteresis": 2},
            [BAD, GOOD, BAD, GOOD, BAD],
            [16, 16, 8, 8, 4],
            id="a good update does not refill patience",
        ),
        pytest.param(
            {"hysteresis": 2, "consecutive_hysteresis": True},
            [BAD, GOOD, BAD, GOOD, BAD, BAD],
            [16, 16, 16, 16, 16, 8],
            id="consecutive: any good update refills patience",
        ),
        pytest.param(
            {"hysteresis": 2, "window": 2},
            [BAD, BAD, GOOD, GOOD, BAD, BAD],
            [16, 8, 8, 16, 16, 8],
            id="a doubling refills patience",
        ),
        pytest.param({"hysteresis": 1, "floor": 4}, [BAD] * 4, [8, 4, 4, 4], id="never below the floor"),
        pytest.param({"hysteresis": 1, "floor": 3}, [BAD] * 4, [8, 4, 3, 3], id="the floor need not be a power of two"),
        pytest.param({"window": 1}, [GOOD, GOOD], [32, 64], id="a window of one doubles at once"),
    ],
)
def test_dynamic_scale_follows_the_documented_rules(settings, outcomes, expected):
    scaler = DynamicLossScaler(initial=16.0, **({"window": 1000} | settings))
    assert scales(scaler, outcomes) == expected


def test_defaults_are_the_documented_ones():
    scaler = DynamicLossScaler()
    assert scaler.scale == 2.0**16
    assert scales(scaler, [BAD, BAD, BAD]) == [2.0**16, 2.0**15, 2.0**14]
    assert scales(scaler, [GOOD] * 1000)[-2:] == [2.0**14, 2.0**15]


def test_exhausted_after_k_skips_in_a_row_at_the_floor():
    scaler = DynamicLossScaler(initial=4.0, hysteresis=1, max_skips=3)
    seen = []
    for _ in range(5):
        scaler.update(BAD)
        seen.append((scaler.scale, scaler.exhausted))
    # 4 -> 2 -> 1 are answered by a smaller scale; the three skips at scale 1 are not.
    assert seen == [(2, False), (1, False), (1, False), (1, False), (1, True)]


def test_a_good_update_at_the_floor_clears_the_count():
    scaler = DynamicLossScaler(initial=1.0, hysteresis=1, max_skips=2)
    for outcome in (BAD, GOOD, BAD):
        scaler.update(outcome)
    assert not scaler.exhausted
    scaler.update(BAD)
    assert scaler.exhausted


def test_the_scale_stays_invertible_in_fp32():
    scaler = DynamicLossScaler(initial=2.0**120, window=1)
    assert scales(scaler, [GOOD] * 20)[-1] == 2.0**126


def test_static_scale_never_moves_and_gives_up():
    scaler = StaticLossScaler(128.0, max_skips=2)
    assert scales(scaler, [GOOD, BAD, GOOD, BAD]) == [128.0] * 4
    assert not scaler.exhausted
    scaler.update(BAD)
    assert scaler.exhausted


def test_restored_scaler_goes_on_as_the_one_that_was_saved():
    settings = {"initial": 16.0, "window": 3, "hysteresis": 2, "max_skips": 4}
    whole, first, second = (DynamicLossScaler(**settings) for _ in range(3))
    outcomes = [GOOD, BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD, BAD, BAD, BAD]
    expected = scales(whole, outcomes)
    for cut in range(len(outcomes)):
        first, second = DynamicLossScaler(**settings), DynamicLossScaler(**settings)
        before = scales(first, outcomes[:cut])
        second.load_state_dict(first.state_dict())
        assert before + scales(second, outcomes[cut:]) == expected


def test_restored_count_of_skips_goes_on():
    first = DynamicLossScaler(initial=1.0, hysteresis=1, max_skips=2)
    first.update(BAD)
    second = DynamicLossScaler(initial=1.0, hysteresis=1, max_skips=2)
    second.load_state_dict(first.state_dict())
    second.update(BAD)
    assert second.exhausted


def test_the_configuration_wins_over_a_checkpoint_of_the_other_kind_of_scaling():
    dynamic, static = DynamicLossScaler(initial=16.0), StaticLossScaler(128.0)
    dynamic.load_state_dict(static.state_dict())
    static.load_state_dict(DynamicLossScaler(initial=4.0).state_dict())
    assert (dynamic.scale, static.scale) == (16.0, 128.0)


def test_state_without_an_entry_is_refused_by_name():
    state = DynamicLossScaler().state_dict()
    del state["patience"]
    with pytest.raises(CheckpointError, match="patience"):
        DynamicLossScaler().load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"window": 0}, "loss_scale_window=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"floor": 0.0}, "min_loss_scale=0"),
        ({"max_skips": 0}, "max_skips_at_floor=0"),
        ({"initial": 1.0, "floor": 2.0}, "min_loss_scale=2"),
        ({"initial": float("inf")}, "initial loss scale inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings, key):
    with pytest.raises(ConfigError, match=key):
        DynamicLossScaler(**settings)
