import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polyscale import testing
from polyscale.errors import ConfigError
from polyscale.testing import RankPool, RanksFailed, count_collectives, ranks, ranks_once


@dataclass
class Place:
    rank: int
    world: int
    env: tuple
    threads: int


def where(prefix=""):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    env = tuple(os.environ[name] for name in names)
    return Place(dist.get_rank(), dist.get_world_size(), (prefix, *env), torch.get_num_threads())


def summed(tensor):
    tensor = tensor + dist.get_rank()
    dist.all_reduce(tensor)
    return tensor


def draw():
    return torch.rand(4)


def apply(function, *args):
    return function(*args)


def raises_on(rank, code=None):
    print("before the failure, on stdout")
    sys.stderr.write("before the failure, on stderr\n")
    if dist.get_rank() == rank:
        if code is not None:
            os._exit(code)
        raise ConfigError("stage 4", why="there are stages 0 to 3", fix="Use 3")


def raises_own(kind):
    raise kind(7)


class OwnError(Exception):
    def __init__(self, *, number):
        super().__init__()


def warns():
    warnings.warn("a warning", stacklevel=1)


def loops(seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)


def reads(name):
    return os.environ.get(name)


def device_of_tensors():
    return torch.empty(1).device.type, dist.get_backend()


def pids():
    return os.getpid()


def leaves_group_open():
    dist.new_group([0, 1])
    return id(dist.group.WORLD)


def named(new, old):
    return getattr(dist, new if hasattr(dist, new) else old)


def many_collectives():
    rank, ones = dist.get_rank(), torch.ones(4)
    with count_collectives() as seen:
        dist.all_reduce(ones)
        named("all_gather_single", "all_gather_into_tensor")(torch.empty(8), ones)
        named("reduce_scatter_single", "reduce_scatter_tensor")(torch.empty(2), ones)
        dist.broadcast(ones, 0)
        dist.barrier()
    dist.all_reduce(ones)
    return rank, dict(seen.counts), [(launch.kind, launch.numel, launch.dtype) for launch in seen.launched]


def fully_sharded_step():
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with count_collectives() as seen:
        model(torch.ones(2, 4)).sum().backward()
    return seen["all_gather"], seen["reduce_scatter"], seen["all_reduce"]


def test_every_rank_runs_the_function_and_results_come_by_rank():
    places = ranks(2).run(where, prefix="x")
    assert places == [Place(rank, 2, ("x", str(rank), str(rank), "2", "2"), 1) for rank in range(2)]


def test_tensors_travel_and_collectives_work_on_four_ranks():
    results = ranks(4).run(summed, torch.zeros(3, dtype=torch.float64))
    assert all(torch.equal(result, torch.full((3,), 6.0, dtype=torch.float64)) for result in results)


def test_processes_are_reused_and_each_case_is_seeded_alike():
    pool = ranks(2)
    assert pool.run(pids) == pool.run(pids)
    (first, other), (again, _) = pool.run(draw), pool.run(draw)
    assert torch.equal(first, other) and torch.equal(first, again)
    assert not torch.equal(first, pool.run(draw, seed=1)[0])


def test_functions_of_test_modules_may_be_arguments():
    assert [place.rank for place in ranks(2).run(apply, where, "y")] == [0, 1]


def test_a_function_that_no_process_can_find_is_refused():
    with pytest.raises(TypeError, match="top level"):
        ranks(2).run(lambda: None)


def test_a_group_left_open_does_not_disturb_the_next_case():
    pool = ranks(2)
    before = pool.run(pids)
    pool.run(leaves_group_open)
    assert pool.run(summed, torch.zeros(1)) == [torch.ones(1), torch.ones(1)]
    assert pool.run(pids) == before


def test_environment_is_set_for_the_case_only():
    pool = ranks(2)
    assert pool.run(reads, "A_NAME_OF_THIS_TEST", env={"A_NAME_OF_THIS_TEST": "5"}) == ["5", "5"]
    assert pool.run(reads, "A_NAME_OF_THIS_TEST") == [None, None]


def test_an_exception_reaches_the_test_with_what_every_rank_did_and_wrote():
    pool = ranks(2)
    before = pool.run(pids)
    with pytest.raises(RanksFailed) as caught:
        pool.run(raises_on, 1)
    error = caught.value
    assert isinstance(error.exceptions[1], ConfigError)
    assert error.exceptions[1].fix == "Use 3"
    assert error.exceptions[0] is None
    assert [failure.kind for failure in error.failures] == ["ok", "exception"]
    for text in ("rank 1 raised", "in raises_on", "on stdout", "on stderr", "stages 0 to 3"):
        assert text in str(error)
    assert set(pool.run(pids)).isdisjoint(before)


@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt, SystemExit])
def test_any_exception_class_is_reported(kind):
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(raises_own, kind)
    assert [type(error) for error in caught.value.exceptions] == [TypeError if kind is OwnError else kind] * 2


def test_an_exiting_rank_is_reported_with_its_code_and_replaced():
    pool = ranks(2)
    with pytest.raises(RanksFailed) as caught:
        pool.run(raises_on, 0, code=75)
    assert caught.value.exit_codes == (75, None)
    assert "ended with exit code 75" in str(caught.value) and "on stderr" in caught.value.failures[0].output
    assert len(pool.run(pids)) == 2


