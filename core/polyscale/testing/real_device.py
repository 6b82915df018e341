"""What an accelerator must do on its device, checked with tensors: for the tests that run where the hardware is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyscale.claims import broken_claims
from polyscale.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from polyscale.interfaces.accelerator import Accelerator

_SIZE = 8 << 20
_STEPS = 6


def check_real_device(accelerator: Accelerator) -> None:
    """Fail where ``accelerator`` does not do on its first device what its Protocol says.

    Args:
        accelerator: available; it is activated, and device 0 made the current one.
    """
    assert accelerator.is_available(), accelerator.why_unavailable()
    accelerator.activate()
    accelerator.set_device(0)
    assert accelerator.device().type == accelerator.device_type
    count = accelerator.device_count()
    try:
        accelerator.set_device(count)
    except UnsupportedError as error:
        assert f"{count} device" in error.why, error.why
    else:
        raise AssertionError(f"device {count} of {count} was accepted")
    assert [str(error) for error in broken_claims(accelerator)] == []
    _check_memory(accelerator)
    _check_random_numbers(accelerator)
    _check_order(accelerator)
    rows = {row.name: row for row in accelerator.diagnose()}
    assert rows["devices"].ok
    assert str(count) in rows["devices"].value


def check_training(accelerator: str, *, stages: Sequence[int] = (0, 3)) -> None:
    """Fail where training on the accelerator of this name does not follow plain torch in float64 on the CPU.

    Args:
        accelerator: an available accelerator.
        stages: ZeRO stages, each trained from the same weights.
    """
    import torch

    import polyscale

    generator = torch.Generator().manual_seed(1)
    batches = [(x, x.sum(1, keepdim=True).sin()) for x in torch.randn(_STEPS, 8, 4, generator=generator)]
    expected = _losses_in_float64(batches)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "backends": {"accelerator": accelerator},
    }
    for stage in stages:
        told = f"stage {stage} on {accelerator}"
        with polyscale.initialize(_model(), config={**config, "zero_optimization": {"stage": stage}}) as engine:
            for (x, y), wanted in zip(batches, expected, strict=True):
                loss = (engine(x) - y.to(engine.device)).square().mean()
                engine.backward(loss)
                engine.step()
                assert abs(loss.item() - wanted) <= 1e-3 * wanted, f"{told}: loss {loss.item()} instead of {wanted}"


def _model() -> torch.nn.Module:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))


def _losses_in_float64(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    import torch

    model = _model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches:
        loss = (model(x.double()) - y.double()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _check_memory(accelerator: Accelerator) -> None:
    import torch

    if not accelerator.capabilities.memory_statistics:
        return
    accelerator.empty_cache()
    before = accelerator.memory()
    accelerator.reset_peak_memory()
    held = torch.empty(_SIZE, dtype=torch.uint8, device=accelerator.device())
    during = accelerator.memory()
    assert _SIZE <= during.allocated - before.allocated <= 2 * _SIZE
    del held
    after = accelerator.memory()
    assert after.peak >= during.allocated > after.allocated
    assert after.total >= during.reserved  # equal where the allocator takes all of the device at once


def _check_random_numbers(accelerator: Accelerator) -> None:
    import torch

    device = accelerator.device()
    accelerator.manual_seed(3)
    state = accelerator.rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    first = torch.rand(16, device=device)
    second = torch.rand(16, device=device)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(16, device=device), first)
    assert not torch.equal(first, second)


def _check_order(accelerator: Accelerator) -> None:
    import torch

    size = 1 << 20
    stream, other, event = accelerator.new_stream(), accelerator.new_stream(), accelerator.new_event()
    host = torch.full((size,), 2.0)
    if accelerator.capabilities.pinned_memory:
        host = host.pin_memory()
    made = torch.zeros(size, device=accelerator.device())
    accelerator.synchronize()
    with stream:
        made.copy_(host, non_blocking=True)
    other.wait_stream(stream)  # the host has not waited, so this alone makes the sum right
    with other:
        total = made.sum()
    other.synchronize()
    assert total.item() == 2 * size
    with stream:
        host.copy_(made.mul_(2), non_blocking=True)
        event.record()
    event.synchronize()
    assert host.sum().item() == 4 * size
    accelerator.synchronize()
