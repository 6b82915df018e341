"""One training step of each kind, in the process of a rank.

Notable: all see the same model, data, optimizer (torch's fused AdamW, or what polyscale makes of ``AdamW``) and
clipping; all else is each one's default. Every step returns its loss as a tensor: the host asks for the number later,
outside the time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from zero_runs import models
from zero_runs.configurations import CLIP, LEARNING_RATE, WEIGHT_DECAY, Configuration

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 60


class Side(Protocol):
    """A model that is trained.

    Attributes:
        communication: polyscale's collectives, where they are what moves the bytes.
        device: where batches go.
    """

    communication: Any
    device: Any

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One update on one batch; returns the loss."""

    def close(self) -> None:
        """Free what was made."""


def make(configuration: Configuration, shape: models.Shape, device: str) -> Side:
    """Build the side of a configuration on ``device`` ("cpu" or "sim"). Collective."""
    kinds = {"compute": Compute, "torch": ByTorch, "deepspeed": ByDeepSpeed, "polyscale": ByEngine}
    side: Side = kinds[configuration.kind](configuration, shape, device)
    return side


class Compute:
    """Forward and backward alone: what no way of training in parallel can undercut."""

    communication = None

    def __init__(self, configuration: Configuration, shape: models.Shape, device: str) -> None:
        self.device, self._model = device, models.build(shape).to(device)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward and backward; the gradients are dropped."""
        loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        self._model.zero_grad(set_to_none=True)
        return loss.detach()

    def close(self) -> None:
        """Nothing to free."""


class ByEngine:
    """polyscale."""

    def __init__(self, configuration: Configuration, shape: models.Shape, device: str) -> None:
        import polyscale

        config = configuration.engine_config(shape.micro, device)
        self._engine = polyscale.initialize(models.build(shape), config=config)
        self.device = self._engine.device
        setup = self._engine._setup
        self.communication = None if setup.communication.name == "gloo" else setup.communication

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One update."""
        loss: torch.Tensor = self._engine(input_ids=batch, labels=batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class ByTorch:
    """``DistributedDataParallel``, or ``fully_shard`` by block, with torch's fused AdamW."""

    communication = None

    def __init__(self, configuration: Configuration, shape: models.Shape, device: str) -> None:
        import torch

        self.device = _join(device)
        self._model = models.build(shape).to(self.device)
        if configuration.stage == 0:
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        else:
            _shard(self._model, device, reshard=configuration.stage == 3)
        self._optimizer = _adamw(self._model)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One update."""
        import torch

        loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """End the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class ByDeepSpeed:
    """DeepSpeed over gloo, with torch's fused AdamW: its own CPU optimizer is a build of its own."""

    communication = None

    def __init__(self, configuration: Configuration, shape: models.Shape, device: str) -> None:
        import deepspeed

        self.device = device
        # Its shared-memory all-reduce is for inference alone; compiling it waits for ever on a stale lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        model = models.build(shape)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model), config=configuration.deepspeed_config(shape.micro)
        )

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One update."""
        loss: torch.Tensor = self._engine(input_ids=batch, labels=batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """End the process group."""
        import torch.distributed as dist

        self._engine.destroy()
        dist.destroy_process_group()


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _join(device: str) -> Any:
    """Make the process group, and return this rank's device."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "sim":
        from polyscale_sim import device as simulated

        simulated.register()
        backend = "cpu:gloo,sim:simccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    if device == "cpu":
        return torch.device(device)
    torch.accelerator.set_device_index(dist.get_rank())
    return torch.device(device, dist.get_rank())


def _shard(model: Any, device: str, *, reshard: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
