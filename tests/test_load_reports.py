"""What a load restores, leaves and says when engine and checkpoint differ; and that a failed one changes nothing."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import polyscale
from polyscale.errors import CheckpointError, PluginError, PolyscaleError
from polyscale.testing import ranks


class Tied(nn.Module):
    """A weight under two names; ``head_first`` changes which of them comes first, ``tie`` whether they are one."""

    def __init__(self, head_first=False, tie=True):
        super().__init__()
        if head_first:
            self.head, self.embed = nn.Linear(4, 6, bias=False), nn.Embedding(6, 4)
        else:
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)).square().mean()


class Tracked:
    """A tracked object that can be told to fail."""

    def __init__(self, value=0, fails=""):
        self.value, self.fails = value, fails

    def state_dict(self):
        if self.fails == "state_dict":
            raise ValueError("no state today")
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.fails == "load_state_dict":
            raise ValueError("no such state")
        self.value = state["value"]


def _config(stage=2, name="AdamW", **params):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": name, "params": {"lr": 0.1, **params}},
        "zero_optimization": {"stage": stage},
    }


def _engine(stage=2, model=None, **changes):
    torch.manual_seed(5)
    config = changes.pop("config", None) or _config(stage)
    return polyscale.initialize(nn.Linear(3, 2) if model is None else model, config=config, **changes)


def _update(engine, x=None):
    engine.backward(engine(torch.ones(1, 3) if x is None else x).sum())
    engine.step()


def _whole(engine):
    """Everything of the engine that a load may change."""
    store = engine.parameters_store
    kinds = ("parameter", *sorted({name for fqn in store.infos for name in store.state_names(fqn)}))
    tensors = {f"{kind} {name}": value.clone() for kind in kinds for name, value in store.iter_full(kind)}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    counters = (engine.steps, engine.skipped, engine.micro_steps, engine.samples)
    tracked = {name: item.state_dict() for name, item in engine._tracked.items() if item is not None}
    return tensors, (groups, json.dumps(scheduler), counters, tracked)


def _same(one, other):
    return (
        one[0].keys() == other[0].keys()
        and all(torch.equal(value, other[0][name]) for name, value in one[0].items())
        and one[1] == other[1]
    )


def _error(call, kind=PolyscaleError):
    try:
        call()
    except kind as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


# Tied weights.


def _load_under_another_name(folder, stage, tie):
    x = torch.tensor([[1, 2, 4]])
    with _engine(stage, Tied()) as engine:
        _update(engine, x)
        _update(engine, x)
        engine.save(folder)
        store = engine.parameters_store
        weight, moment = store.get_full("embed.weight"), store.get_full("embed.weight", "exp_avg")
    with _engine(stage, Tied(head_first=True, tie=tie)) as engine:
        _update(engine, x + 1)
        report, store = engine.load(folder), engine.parameters_store
        loaded = {name: (store.get_full(name), store.get_full(name, "exp_avg")) for name in store.infos}
        step = {name: float(store.get_full(name, "step")) for name in store.infos}
    for name, (new_weight, new_moment) in loaded.items():
        assert torch.equal(new_weight, weight), name
        assert torch.equal(new_moment, moment), name
        assert step[name] == 2.0
    return sorted(loaded), report


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_tied_weight_is_found_under_its_other_name_with_its_optimizer_state(tmp_path, stage):
    for names, report in ranks(2).run(_load_under_another_name, str(tmp_path), stage, True):
        assert names == ["head.weight"]
        assert "optimizer" in report.restored and not report.absent and not report.ignored


@pytest.mark.parametrize("stage", [0, 2])
def test_both_weights_of_a_model_that_no_longer_ties_them_are_loaded(tmp_path, stage):
    for names, report in ranks(2).run(_load_under_another_name, str(tmp_path), stage, False):
        assert names == ["embed.weight", "head.weight"]
        assert "optimizer" in report.restored and not report.absent and not report.ignored


# Parts that do not fit.


def _train_other_parameters(folder):
    with _engine(model=_part_frozen("weight")) as engine:
        _update(engine)
        engine.save(folder)
    with _engine(model=_part_frozen("bias")) as engine:
        _update(engine)
        before = engine.parameters_store.get_full("weight", "exp_avg")
        report = engine.load(folder)
        assert torch.equal(engine.parameters_store.get_full("weight", "exp_avg"), before)
        _update(engine)
        return report


def _part_frozen(name):
    model = nn.Linear(3, 2)
    getattr(model, name).requires_grad_(False)
    return model


def test_states_of_parameters_that_only_one_side_trains_are_reported(tmp_path):
    for report in ranks(2).run(_train_other_parameters, str(tmp_path)):
        assert {"optimizer group 0", "optimizer state of weight"} == set(report.absent)
        assert report.ignored == ("optimizer state of bias",)


def _schedules(folder):
    with _engine(lr_scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.5)) as engine:
        _update(engine)
        engine.save(folder)
    with _engine(lr_scheduler=lambda optimizer: ExponentialLR(optimizer, gamma=0.9)) as engine:
        before = engine.lr_scheduler.state_dict()
        report = engine.load(folder)
        assert engine.lr_scheduler.state_dict() == before
        rates = [engine.learning_rates()]
        _update(engine)
        rates.append(engine.learning_rates())
        return report, rates


def test_the_state_of_a_scheduler_of_another_class_is_not_loaded(tmp_path):
    for report, rates in ranks(2).run(_schedules, str(tmp_path)):
        assert report.absent == ("scheduler",)
        assert report.ignored == ("scheduler (of StepLR, this engine has ExponentialLR)",)
        assert rates == [(0.1,), (pytest.approx(0.09),)], "it goes on from its own rate"


def _named_schedules(folder):
    def section(name):
        return {**_config(), "scheduler": {"type": name, "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}}}

    decay = section("WarmupDecayLR")
    decay["scheduler"]["params"]["total_num_steps"] = 9
    with _engine(config=section("WarmupLR")) as engine:
        _update(engine)
        engine.save(folder)
    with _engine(config=decay) as engine:
        return engine.load(folder)


def test_schedules_of_a_configuration_are_told_apart_by_name(tmp_path):
    (report,) = ranks(1).run(_named_schedules, str(tmp_path))
    assert report.ignored == ("scheduler (of WarmupLR, this engine has WarmupDecayLR)",)


def _implementations(folder):
    with _engine(0, config=_config(0, fused=False, betas=[0.8, 0.9])) as engine:
        _update(engine)
        engine.save(folder)
    with _engine(0, config=_config(0, fused=True)) as engine:
        engine.load(folder)
        group = engine.optimizer.param_groups[0]
        steps = {state["step"].device == parameter.device for parameter, state in engine.optimizer.state.items()}
        _update(engine)
        return {key: group[key] for key in ("fused", "betas")}, steps


def test_how_the_optimizer_computes_stays_that_of_this_engine(tmp_path):
    (found,) = ranks(1).run(_implementations, str(tmp_path))
    assert found == ({"fused": True, "betas": (0.8, 0.9)}, {True})


def _per_rank_objects(folder, world_saved):
    engine = _engine()
    if world_saved is None:
        engine.track("mine", Tracked(10 + dist.get_rank()))
        _update(engine)
        engine.save(folder)
        engine.close()
        return None
    mine = Tracked(-1)
    engine.track("mine", mine)
    report = engine.load(folder)
    engine.close()
    return mine.value, report.restored, report.ignored, report.absent


def test_objects_of_each_rank_at_another_world_size_are_reported(tmp_path):
    ranks(2).run(_per_rank_objects, str(tmp_path / "two"), None)
    ((value, restored, ignored, absent),) = ranks(1).run(_per_rank_objects, str(tmp_path / "two"), 2)
    assert (value, ignored) == (10, ("mine of rank 1",)) and "mine" in restored and "rng" in absent[0]
    ranks(1).run(_per_rank_objects, str(tmp_path / "one"), None)
    first, second = ranks(2).run(_per_rank_objects, str(tmp_path / "one"), 1)
    assert first[0] == second[0] == 10
    assert "mine" in first[1] and "mine (that of rank 0)" in second[1]


# Failures.


def _damage(folder, how):
    """Damage the checkpoint ``step-1``."""
    target = Path(folder) / "step-1"
    if how == "newer format":
        text = json.loads((target / "manifest.json").read_text())
        (target / "manifest.json").write_text(json.dumps({**text, "format": 99, "polyscale": "9.0"}))
    elif how == "another model":
        text = json.loads((target / "manifest.json").read_text())
        text["parameters"]["elsewhere"] = text["parameters"].pop("weight")
        (target / "manifest.json").write_text(json.dumps(text))
    elif how == "cut short":
        data = target / "tensors" / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-200])
    elif how == "garbage":
        (target / "tensors" / ".metadata").write_bytes(b"\x80\x04garbage")
    elif how == "no file of a rank":
        (target / "rank-1.pt").unlink()
    elif how == "odd file of a rank":
        torch.save([1], target / "rank-1.pt")
    elif how == "no client state":
        (target / "client_state.pt").unlink()
    elif how == "odd schedule":
        text = json.loads((target / "manifest.json").read_text())
        text["scheduler"] = 3
        (target / "manifest.json").write_text(json.dumps(text))


def _refused_loads(folder, cases):
    rank, found = dist.get_rank(), {}
    data = torch.arange(24).float().view(8, 3)
    kinds = {"lr_scheduler": lambda optimizer: StepLR(optimizer, 1, gamma=0.5), "data": data}
    engine = _engine(**kinds)
    tracked = Tracked(1)
    engine.track("t", tracked)
    _update(engine)
    engine.save(f"{folder}/good", client_state={"epoch": 1})
    _update(engine)
    tracked.value = 2
    before = _whole(engine)
    for how in cases:
        if rank == 0:
            shutil.copytree(f"{folder}/good", f"{folder}/{how}")
            _damage(f"{folder}/{how}", how)
        dist.barrier()
        _, text = _error(lambda how=how: engine.load(f"{folder}/{how}"), CheckpointError)
        found[how] = text, _same(before, _whole(engine))
    engine.load(f"{folder}/good")
    assert not _same(before, _whole(engine))
    engine.close()
    with _engine(lr_scheduler=kinds["lr_scheduler"], data=data[:5]) as shorter:
        before = _whole(shorter)
        found["other data"] = _error(lambda: shorter.load(f"{folder}/good"))[1], _same(before, _whole(shorter))
    return found


WORDS = {
    "newer format": ("format 99", "9.0", "Upgrade"),
    "another model": ("another model", "elsewhere", "weight"),
    "cut short": ("__1_0.distcp", "cut short"),
    "garbage": (".metadata", "damaged"),
    "no file of a rank": ("rank-1.pt", "No such file"),
    "odd file of a rank": ("rank-1.pt", "does not hold"),
    "no client state": ("client_state.pt", "No such file"),
    "odd schedule": ("scheduler does not take",),
    "other data": ("8 samples", "dataset of 5"),
}


def test_a_load_that_is_refused_says_why_on_every_rank_and_changes_nothing(tmp_path):
    cases = [how for how in WORDS if how != "other data"]
    for found in ranks(2).run(_refused_loads, str(tmp_path), cases):
        for how, words in WORDS.items():
            text, unchanged = found[how]
            assert all(word in text for word in words), text
            assert unchanged, how


def _failing_object(folder, failing):
    engine = _engine()
    tracked = Tracked(1)
    engine.track("t", tracked)
    _update(engine)
    engine.save(folder)
    saved = engine.parameters_store.get_full("weight")
    _update(engine)
    tracked.fails = "load_state_dict" if dist.get_rank() == failing else ""
    text = _error(lambda: engine.load(folder), CheckpointError)[1]
    restored = torch.equal(engine.parameters_store.get_full("weight"), saved), engine.steps
    tracked.fails = ""
    report = engine.load(folder)
    engine.close()
    return text, restored, report.restored


def test_an_object_that_does_not_take_its_state_is_named_with_what_is_restored(tmp_path):
    for text, restored, report in ranks(2).run(_failing_object, str(tmp_path), 1):
        assert all(word in text for word in ("'t'", "no such state", "parameters", "optimizer", "counters")), text
        assert restored == (True, 1)
        assert "t" in report


def _refused_saves(folder, as_root):
    rank, found = dist.get_rank(), {}
    engine = _engine()
    tracked = Tracked(1)
    engine.track("t", tracked)
    _update(engine)
    file = Path(folder) / "file"
    file.touch()
    state = {"a": [1, {"b": (2, {"c": Tracked()})}]}
    found["tag"] = _error(lambda: engine.save(folder, "../x"))
    found["object tag"] = _error(lambda: engine.save(folder, Path("x")))
    found["client state"] = _error(lambda: engine.save(folder, client_state=state if rank else None))
    found["file"] = _error(lambda: engine.save(file))
    found["load of a file"] = _error(lambda: engine.load(file))
    found["load of a tag"] = _error(lambda: engine.load(folder, "../x"))
    if not as_root:
        found["read-only"] = _error(lambda: engine.save(Path(folder) / "read-only"))
    tracked.fails = "state_dict" if rank == 1 else ""
    found["object"] = _error(lambda: engine.save(folder), Exception)
    left = sorted(path.name for path in Path(folder).rglob("*"))
    tracked.fails = ""
    found["tag again"] = engine.save(folder, "again")
    engine.close()
    return found, left


def test_a_save_that_is_refused_says_why_on_every_rank_and_leaves_nothing(tmp_path):
    as_root = os.name != "posix" or os.geteuid() == 0
    locked = tmp_path / "read-only"
    locked.mkdir()
    locked.chmod(0o500)
    first, second = ranks(2).run(_refused_saves, str(tmp_path), as_root)
    for found, left in (first, second):
        for case, words in {
            "tag": ("'../x'", "begin with '.'"),
            "object tag": ("not a string",),
            "client state": ("client_state['a'][1]['b'][1]['c']", "Tracked"),
            "file": ("file", "written"),
            "load of a file": ("it is a file",),
            "load of a tag": ("'../x'", "begin with '.'"),
            **({} if as_root else {"read-only": ("Permission denied",)}),
            "object": ("no state today",),
        }.items():
            assert all(word in found[case][1] for word in words), found[case]
        assert found["tag again"] == "again"
        assert left == ["file", "read-only"]
    assert first[0]["object"][0] == "CheckpointError" and "Rank 1" in first[0]["object"][1]
    assert second[0]["object"][0] == "ValueError", "the rank that failed raises the exception itself"


def _misspelt(kind, folder):
    engine = _engine(config={**_config(), "backends": {kind: "thread"}})
    if kind == "io":
        found = [_error(lambda: engine.export(folder), PluginError)]
    else:
        found = [_error(call, PluginError) for call in (lambda: engine.save(folder), lambda: engine.load(folder))]
    _update(engine)
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["io", "checkpoint"])
def test_a_backend_that_is_not_installed_is_an_error_on_every_rank(tmp_path, kind):
    if kind == "checkpoint":
        ranks(2).run(_per_rank_objects, str(tmp_path), None)
    for found in ranks(2).run(_misspelt, kind, str(tmp_path), timeout=30):
        assert all("'thread'" in text and "Installed" in text for _, text in found)


def _refused_exports(folder):
    engine = _engine(model=_with_buffer(torch.complex128))
    found = [_error(lambda: engine.export(folder)), _error(lambda: engine.export(folder, max_shard_bytes=0))]
    engine.close()
    with _engine(model=_with_buffer(torch.int32)) as engine:
        file = Path(folder) / "file"
        file.touch()
        found.append(_error(lambda: engine.export(file)))
        engine.export(f"{folder}/model.safetensors")
    return found


def _with_buffer(dtype):
    model = nn.Linear(3, 2)
    model.register_buffer("extra", torch.zeros(2, dtype=dtype))
    return model


def test_an_export_that_is_refused_says_why_on_every_rank(tmp_path):
    for dtype, size, file in ranks(2).run(_refused_exports, str(tmp_path)):
        assert "'extra'" in dtype[1] and "complex128" in dtype[1]
        assert "max_shard_bytes=0" in size[1] or "complex128" in size[1]
        assert "file" in file[1] and "written" in file[1]
    assert (tmp_path / "model.safetensors").exists()


def test_a_scaler_of_another_kind_is_reported(tmp_path):
    def engine(scale):
        fp16 = {"enabled": True, "loss_scale": scale}
        return _engine(0, config={**_config(0), "fp16": fp16})

    with engine(0) as saved:
        saved.save(tmp_path)
    with engine(128) as loaded:
        report = loaded.load(tmp_path)
        assert loaded.loss_scale == 128
    assert report.absent == ("scaler",) and "DynamicLossScaler" in report.ignored[0]


def test_random_numbers_of_another_kind_of_device_are_reported(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    with _engine(0) as engine:
        engine.save(tmp_path)
        path = tmp_path / "step-0" / "rank-0.pt"
        state = torch.load(path, weights_only=True)
        state["rng"] |= {"accelerator": "elsewhere", "device": torch.zeros(16, dtype=torch.uint8)}
        torch.save(state, path)
        report = engine.load(tmp_path)
        here = engine._setup.accelerator.name
    assert report.absent == (f"rng of the device (saved on elsewhere, here is {here})",)
    assert "rng" in report.restored
