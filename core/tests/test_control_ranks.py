"""Ranks that agree, fail and die. What they do is in control_ranks/, which runs once for all tests."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.testing.output import without_name_service

PROGRAM = Path(__file__).with_name("control_ranks")


class Ranks:
    def __init__(self, folder):
        self.folder = folder
        self.results = json.loads((folder / "results.json").read_text())

    def code(self, name, rank):
        print(f"{name}, rank {rank}: {self.results[f'{name}.{rank}']}\n{self.errors(name, rank)}")  # shown on a failure
        return self.results[f"{name}.{rank}"][0]

    def codes(self, name):
        world = sum(key.startswith(f"{name}.") for key in self.results)
        return [self.code(name, rank) for rank in range(world)]

    def errors(self, name, rank):
        return without_name_service((self.folder / f"{name}.{rank}.err").read_text())

    def said(self, name, rank, key):
        lines = (self.folder / f"{name}.{rank}.out").read_text().splitlines()
        return [value for said, value in map(json.loads, lines) if said == key]


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(PROGRAM), str(folder)], check=True, env=environment, timeout=300)
    return Ranks(folder)


def test_ranks_that_give_equal_values_agree_and_see_every_value(ranks):
    assert ranks.codes("agreement") == [0, 0, 0]
    for rank in range(3):
        assert ranks.said("agreement", rank, "shared") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]]
        assert ranks.said("agreement", rank, "decided") == ["tag of 0"]


def test_a_different_value_is_an_error_on_every_rank_with_both_values(ranks):
    for rank in range(3):
        first, second = ranks.said("agreement", rank, "mismatch")
        assert first == second
        assert "configuration['seed'] differs" in first
        assert "rank 0 has 0, rank 2 has 1" in first


def test_a_rank_that_does_not_come_is_named_on_every_rank(ranks):
    for rank in range(3):
        (message,) = ranks.said("agreement", rank, "missing")
        assert "save of tag 'a'" in message
        assert "rank 2 of 3 did not come within 1.5 s" in message
        assert "POLYSCALE_TIMEOUT" in message


def test_agreements_leave_few_keys_in_the_store(ranks):
    (left,) = ranks.said("agreement", 0, "keys left")
    (after_large,) = ranks.said("agreement", 0, "keys left after large")
    assert left < 20
    assert after_large < 20


def test_values_of_any_size_are_shared_and_compared(ranks):
    for rank in range(3):
        assert ranks.said("agreement", rank, "large") == [[True, True]]
        (message,) = ranks.said("agreement", rank, "large mismatch")
        assert message.startswith("large value['layer.8999'] differs between ranks: rank 0 has 0, rank 2 has 1")


def test_a_run_without_failures_says_nothing_and_leaves_no_thread(ranks):
    assert ranks.codes("calm") == [0, 0]
    for rank in range(2):
        assert ranks.errors("calm", rank) == ""
        assert ranks.said("calm", rank, "threads") == [1]
        assert ranks.said("calm", rank, "threads after one stop") == [1]
        assert ranks.said("calm", rank, "threads after both") == [0]
        assert ranks.said("calm", rank, "hook restored") == [True]


@pytest.mark.parametrize(("name", "dead"), [("killed", 1), ("first_rank_killed", 0), ("first_rank_killed_at_once", 0)])
def test_a_killed_rank_ends_the_others_within_ten_seconds(ranks, name, dead):
    assert ranks.code(name, dead) == -signal.SIGKILL
    assert ranks.code(name, 1 - dead) == 75
    assert ranks.results[f"{name}.{1 - dead}"][1] - ranks.results[f"{name}.{dead}"][1] < 10
    message = ranks.errors(name, 1 - dead)
    assert f"rank {dead} (pid " in message
    assert "was killed" in message
    assert "this rank was in forward (steps done: 0) at" in message
    assert "failing.py:" in message
    assert f"in {name} (module failing)" in message


def test_a_rank_in_a_collective_with_a_killed_one_names_it(ranks):
    assert ranks.codes("killed_in_collective") == [1, -signal.SIGKILL]
    message = ranks.errors("killed_in_collective", 0)
    assert "rank 0 has lost rank 1 while it was in backward, at block.3 all_reduce (steps done: 0)" in message
    assert "was killed or ended at once" in message


def test_a_failure_that_one_rank_catches_ends_the_others_with_who_where_and_what(ranks):
    assert ranks.code("caught_on_one_rank", 0) == 75
    message = ranks.errors("caught_on_one_rank", 0)
    assert "raised ValueError: sizes do not match at" in message
    assert "cases.py" in message
    assert "in fail (module cases), while in forward, at encoder.block.2 (steps done: 0)" in message
    assert "this rank was in step" in message
    assert ranks.code("caught_on_one_rank", 1) != 0


def test_an_uncaught_exception_ends_the_other_rank_too(ranks):
    assert ranks.codes("uncaught_on_one_rank") == [75, 1]
    assert "raised ValueError: nobody catches this" in ranks.errors("uncaught_on_one_rank", 0)
    assert "Traceback" in ranks.errors("uncaught_on_one_rank", 1)


def test_what_was_noted_last_is_told_by_the_rank_that_failed_and_by_the_one_that_waits(ranks):
    assert ranks.codes("uncaught_in_a_noted_collective") == [75, 1]
    failed = "while in backward, at transformer.h.3 reduce_scatter (steps done: 3)"
    first, rest = ranks.errors("uncaught_in_a_noted_collective", 1).split("\n", 1)
    assert first == f"polyscale: rank 1 raised this {failed}:"
    assert "Traceback" in rest
    waiting = ranks.errors("uncaught_in_a_noted_collective", 0)
    assert f"in fail (module cases), {failed}" in waiting
    assert "this rank was in backward, at transformer.h.2 all_gather (steps done: 3) at" in waiting


def test_ranks_that_fail_alike_keep_their_own_exception(ranks):
    assert ranks.codes("uncaught_on_both") == [1, 1]
    for rank in range(2):
        assert "ValueError: the same on both" in ranks.errors("uncaught_on_both", rank)
        assert "another rank" not in ranks.errors("uncaught_on_both", rank)


def test_ranks_that_catch_the_same_failures_go_on(ranks):
    assert ranks.codes("caught_on_both") == [0, 0]
    assert ranks.said("caught_on_both", 0, "went on") == [[0, 1]]


def test_a_rank_that_ends_early_ends_one_that_waits_in_a_phase(ranks):
    assert ranks.codes("ended_early") == [75, 0]
    message = ranks.errors("ended_early", 0)
    assert "ends because it waits for a rank that has left:\n  rank 1 (pid" in message
    assert "has left after step 7 without an error (its script ended or called sys.exit)" in message
    assert "this rank was in backward (steps done: 7) at" in message


def test_ranks_that_wait_for_one_another_in_different_places_end_with_all_places(ranks):
    assert ranks.codes("different_calls") == [75, 75]
    for rank in range(2):
        message = ranks.errors("different_calls", rank)
        assert f"rank {rank} (pid" in message
        assert "ends because the ranks wait for one another:" in message
        for other, phase in enumerate(("forward", "backward")):
            assert re.search(
                rf"rank {other} has waited for \d+ s in {phase}, at layer.{other} all_gather \(steps done: 5\) at "
                r"\S+waiting.py:\d+ in different_calls",
                message,
            )
        assert "Make the same calls in the same order on every rank" in message


def test_a_timeout_of_a_collective_says_where_every_rank_is_and_what_to_do(ranks):
    assert ranks.codes("different_calls_until_the_timeout") == [1, 1]
    places = [
        f"in {phase}, at layer.{rank} all_gather (steps done: 0)" for rank, phase in enumerate(("forward", "backward"))
    ]
    for rank in range(2):
        message = ranks.errors("different_calls_until_the_timeout", rank)
        assert f"RankError: rank {rank} waited for the others for 3 s {places[rank]}" in message
        assert f"rank {1 - rank} was last seen {places[1 - rank]} at " in message
        assert "in different_calls_until_the_timeout (module waiting)" in message
        assert (
            "Make the same calls in the same order on every rank; where one is only slow, set POLYSCALE_TIMEOUT"
            in message
        )


@pytest.mark.parametrize(
    "name",
    [
        "ended_early_while_the_other_computes",
        "saves_long_after_the_other_ended",
        "first_rank_ends_first",
        "ends_the_group_itself",
        "holds_the_lock",
        "first_rank_is_stopped_for_a_while",
    ],
)
def test_a_rank_is_not_ended_for_what_is_in_order(ranks, name):
    assert ranks.codes(name) == [0, 0]
    assert ranks.errors(name, 0) + ranks.errors(name, 1) == ""


def test_ranks_are_not_ended_while_one_of_them_does_something_other_than_wait_for_ranks(ranks):
    name = "waits_for_a_rank_that_does_something_of_its_own"
    assert ranks.codes(name) == [0, 0, 0]
    assert [ranks.errors(name, rank) for rank in range(3)] == ["", "", ""]


def test_a_silent_host_is_noticed(ranks):
    assert ranks.code("silent_host", 0) == 75
    assert "gives no sign of life" in ranks.errors("silent_host", 0)
    assert "on host1" in ranks.errors("silent_host", 0)


def test_ranks_meet_on_a_host_whose_name_does_not_resolve(ranks):
    skipped = ranks.said("hostname_does_not_resolve", 0, "skip")
    if skipped:
        pytest.skip(skipped[0])
    assert ranks.codes("hostname_does_not_resolve") == [0, 0]
    assert ranks.said("hostname_does_not_resolve", 1, "sum") == [[2.0, "no-such-host.invalid"]]
    assert ranks.errors("hostname_does_not_resolve", 1) == ""


def test_a_process_without_a_launcher_is_a_world_of_one(ranks):
    assert ranks.codes("alone") == [0]
    assert ranks.said("alone", 0, "same") == [True]
    assert ranks.said("alone", 0, "alone") == [[[1], 2, "rank 0 of 1", 1]]
    assert ranks.said("alone", 0, "new group, new control") == [True]


def test_a_start_that_cannot_work_is_refused(ranks):
    (alone,) = ranks.said("alone", 0, "no one comes")
    assert alone.startswith("RankError: rank 0 of 2 cannot join the others at 127.0.0.1")
    (high,) = ranks.said("alone", 0, "rank too high")
    assert high.startswith("ConfigError: RANK=5")
    assert "from 0 to 1" in high
    (address,) = ranks.said("alone", 0, "no address")
    assert address.startswith("ConfigError: WORLD_SIZE=2 without MASTER_ADDR")


def test_topology_groups_hold_the_ranks_of_their_purpose(ranks):
    assert ranks.codes("topology") == [0, 0, 0, 0]
    assert ranks.said("topology", 3, "hybrid") == [
        ["rank 3 of 4: dp_replicate 2 (1), dp_shard 2 (1)", [2, 3], [0, 1, 2, 3]]
    ]
    assert ranks.said("topology", 0, "hybrid mesh") == [[[0, 1], [2, 3]]]
    assert ranks.said("topology", 3, "mixed") == [
        {"batch": [1, 3], "grad": [1, 3], "expert_grad": [1, 3], "norm": [0, 1, 2, 3], "tp": [2, 3], "ep": [2, 3]}
    ]
    assert ranks.said("topology", 3, "dp") == [[1, 2, 1, 2]]
    assert ranks.said("topology", 1, "three") == [[[0, 1, 2, 3], [1, 3], True]]
    assert ranks.said("topology", 2, "pipeline") == [[[2, 3], [0, 2]]]
    assert [ranks.said("topology", rank, "sum") for rank in range(4)] == [[2.0], [4.0], [2.0], [4.0]]
    assert ranks.said("topology", 0, "control") == [["gloo", True]]
    assert ranks.said("topology", 0, "closed group")


def test_topologies_share_meshes_until_the_default_group_ends(ranks):
    assert ranks.codes("remade_default_group") == [0, 0, 0, 0]
    for rank in range(4):
        assert ranks.said("remade_default_group", rank, "shared") == [[True, True]]
        for when in ("before", "other closed", "after"):
            assert ranks.said("remade_default_group", rank, when) == [[0.0, 2.0, 4.0, 6.0]]
        (stale,) = ranks.said("remade_default_group", rank, "stale")
        assert "default process group has ended" in stale
