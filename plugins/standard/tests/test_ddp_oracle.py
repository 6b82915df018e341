"""ddp against torch's DistributedDataParallel: unused parameters, accumulation, and when buckets are sent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import count_collectives, ranks


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, branch):
        x = torch.tanh(self.stem(x))
        return (self.left(x) if branch == "left" else self.right(x)).square().mean()


def _model():
    torch.manual_seed(0)
    return Branches().double()


def _inputs(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    # Rank 0 goes left all the time, rank 1 right in the second update only.
    return torch.randn(3, 4, generator=generator, dtype=torch.float64), (
        "right" if dist.get_rank() == 1 and step in (2, 3) else "left"
    )


def _options():
    return {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def _by_torch():
    model = _model()
    replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), **_options())
    for step in range(6):
        last = step % 2 == 1
        if last:
            (replica(*_inputs(step)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with replica.no_sync():
                (replica(*_inputs(step)) / 2).backward()
    return {name: value.detach() for name, value in model.named_parameters()}


def _by_polyscale():
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": _options()},
        "backends": {"options": {"ddp": {"bucket_mib": 0.0001}}},
    }
    with polyscale.initialize(_model(), config=config) as engine:
        idle = engine.module.idle.weight
        for step in range(6):
            engine.backward(engine(*_inputs(step)))
            engine.step()
        assert idle.grad is None
        assert not engine.optimizer.state.get(idle), "no momentum for a parameter that was never used"
        return dict(engine.parameters_store.iter_full())


def _both():
    return _by_torch(), _by_polyscale()


def test_unused_parameters_as_in_torchs_ddp():
    before = dict(_model().named_parameters())
    for expected, found in ranks(2).run(_both):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
        assert torch.equal(found["idle.weight"], before["idle.weight"]), "used nowhere: no decay, no momentum"
        assert not torch.equal(found["right.weight"], before["right.weight"]), "used by one rank in one update"


def _order_of_launches():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "backends": {"options": {"ddp": {"bucket_mib": 0.00005}}},
    }
    seen = []
    with polyscale.initialize(model, config=config) as engine, count_collectives() as counted:
        inputs = torch.ones(1, 4, requires_grad=True)
        inputs.register_hook(lambda gradient: seen.append(counted["all_reduce"]))
        engine.backward(engine(inputs).sum())
        after_backward = counted["all_reduce"]
        engine.step()
    return seen[0], after_backward, [entry.numel for entry in counted.launched]


def test_buckets_are_sent_while_backward_still_runs():
    for during, after, sizes in ranks(2).run(_order_of_launches):
        assert during >= 3, "the buckets of the later layers were launched before backward reached the first"
        assert after == 4
        assert sizes[:4] == [20, 20, 20, 20]


def test_options_of_ddp_are_checked():
    for options in ({"bucket_mb": 1}, {"bucket_mib": 0}, {"bucket_mib": "big"}):
        config = {"train_batch_size": 1, "backends": {"options": {"ddp": options}}}
        with pytest.raises(polyscale.ConfigError, match="bucket_mib"):
            polyscale.initialize(nn.Linear(1, 1), config=config)
