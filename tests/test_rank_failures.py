"""Ranks that disagree, die, run out of memory or do not come: every rank ends or raises, and says who and where."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks, ranks_once

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}


def _model(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def _message(call):
    started = time.monotonic()
    try:
        call()
    except polyscale.PolyscaleError as error:
        assert error.given
        assert error.fix
        return str(error), time.monotonic() - started
    return "no error", 0.0


def _different_configs():
    rank = dist.get_rank()
    config = {**CONFIG, "gradient_clipping": 1.0 + rank}
    return _message(lambda: polyscale.initialize(_model(), config=config))


def test_ranks_with_different_configurations():
    for text, seconds in ranks(2).run(_different_configs):
        assert "gradient_clipping" in text
        assert "1.0" in text and "2.0" in text
        assert seconds < 20


def _different_models():
    rank = dist.get_rank()
    return _message(lambda: polyscale.initialize(_model(4 + rank), config=CONFIG))


def test_ranks_with_different_models():
    for text, seconds in ranks(2).run(_different_models):
        assert "0.weight" in text
        assert "4, 4" in text and "5, 5" in text
        assert seconds < 20


def _one_rank_saves(folder):
    engine = polyscale.initialize(_model(), config=CONFIG)
    found = ("no error", 0.0)
    if engine.topology.rank == 0:
        found = _message(lambda: engine.save(folder))
    else:
        time.sleep(4)
    engine.close()
    return found


def test_save_called_by_one_rank_only(tmp_path):
    (text, seconds), _ = ranks(2).run(_one_rank_saves, str(tmp_path), env={"POLYSCALE_TIMEOUT": "2"})
    assert "save" in text and "rank 1" in text
    assert seconds < 10
    assert not list(tmp_path.iterdir())


class _Failing(nn.Module):
    """A model in which one rank comes to grief in the third forward."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how, self.calls = _model(), how, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "memory":
                torch.empty(2**60)
            raise KeyError("the user's own mistake")
        return self.net(x).square().mean()


def _choose_another_backend_each(by_config):
    own = ("gloo", "shm")[int(os.environ["RANK"])]
    backends = {"accelerator": "cpu", "communication": own if by_config else "auto"}
    if own == "gloo" and not by_config:  # a host on which "auto" does not find the other
        backends["options"] = {"shm": {"enabled": False}}
    polyscale.initialize(torch.nn.Linear(2, 1), config={"train_micro_batch_size_per_gpu": 1, "backends": backends})


@pytest.mark.parametrize("by_config", [True, False], ids=["by configuration", "by auto"])
def test_ranks_that_choose_another_backend_are_told_at_once(by_config):
    for each in ranks_once(2, _choose_another_backend_each, by_config, timeout=90, env={"POLYSCALE_TIMEOUT": "240"}):
        assert each.returncode == 1 and not each.timed_out, each.stderr
        said = each.stderr.splitlines()[-1]
        assert "Ranks use different collectives: rank 0 uses gloo (gloo of cpu), rank 1 shm (shm of cpu)" in said
        assert "scale-report" in said


def _two_groups_in_turn():
    for communication in ("gloo", "shm", "gloo"):
        backends = {"accelerator": "cpu", "communication": communication}
        with polyscale.initialize(_model(), config={**CONFIG, "backends": backends}):
            print(dist.get_backend(), flush=True)
        dist.destroy_process_group()


def test_a_later_group_may_have_another_backend():
    for each in ranks_once(2, _two_groups_in_turn, timeout=90, env={"POLYSCALE_TIMEOUT": "60"}):
        assert each.returncode == 0, each.stderr
        assert each.stdout.split() == ["gloo", "shm", "gloo"]


def _catches_and_goes_on():
    engine = polyscale.initialize(_model(), config={**CONFIG, "backends": {"accelerator": "cpu"}})
    for step in range(6):
        if engine.topology.rank == 1 and step == 3:
            break
        try:
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        except polyscale.PolyscaleError as error:
            print(error, flush=True)


