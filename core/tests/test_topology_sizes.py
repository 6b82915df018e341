"""Sizes of the axes: what fits, what fills up, and what is refused with the numbers."""

import pytest

from polyscale.errors import ConfigError, RankError
from polyscale.topology import DENSE_AXES, EXPERT_AXES, Topology, resolve_sizes


def sizes(world_size, *, ep=1, etp=1, **dense):
    given = {**dict.fromkeys(DENSE_AXES, 1), "dp_shard": -1, **dense}
    return resolve_sizes(given, ep=ep, etp=etp, world_size=world_size)


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (1, {}, {"dp_shard": 1, "edp": 1}),
        (8, {}, {"dp_shard": 8, "edp": 8}),
        (8, {"tp": 2, "dp_replicate": 2}, {"dp_shard": 2, "edp": 4}),
        (8, {"tp": -1, "dp_shard": 2}, {"tp": 4}),
        (16, {"pp": 2, "sp": 2, "tp": 2, "ep": 4}, {"dp_shard": 2, "edp": 2, "ep": 4}),
        (8, {"tp": 2, "ep": 2, "etp": 2}, {"dp_shard": 4, "edp": 2}),
    ],
)
def test_sizes_fill_up_and_both_views_cover_the_world(world, given, expected):
    found = sizes(world, **given)
    assert {name: found[name] for name in expected} == expected
    for axes in (DENSE_AXES, EXPERT_AXES):
        product = 1
        for axis in axes:
            product *= found[axis]
        assert product == world


@pytest.mark.parametrize(
    ("world", "given", "words"),
    [
        (4, {"tp": 3}, ("tp = 3", "multiply to 3", "4 ranks")),
        (4, {"dp_shard": 2}, ("dp_shard = 2", "multiply to 2", "4 ranks", "-1 or 4")),
        (2, {"dp_shard": 4}, ("multiply to 4", "2 ranks")),
        (4, {"tp": -1}, ("dp_shard = -1", "tp = -1", "Only one")),
        (4, {"tp": 0}, ("topology.tp = 0", "positive")),
        (4, {"tp": 2.0}, ("topology.tp = 2.0", "positive")),
        (4, {"sp": True}, ("topology.sp = True", "positive")),
        (4, {"ep": -1}, ("topology.ep = -1",)),
        (4, {"ep": 3}, ("ep = 3", "dp_shard * sp * tp = 4")),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(world, given, words):
    with pytest.raises(ConfigError) as caught:
        sizes(world, **given)
    for word in words:
        assert word in str(caught.value)


def test_a_topology_needs_a_process_group(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RankError, match=r"polyscale\.initialize"):
        Topology.build()


@pytest.mark.parametrize("rank", range(16))
def test_coordinates_follow_the_order_of_the_axes(rank):
    found = sizes(16, pp=2, dp_replicate=2, tp=2, ep=2)
    topology = Topology(found, rank=rank, world_size=16, local_rank=0, device_type="cpu")
    assert topology.coordinate("pp") == rank // 8
    assert topology.coordinate("dp_replicate") == rank // 4 % 2
    assert topology.coordinate("dp_shard") == rank // 2 % 2
    assert topology.coordinate("tp") == rank % 2
    assert topology.coordinate("ep") == rank % 2
    assert topology.coordinate("edp") == rank // 2 % 2
    assert topology.dp_rank == rank // 2 % 4
    assert topology.dp_size == 4
    assert topology.wide_axes == ("pp", "dp_replicate", "dp_shard", "tp", "edp", "ep")


def test_axes_and_purposes_that_do_not_exist_are_named():
    topology = Topology(sizes(4), rank=0, world_size=4, local_rank=0, device_type="cpu")
    with pytest.raises(ConfigError, match="Did you mean 'dp_shard'"):
        topology.size("dp_shards")
    with pytest.raises(ConfigError, match="stand in its order"):
        topology.mesh("tp", "dp_shard")
    with pytest.raises(ConfigError, match="stand in its order"):
        topology.mesh("tp", "ep")
    with pytest.raises(ConfigError, match="Purposes: batch"):
        topology.group("everything")
