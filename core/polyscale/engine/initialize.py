"""``polyscale.initialize``: chooses the plugins, checks that ranks agree, spreads the model, makes the engine.

The order matters: what cannot work is refused before anything is allocated; ranks agree on configuration and model
before the first collective, through the store, so a difference is an error with both values and never a hang.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from polyscale import env
from polyscale.claims import check_dtype
from polyscale.discovery import load
from polyscale.engine import out_of_memory
from polyscale.engine.agreeing import agree, agree_on_optimizer
from polyscale.engine.batches import LossFunction
from polyscale.engine.engine import Engine
from polyscale.engine.inputs import build_loader, build_schedule, check_schedule, seed_ranks
from polyscale.engine.observing import Observers
from polyscale.engine.optimizer import OptimizerLike, build_optimizer, check_instance, load_factory
from polyscale.engine.pinning import with_automatic_pins
from polyscale.engine.runtime import Runtime, choose_accelerator, plugin_context, start_runtime
from polyscale.engine.setup import Setup
from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.interfaces.observer import EngineStarted
from polyscale.interfaces.parallelism import DataParallelApplied, ParallelContext, Part
from polyscale.interfaces.precision import Precision, PrecisionPolicy
from polyscale.optimizers import norm_parameters
from polyscale.parameters.inspect import find_parameters
from polyscale.parameters.materialize import materializer
from polyscale.topology import Topology

if TYPE_CHECKING:
    from polyscale.config import Config
    from polyscale.interfaces.accelerator import Accelerator

log = logging.getLogger("polyscale")

OWNER = "_polyscale_engine"
"""Attribute of a model: a weak reference to the engine it was given to."""


def initialize(
    model: nn.Module,
    *,
    config: Config | Mapping[str, Any] | str | PathLike[str],
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Any = None,
    data: Any = None,
    loss_fn: LossFunction | None = None,
    topology: Topology | None = None,
    seed: int | None = None,
) -> Engine:
    """Spread ``model`` over the ranks of this job and return the engine that trains it. Collective.

    Args:
        model: any module. It may hold its weights, be made under ``polyscale.partitioned_init()``, or be on the meta
            device. It is changed in place.
        config: a dict, a path, JSON text, or a ``Config``, in DeepSpeed's vocabulary.
        optimizer: None (from the configuration), a callable of the parameters, or an instance without state.
        lr_scheduler: None (from the configuration), a callable of the optimizer, or an instance over ``optimizer``.
        data: a dataset (made into a resumable loader), or any iterable of this rank's micro-batches.
        loss_fn: for ``train_batch`` and ``eval_batch``; see ``polyscale.engine.batches``.
        topology: None (from the configuration), or one whose model-parallel axes the model already uses.
        seed: seeds this engine's random numbers, different on ranks that see different samples, and meta starts.

    Raises:
        PolyscaleError: with what was given, why it cannot work, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise PolyscaleError(f"model = {type(model).__name__}", why="it is not a torch.nn.Module", fix="Pass a module")
    _refuse_used(model)
    from polyscale.config import load_config  # pydantic, like FSDP and DCP, is loaded when it is used

    settings = load_config(config, seed=seed)
    names = {entry.parameter: entry.fqn for entry in find_parameters([Part(model)])}
    if optimizer is not None:
        check_instance(optimizer, names)
        if isinstance(optimizer, torch.optim.Optimizer) and lr_scheduler is not None and not callable(lr_scheduler):
            check_schedule(lr_scheduler, optimizer)
        if settings.optimizer is not None:
            log.log(
                logging.WARNING if env.launch().rank == 0 else logging.INFO,
                "the optimizer given to polyscale.initialize is used, and that of the configuration (%s) is not",
                settings.optimizer.type,
            )
    accelerator = choose_accelerator(settings)
    if optimizer is None:
        _check_configured_optimizer(settings, accelerator)
    runtime = start_runtime(settings, accelerator)
    runtime.watchdog.start()
    try:
        with runtime.watchdog.phase("initialize"):
            agree(runtime.control, settings, model)
            setup = _build(
                model, runtime, names, optimizer=optimizer, lr_scheduler=lr_scheduler, data=data, topology=topology
            )
    except BaseException as error:
        memory = isinstance(error, Exception) and out_of_memory.found_in(error) is not None
        if isinstance(error, Exception) and (memory or not isinstance(error, PolyscaleError)):
            runtime.watchdog.failed(error)
        runtime.watchdog.stop()
        if memory:
            raise out_of_memory.of_start(runtime, model, error) from error
        raise
    try:
        engine = Engine(setup, loss_fn=loss_fn)
    except BaseException:
        setup.close()
        raise
    model.__dict__[OWNER] = weakref.ref(engine)
    _close_at_exit(engine)
    _announce(setup)
    return engine


