"""The rank side of the parity suite: trains cases one after another in one process group.

Notable: after each case the ranks tell each other through the store whether it went well. A failure ends the batch
there, because a rank that left a case early would answer another rank's collectives of that case with its own of the
next; the cases after it are run again in new processes.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from polyscale.testing.parity.cases import STEPS, Case
from polyscale.testing.parity.model import ParityModel, batch_of, make_model

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

AGREE_S = 40.0
EngineFactory = Callable[[Case, ParityModel], Any]


@dataclass
class RankRun:
    """What one rank saw.

    Attributes:
        losses: by (update, micro-step).
        stepped: what ``step()`` returned, in order.
        norms: ``grad_norm`` after each update; None where the engine gives none.
        weights: last weights by name on the CPU, tied names included.
        error: traceback of what went wrong, or "".
    """

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    stepped: list[bool] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


def polyscale_engine(case: Case, model: ParityModel) -> Any:
    """The engine under test."""
    import polyscale

    return polyscale.initialize(model, config=case.config(), seed=0)


def run_batch(cases: Sequence[Case], factory: EngineFactory) -> list[RankRun]:
    """Train ``cases`` on this rank up to the first that fails on any rank, and return a run for each of those."""
    from polyscale._torch import default_store

    store, rank, world = default_store(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    runs = []
    for index, case in enumerate(cases):
        run = RankRun()
        try:
            _train(case, factory, run)
        except Exception:
            run.error = traceback.format_exc()
        runs.append(run)
        store.set(f"parity/{index}/{rank}", "failed" if run.error else "well")
        if run.error:
            _release_others()
            break
        if not _all_went_well(store, [f"parity/{index}/{other}" for other in range(world)]):
            break
    return runs


def _release_others() -> None:
    """Leave the group, so that ranks that wait for this one in a collective get an error now, not at its timeout."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def _train(case: Case, factory: EngineFactory, run: RankRun) -> None:
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    engine = factory(case, make_model(case.task))
    try:
        for step in range(STEPS):
            for micro in range(case.task.accumulation):
                x, y = (each.to(engine.device) for each in batch_of(step, micro, rank))
                loss = engine(x, y, branch=case.task.uses_branch(step, rank))
                engine.backward(loss)
                run.stepped.append(engine.step())
                run.losses[step, micro] = loss.item()
            run.norms.append(None if engine.grad_norm is None else float(engine.grad_norm))
        run.weights = {name: value.detach().cpu().clone() for name, value in engine.parameters_store.iter_full()}
    finally:
        engine.close()


def _all_went_well(store: Store, keys: list[str]) -> bool:
    store.wait(keys, timedelta(seconds=AGREE_S))
    return all(store.get(key) == b"well" for key in keys)
