"""Every way in which bytes may go, chosen by ``backends.options.shm``: the same results; wrong options are refused."""

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from shm_operations import move, reduce
from shm_ranks import meet, on_ranks, only_shm, plugin, raised, regroup

from polyscale.discovery import load
from polyscale.errors import ConfigError, UnsupportedError
from polyscale.hooks import PluginContext

pytestmark = only_shm

OPTIONS = {
    "staged": {"read_memory": False, "staging_mib": 0.02},
    "staged-at-once": {"read_memory": False},
    "by-socket": {"descriptors": "socket", "spin_us": 0},
    "by-proc": {"descriptors": "proc", "spin_us": 200},
    "keeping-nothing": {"keep_mib": 0},
    "disabled": {"enabled": False},
}
DTYPES = [torch.uint8, torch.bfloat16, torch.float64]


def with_options(options):
    return load("communication", "shm", PluginContext("shm", options=options))


@contextlib.contextmanager
def options_of_this_process(options):
    logging.getLogger("polyscale").setLevel(logging.ERROR)
    with_options(options).backend("cpu")
    try:
        yield
    finally:
        with_options({}).backend("cpu")
        logging.getLogger("polyscale").setLevel(logging.NOTSET)


def collectives(per_rank):
    """The oracle's collectives in a group of each rank's own options."""
    options = per_rank[dist.get_rank() % len(per_rank)]
    with options_of_this_process(options):
        regroup_with(options)
        sizes = (0, 1, 7, 30_001)
        in_order = not dist.group.WORLD.why_gloo or dist.get_world_size() == 2  # more ranks: gloo's own order
        wrong = move(DTYPES, sizes) + reduce(DTYPES, sizes, ["SUM", "MAX"] if in_order else ["MAX"])
        buffer = plugin().allocate(50_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(buffer.fill_(1))
        return wrong if buffer.unique().tolist() == [float(dist.get_world_size())] else [*wrong, "allocated"]


def regroup_with(options):
    """``regroup``, with the options of this process."""
    import shm_ranks

    usual = shm_ranks.plugin
    shm_ranks.plugin = lambda name: with_options(options)
    try:
        regroup("shm", prefix="with-options")
    finally:
        shm_ranks.plugin = usual


QUICK = ("staged", "disabled")
CASES = [(name, 2) for name in QUICK]
CASES += [pytest.param(name, 2, marks=pytest.mark.long) for name in OPTIONS if name not in QUICK]
CASES += [pytest.param(name, 4, marks=pytest.mark.long) for name in OPTIONS]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_collectives_by_every_way(name, world):
    assert on_ranks(world, collectives, [OPTIONS[name]]) == [[]] * world


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_other_options(world):
    """They agree on one way, and none waits for ever."""
    for one, two in (("staged", "by-proc"), ("by-socket", "by-proc"), ("disabled", "staged")):
        assert on_ranks(world, collectives, [OPTIONS[one], OPTIONS[two]]) == [[]] * world


def one_sends_little(rounds):
    """Rank 0 sends to rank 1 alone, so few bytes that they lie in its record, in many chunks; then its next record."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with options_of_this_process(OPTIONS["staged"]):
        regroup_with(OPTIONS["staged"])
        wrong = []
        for index in range(rounds):
            numel = 300 + 613 * (index % 5)  # floats to each; rank 0's whole record holds 4096
            sends = [numel * (to == 1) for to in range(world)] if rank == 0 else [numel] * world
            receives = [numel * (rank == 1), *[numel] * (world - 1)]
            output = torch.zeros(sum(receives))
            dist.all_to_all_single(output, torch.full((sum(sends),), 1.0 + rank), receives, sends)
            dist.all_reduce(torch.full((3500,), 99.0))
            right = torch.cat([torch.full((n,), 1.0 + source) for source, n in enumerate(receives)])
            wrong += [] if torch.equal(output, right) else [(index, output.unique().tolist())]
        return wrong


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_few_bytes_stay_where_they_lie_until_all_have_read_them(world):
    assert on_ranks(world, one_sends_little, 200) == [[]] * world


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stagin_mib": 1}, ("stagin_mib", "Did you mean 'staging_mib'")),
        ({"staging_mib": 0}, ("staging_mib", "more than 0")),
        ({"staging_mib": "4"}, ("staging_mib", "number")),
        ({"enabled": 1}, ("enabled", "true or false")),
        ({"descriptors": "fd"}, ("descriptors", "'proc'")),
        ({"spin_us": -2}, ("spin_us", "0 to 100000, or -1")),
        ({"spin_us": 60_000_000}, ("spin_us", "0 to 100000, or -1")),
        ({"keep_mib": float("inf")}, ("keep_mib", "0 to 1073741824")),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        with_options(options)
    for word in words:
        assert word in str(caught.value)


def one_memory():
    """Memory that all ranks have: what one writes, all see, at any place of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for numel, dtype in ((1, torch.int64), (1001, torch.float32), (3_000_000, torch.uint8), (0, torch.float32)):
        made = plugin().shared(numel, dtype=dtype)
        assert made.shape == (numel,) and made.dtype == dtype
        found.append(not made.any())
        dist.barrier()
        rows = [made[each::world] for each in range(world)]
        rows[rank].fill_(rank + 1)
        dist.barrier()
        found.append(all(bool((row == each + 1).all()) for each, row in enumerate(rows)))
        dist.barrier()
        if rank == world - 1 and numel:
            made[-1] = 77
        dist.barrier()
        found.append(not numel or made[-1].item() == 77)
        dist.barrier()
    part = plugin().shared(100_000, dtype=torch.float32)
    dist.barrier()
    part[rank * 10 : rank * 10 + 10] = float(rank)
    dist.barrier()
    tensor = part[:10].clone()
    dist.broadcast(part[50_000:60_000], 0)  # shared memory in collectives
    gathered = torch.empty(10 * world)
    plugin().all_gather(gathered, part[rank * 10 : rank * 10 + 10]).wait()
    found.append(tensor.unique().tolist() == [0.0])
    found.append(gathered.view(world, 10)[:, 3].tolist() == [float(each) for each in range(world)])
    return all(found)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_memory_that_ranks_share(world):
    assert on_ranks(world, one_memory) == [True] * world


def memory_of_groups():
    """A group of its own, a gloo group, a mismatch, and memory that outlives its group."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    made = plugin().shared(1000, dtype=torch.float32, group=group)
    gloo = dist.new_group([0, 1], backend="gloo")
    try:
        plugin().shared(10, dtype=torch.float32, group=gloo)
    except UnsupportedError as error:
        refused = str(error)
    mismatch = raised(lambda: plugin().shared(10 + rank, dtype=torch.float32))
    dist.destroy_process_group(group)
    meet("destroyed")
    made[rank] = rank + 1.0
    meet("written")
    return made[:3].tolist(), refused, mismatch


def test_memory_of_a_group_outlives_it_and_needs_shm():
    one, two = on_ranks(2, memory_of_groups)
    assert one[0] == two[0] == [1.0, 2.0, 0.0]
    assert "shm" in one[1]
    assert one[2] == two[2] != "nothing was raised"


def chosen():
    """What "auto" would say here, and why not elsewhere."""
    communication = plugin()
    return communication.is_available(), communication.why_unavailable(), communication.backend("cpu")


def test_it_is_available_here():
    assert on_ranks(2, chosen) == [(True, "", "shm")] * 2


def test_it_moves_tensors_of_the_host_only():
    with pytest.raises(UnsupportedError, match="'cuda'"):
        plugin().backend("cuda")
    with pytest.raises(UnsupportedError, match="'sim'"):
        plugin().backend("sim")


def test_a_disabled_one_says_so():
    assert "enabled" in with_options({"enabled": False}).why_unavailable()