def _check_configured_optimizer(config: Config, accelerator: Accelerator) -> None:
    from polyscale.config.errors import raise_all
    from polyscale.config.hyper_parameters import wrong_hyper_parameters
    from polyscale.config.rules import scheduler_alone

    if config.optimizer is not None:
        wrong = wrong_hyper_parameters(config.optimizer, load_factory(config, accelerator))
        raise_all(wrong, "the optimizer of the configuration")
    elif (alone := scheduler_alone(config)) is not None:
        raise alone


def _refuse_used(model: nn.Module) -> None:
    wrapper = next((type(m) for m in model.modules() if isinstance(m, (DistributedDataParallel, DataParallel))), None)
    if wrapper is not None:
        raise PolyscaleError(
            f"A model wrapped in torch's {wrapper.__name__}",
            why="it reduces gradients itself, and the engine would reduce them again",
            fix="Pass the module inside (model.module)",
        )
    owner = model.__dict__.get(OWNER, lambda: None)()
    if owner is not None and not owner._closed:
        raise PolyscaleError(
            "A model that another engine trains",
            why="two engines would add their hooks and gradients to the same parameters",
            fix="Build another model; below stage 3, closing the other engine frees this one too",
        )


def _build(
    model: nn.Module,
    runtime: Runtime,
    names: dict[nn.Parameter, str],
    *,
    optimizer: OptimizerLike | None,
    lr_scheduler: Any,
    data: Any,
    topology: Topology | None,
) -> Setup:
    """Spread the model and make what trains it; on an error everything made so far is freed."""
    config, accelerator = runtime.config, runtime.accelerator
    with contextlib.ExitStack() as undo:
        own_topology = topology is None
        if topology is None:
            topology = _topology(runtime)
            undo.callback(topology.close)
        _refuse_axes(topology)
        batch = config.batch(topology.dp_size)
        precision: Precision = load(
            "precision", config.precision, plugin_context(config.precision, config, accelerator)
        )
        policy = with_automatic_pins(precision.policy(), config, model)
        for dtype in _computed_in(policy, names):
            check_dtype(accelerator, short(dtype))
        norms = norm_parameters(model.named_modules())
        applied = _spread(model, runtime, topology, policy)
        undo.callback(applied.close)
        built = build_optimizer(optimizer, config, applied, names, accelerator, norms)
        applied.replaced.clear()  # its keys would keep whole parameters on the device as long as the engine lives
        agree_on_optimizer(runtime.control, built)
        scaler = precision.scaler()
        setup = Setup(
            model=model,
            runtime=runtime,
            batch=batch,
            topology=topology,
            applied=applied,
            optimizer=built,
            lr_scheduler=build_schedule(lr_scheduler, config, built),
            scaler=scaler,
            check_overflow=scaler is not None or (config.precision == "bf16" and config.bf16.check_grad_overflow),
            dtypes=_dtypes(policy, applied),
            observers=Observers.load(config, accelerator, rank=topology.rank),
            data=build_loader(data, config, topology, batch.micro, runtime.control),
            owns_topology=own_topology,
        )
        if config.seed is not None:
            seed_ranks(config.seed, topology, accelerator)
        undo.pop_all()
        return setup


