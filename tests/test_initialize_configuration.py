"""What the configured optimizer and schedule are refused for by ``initialize``, before anything is started."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.errors import ConfigError

CPU = {"train_micro_batch_size_per_gpu": 1, "backends": {"accelerator": "cpu"}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": "5e-1", "warmup_num_steps": "1", "warmup_type": "linear"}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scheduler": SCHEDULER}, "'WarmupLR' without an optimizer: there is no learning rate to schedule"),
        (
            {"optimizer": {"type": "AdamW", "groups": [{"match": ["*.bias"]}, {"match": ["*"], "params": {"wd": 1}}]}},
            r"optimizer\.groups\[1\]\.params\.wd: adamw has no such hyper-parameter",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lrr": 1, "lr": "fast"}}},
            r"2 problems in .*optimizer\.params\.lrr.*optimizer\.params\.lr='fast'",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_before_a_process_group_is_there(config, message):
    before = torch.distributed.is_initialized()  # an earlier test of this process may have made the default group
    with pytest.raises(ConfigError, match=message):
        polyscale.initialize(nn.Linear(2, 2), config={**CPU, **config})
    assert torch.distributed.is_initialized() == before


def test_a_configured_schedule_drives_an_optimizer_that_is_passed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    with polyscale.initialize(model, config={**CPU, "scheduler": SCHEDULER}, optimizer=optimizer) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert engine.learning_rates() == (0.5,)


def test_numbers_written_as_text_reach_the_optimizer_and_its_groups():
    section = {"type": "RMSprop", "params": {"lr": "1e-2"}, "groups": [{"match": ["bias"], "params": {"lr": "1e-3"}}]}
    with polyscale.initialize(nn.Linear(2, 2), config={**CPU, "optimizer": section}) as engine:
        assert sorted(engine.learning_rates()) == [1e-3, 1e-2]