def test_going_on_after_another_rank_has_left_ends_at_once_and_says_so():
    first, second = ranks_once(2, _catches_and_goes_on, timeout=100, env={"POLYSCALE_TIMEOUT": "240"})
    assert (second.returncode, second.timed_out, first.timed_out) == (0, False, False)
    said = first.stdout.splitlines()
    assert len(said) >= 2 and all("rank 1" in line and "has left after step 3" in line for line in said), said
    assert "Training after an exception: rank 1 does not come" in said[-1]


def _train_until_grief(how):
    engine = polyscale.initialize(_Failing(how), config=CONFIG)
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()


@pytest.mark.parametrize("how", ["kill", "memory", "raise"])
def test_a_rank_that_fails_in_a_step_ends_the_others(how):
    outcomes = ranks_once(2, _train_until_grief, how, timeout=60, env={"POLYSCALE_TIMEOUT": "120"})
    healthy, failed = outcomes
    assert not healthy.timed_out
    assert failed.returncode == (-signal.SIGKILL if how == "kill" else 1)
    # Gloo may notice a broken connection before the watchdog ends the process: the message is the same.
    assert healthy.returncode in (1, 75)
    assert healthy.seconds - failed.seconds < 10
    assert "rank 1" in healthy.stderr.lower()
    assert {"kill": "lost rank 1", "memory": "memory", "raise": "the user's own mistake"}[how] in healthy.stderr
    assert "backward" in healthy.stderr or "step" in healthy.stderr, "where this rank was"
    if how != "kill":
        assert "forward" in healthy.stderr, "where the other rank was"
        assert "test_rank_failures.py" in healthy.stderr


def _full_disk(folder):
    import resource

    engine = polyscale.initialize(_model(256), config=CONFIG)
    engine.save(folder, "good")
    with torch.no_grad():
        before = engine.parameters_store.get_full("0.weight")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        found = _message(lambda: engine.save(folder, "bad"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    engine.load(folder)
    assert torch.equal(before, engine.parameters_store.get_full("0.weight"))
    engine.close()
    return found


def test_no_space_left_while_saving_keeps_the_old_checkpoint(tmp_path):
    for text, _ in ranks(2).run(_full_disk, str(tmp_path)):
        assert "large" in text.lower() or "space" in text.lower()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["good", "latest"]


def _bad_loads(folder):
    engine = polyscale.initialize(_model(), config=CONFIG)
    engine.save(folder, "a")
    found = {}
    found["exists"] = _message(lambda: engine.save(folder, "a"))[0]
    found["tag"] = _message(lambda: engine.load(folder, "b"))[0]
    found["missing"] = _message(lambda: engine.load(folder + "-none"))[0]
    engine.save(folder, "a", overwrite=True)
    engine.save(folder + "-broken", "x")
    if engine.topology.rank == 0:
        Path(folder + "-broken", "x", "manifest.json").unlink()
    torch.distributed.barrier()
    found["half"] = _message(lambda: engine.load(folder + "-broken", "x"))[0]
    found["client"] = _message(lambda: engine.save(folder, "c", client_state={"model": nn.Linear(1, 1)}))[0]
    engine.close()
    other = polyscale.initialize(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)), config=CONFIG)
    found["shapes"] = _message(lambda: other.load(folder))[0]
    other.close()
    bigger = polyscale.initialize(nn.Sequential(*_model(), nn.Linear(1, 1)), config=CONFIG)
    before = dict(bigger.parameters_store.iter_full())
    found["unfilled"] = _message(lambda: bigger.load(folder))[0]
    for name, value in bigger.parameters_store.iter_full():
        assert torch.equal(value, before[name])
    bigger.close()
    return found


def test_loads_that_must_not_work(tmp_path):
    for found in ranks(2).run(_bad_loads, str(tmp_path / "c")):
        assert "overwrite" in found["exists"]
        assert "'b'" in found["tag"] and "a" in found["tag"]
        assert "no such directory" in found["missing"]
        assert "x" in found["half"]
        assert "Linear" in found["client"]
        assert "0.weight [4, 4] instead of [5, 4]" in found["shapes"]
        assert "1 missing" in found["unfilled"] or "3.weight" in found["unfilled"]