def _refuse_axes(topology: Topology) -> None:
    """Refuse parallelism that nothing implements: gradients would not be reduced over its ranks."""
    wide = [name for name in ("pp", "sp", "ep", "etp") if topology.size(name) > 1]
    if wide:
        raise UnsupportedError(
            f"A topology with {', '.join(f'{name} = {topology.size(name)}' for name in wide)}",
            why="no installed plugin implements these axes",
            fix="Use dp_replicate, dp_shard, and tp with a model that parallelize_module has prepared",
        )


def _topology(runtime: Runtime) -> Topology:
    sizes = runtime.config.topology
    return Topology.build(
        dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, device_type=runtime.accelerator.device_type
    )


def _spread(model: nn.Module, runtime: Runtime, topology: Topology, policy: PrecisionPolicy) -> DataParallelApplied:
    context = ParallelContext(
        config=runtime.config,
        topology=topology,
        accelerator=runtime.accelerator,
        communication=runtime.communication,
        precision=policy,
        device=runtime.device,
        materializer=materializer(model, seed=runtime.config.seed or 0),
        note=runtime.watchdog.note,
    )
    applied = runtime.parallelism.apply([Part(model)], context)
    assert isinstance(applied, DataParallelApplied)
    return applied


def _computed_in(policy: PrecisionPolicy, names: dict[nn.Parameter, str]) -> list[torch.dtype]:
    """Dtypes of the matrix products to come."""
    own = {parameter.dtype for parameter in names if parameter.is_floating_point()}
    return sorted(own if policy.parameter is None else {policy.parameter}, key=str)


def _dtypes(policy: PrecisionPolicy, applied: DataParallelApplied) -> dict[str, str]:
    trained = next((info for info in applied.store.infos.values() if info.requires_grad), None)
    master = trained.dtype if trained is not None else torch.float32
    compute = policy.parameter or master
    wide = master == torch.float64
    return {
        "parameter": short(compute),
        "gradient": short(compute),
        "accumulation": short(master if wide else policy.accumulation or master),
        "reduction": short(master if wide else policy.reduction or master),
        "master": short(master),
    }


def short(dtype: torch.dtype) -> str:
    """Short name of a dtype ("fp32")."""
    known = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return known.get(dtype, str(dtype).removeprefix("torch."))


def _announce(setup: Setup) -> None:
    stage = setup.config.zero_optimization.stage
    count = numel_of(setup)
    setup.observers.tell(
        EngineStarted(
            world_size=setup.topology.world_size,
            rank=setup.topology.rank,
            data_parallel=setup.data_parallel,
            stage=stage,
            parameters=count,
            dtypes=dict(setup.dtypes),
        )
    )
    if setup.topology.rank == 0:
        dtypes = ", ".join(f"{role} {dtype}" for role, dtype in setup.dtypes.items())
        log.info("%s, stage %d (%s), %d parameters; %s", setup.topology, stage, setup.data_parallel, count, dtypes)
        for note in setup.config.notes(setup.runtime.parallelism.honours):
            log.info("%s has no effect here: %s", note.key, note.reason)


def numel_of(setup: Setup) -> int:
    """Number of elements of the whole model, tied parameters once."""
    return sum(torch.Size(info.shape).numel() for info in setup.applied.store.infos.values())


def _close_at_exit(engine: Engine) -> None:
    reference = weakref.ref(engine)

    def end() -> None:
        alive = reference()
        if alive is not None and not alive._closed:
            # After an exception that nothing has caught there is nothing that could be finished.
            if alive._accumulation.open and getattr(sys, "last_value", None) is None:
                log.warning("%s", alive._accumulation.open_error("The process ends"))
            alive._release()

    atexit.register(end)
    weakref.finalize(engine, atexit.unregister, end)