def test_a_case_over_its_time_is_killed_and_says_where_it_stood():
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(loops, 50, timeout=1.5)
    assert time.monotonic() - started < 8
    assert [failure.kind for failure in caught.value.failures] == ["ok", "timeout"]
    assert "in loops" in caught.value.failures[1].output


def test_a_warning_is_an_error_on_ranks():
    with pytest.raises(RanksFailed, match="a warning"):
        ranks(2).run(warns)


def test_collectives_are_counted_by_kind_and_in_order():
    for _, counts, launched in ranks(2).run(many_collectives):
        assert counts == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "barrier": 1}
        assert launched[0] == ("all_reduce", 4, "float32")
        assert launched[1][:2] == ("all_gather", 8)
        assert launched[2][:2] == ("reduce_scatter", 4)


def test_collectives_of_fully_shard_are_counted():
    assert ranks(2).run(fully_sharded_step) == [(4, 2, 0)] * 2


def exits_with_rank(text):
    print(f"{text} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_fresh_ranks_report_exit_codes_and_output(tmp_path):
    outcomes = ranks_once(2, exits_with_rank, "rank")
    assert [outcome.returncode for outcome in outcomes] == [0, -signal.SIGKILL]
    assert outcomes[0].stdout == "rank 0 of 2\n"
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint(sys.argv[1], flush=True)\ntime.sleep(60)\n")
    (outcome,) = ranks_once(1, script, "given", timeout=1.0)
    assert outcome.timed_out and outcome.returncode == -signal.SIGKILL and outcome.stdout == "given\n"


def length(text):
    print(len(text))


def test_arguments_of_any_size_reach_a_process_of_its_own():
    (outcome,) = ranks_once(1, length, "x" * 300_000)
    assert outcome.stdout == "300000\n", outcome


PARENT = """
import os, sys
from polyscale.testing import ranks
import {module}
print(*ranks(2).run({module}.pids), flush=True)
ranks(2).run({module}.loops, 600)
"""


def test_no_rank_outlives_a_killed_parent(tmp_path):
    code = PARENT.format(module=Path(__file__).stem)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_idle_pools_use_no_processor_time():
    numbers = [pid for n in (2, 4) for pid in ranks(n).run(pids)]
    before = [cpu_seconds(pid) for pid in numbers]
    time.sleep(1.0)
    assert max(after - start for after, start in zip(map(cpu_seconds, numbers), before, strict=True)) <= 0.1


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_public_names_are_frozen():
    assert testing.__all__ == [
        "Collective",
        "Collectives",
        "Outcome",
        "PoolReport",
        "RankFailure",
        "RankPool",
        "RanksFailed",
        "RemoteError",
        "assert_close_to_oracle",
        "assert_no_farther",
        "close_pools",
        "count_collectives",
        "parity",
        "pool_reports",
        "ranks",
        "ranks_once",
        "settled_memory",
        "tiny_gpt2",
    ]


def test_comparisons_name_every_tensor_that_is_too_far():
    exact = {"a": torch.ones(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    single = {"a": torch.ones(3) + 1e-6, "b": torch.full((2,), 1e-6)}
    good = {"a": torch.ones(3) - 3e-6, "b": torch.full((2,), -3e-6)}
    bad = {"a": good["a"], "b": torch.full((2,), 1e-4)}
    testing.assert_close_to_oracle(good, single, within=5e-6)
    testing.assert_no_farther(good, single, exact)
    for check in (
        lambda: testing.assert_no_farther(bad, single, exact),
        lambda: testing.assert_close_to_oracle(bad, single, within=5e-6),
        lambda: testing.assert_close_to_oracle(bad, single, within=5e-6, of_maximum=1.0),
        lambda: testing.assert_close_to_oracle({"a": good["a"], "b": torch.tensor([0.0, torch.nan])}, single, within=1),
        lambda: testing.assert_close_to_oracle({"a": good["a"]}, single, within=1),
        lambda: testing.assert_close_to_oracle({**good, "b": good["b"].double()}, single, within=1),
    ):
        with pytest.raises(AssertionError, match=r"\bb\b"):
            check()


def test_tiny_gpt2_is_small_and_trains_alike_each_time():
    pytest.importorskip("transformers")
    tokens = torch.arange(32).view(2, 16)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = testing.tiny_gpt2()
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    assert losses[0] == losses[1] and 5 < losses[0] < 6
    assert 40_000 < sum(parameter.numel() for parameter in model.parameters()) < 60_000
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_pool_that_cannot_start_says_what_its_first_rank_said(monkeypatch):
    monkeypatch.setattr("polyscale.testing.pool.START_TIMEOUT_S", 0.0)
    pool = RankPool(2)
    try:
        with pytest.raises(RanksFailed, match="starting the pool") as caught:
            pool.run(pids)
        assert caught.value.failures[0].kind == "timeout"
    finally:
        pool.close()


def test_ranks_of_another_accelerator_are_other_processes():
    assert ranks(1) is ranks(1, accelerator="cpu")
    pool = ranks(1, accelerator="no-such-device")
    assert pool is not ranks(1)
    with pytest.raises(RanksFailed, match="activating the accelerator"):
        pool.run(pids)
    with pytest.raises(RanksFailed, match="no-such-device"):
        pool.run(pids)
    assert ranks(1).run(device_of_tensors) == [("cpu", "gloo")]
