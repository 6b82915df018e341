"""Training on a CUDA device at every stage, against the same steps by hand on the CPU, in float64."""

import copy

import pytest
import torch
from torch import nn

import polyscale
from polyscale_cuda.accelerator import CudaAccelerator

pytestmark = pytest.mark.gpu
STEPS, BATCH, WIDTH = 6, 8, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))


def make_batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, 4, generator=generator)
    return [(x, x.sum(1, keepdim=True).sin()) for x in inputs]


def config(stage, *, bf16=False):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "backends": {"accelerator": "cuda"},
    }


@pytest.fixture(scope="module", autouse=True)
def device():
    made = CudaAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())


@pytest.fixture(scope="module")
def by_hand():
    """Losses and weights of plain torch in float64."""
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for x, y in make_batches():
        loss = (model(x.double()) - y.double()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copy.deepcopy(model.state_dict())


def run_on_device(engine, batches):
    losses = []
    for x, y in batches:
        loss = (engine(x).float() - y.to(engine.device)).square().mean()
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    return {name: tensor.double().cpu() for name, tensor in engine.parameters_store.iter_full()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_follows_float64_on_the_cpu(by_hand, stage):
    losses, expected = by_hand
    with polyscale.initialize(make_model(), config=config(stage)) as engine:
        assert engine.device.type == "cuda"
        assert run_on_device(engine, make_batches()) == pytest.approx(losses, rel=1e-4)
        for name, tensor in weights(engine).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_near_float64_on_the_cpu_and_keeps_fp32_masters(by_hand, stage):
    losses, _ = by_hand
    with polyscale.initialize(make_model(), config=config(stage, bf16=True)) as engine:
        assert engine.dtypes()["master"] == "fp32"
        assert run_on_device(engine, make_batches()) == pytest.approx(losses, rel=0.1, abs=0.02)
        assert {tensor.dtype for _, tensor in engine.parameters_store.iter_full()} == {torch.float32}


def test_a_checkpoint_of_stage_3_goes_on_at_stage_1_as_if_never_stopped(tmp_path):
    batches = make_batches()
    with polyscale.initialize(make_model(), config=config(3)) as engine:
        run_on_device(engine, batches[:3])
        engine.save(tmp_path)
        straight = run_on_device(engine, batches[3:])
    with polyscale.initialize(make_model(), config=config(1)) as engine:
        engine.load(tmp_path)
        assert run_on_device(engine, batches[3:]) == pytest.approx(straight, rel=1e-5)
