"""``polyscale.initialize``: chooses the plugins, checks that ranks agree, spreads the model, makes the engine.

The order matters: what cannot work is refused before anything is allocated; ranks agree on configuration and model
before the first collective, through the store, so a difference is an error with both values and never a hang.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from polyscale import env
from polyscale.config import Config, load_config
from polyscale.config.compare import differences
from polyscale.control.agreement import Control
from polyscale.control.process_group import ensure_process_group
from polyscale.control.watchdog import Watchdog
from polyscale.discovery import installed, load, select, select_accelerator
from polyscale.engine.batches import LossFunction
from polyscale.engine.engine import Engine
from polyscale.engine.observing import Observers
from polyscale.engine.optimizer import OptimizerLike, build_optimizer, check_instance, load_factory
from polyscale.engine.pinning import with_automatic_pins
from polyscale.engine.setup import Setup
from polyscale.errors import ConfigError, PolyscaleError, RankError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.observer import EngineStarted
from polyscale.interfaces.parallelism import DataParallelApplied, ParallelContext, Parallelism, Part
from polyscale.interfaces.precision import PrecisionPolicy
from polyscale.kinds import KINDS
from polyscale.optimizers import norm_parameters
from polyscale.parameters.fingerprint import Fingerprint, fingerprint, first_difference
from polyscale.parameters.inspect import find_parameters
from polyscale.parameters.materialize import materializer
from polyscale.topology import Topology

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
    settings = load_config(config, seed=seed)
    names = {entry.parameter: entry.fqn for entry in find_parameters([Part(model)])}
    if optimizer is not None:
        check_instance(optimizer, names)
    accelerator = select_accelerator(settings.backends.accelerator, context=PluginContext("", config=settings))
    if optimizer is None and settings.optimizer is not None:
        load_factory(settings, accelerator).check(dict(settings.optimizer.params))
    parallelism = _data_parallelism(settings, accelerator)
    honoured = frozenset(parallelism.honours)
    settings.require(honoured, plugins=_plugin_names())
    device = _activate(accelerator)
    communication = select(
        "communication",
        settings.backends.communication,
        default=list(accelerator.communications),
        context=_context(settings.backends.communication, settings, accelerator),
    )
    control = ensure_process_group(communication, accelerator)
    watchdog = Watchdog(control)
    watchdog.start()
    try:
        with watchdog.phase("initialize"):
            _agree(control, settings, model)
            setup = _build(
                model,
                settings,
                accelerator,
                communication,
                control,
                watchdog,
                parallelism,
                device,
                names,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                data=data,
                topology=topology,
            )
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, PolyscaleError):
            watchdog.failed(error)
        watchdog.stop()
        raise
    engine = Engine(setup, loss_fn=loss_fn)
    model.__dict__[OWNER] = weakref.ref(engine)
    _close_at_exit(engine)
    _announce(setup)
    return engine


def _refuse_used(model: nn.Module) -> None:
    owner = model.__dict__.get(OWNER, lambda: None)()
    if owner is not None and not owner._closed:
        raise PolyscaleError(
            "A model that another engine trains",
            why="two engines would add their hooks and gradients to the same parameters",
            fix="Close the other engine first, or build another model",
        )


def _build(
    model: nn.Module,
    config: Config,
    accelerator: Accelerator,
    communication: Any,
    control: Control,
    watchdog: Watchdog,
    parallelism: Parallelism,
    device: torch.device,
    names: dict[nn.Parameter, str],
    *,
    optimizer: OptimizerLike | None,
    lr_scheduler: Any,
    data: Any,
    topology: Topology | None,
) -> Setup:
    own_topology = topology is None
    if topology is None:
        topology = Topology.build(
            dp_replicate=config.topology.dp_replicate,
            dp_shard=config.topology.dp_shard,
            device_type=accelerator.device_type,
        )
    batch = config.batch(topology.dp_size)
    precision = load("precision", config.precision, _context(config.precision, config, accelerator))
    policy: PrecisionPolicy = with_automatic_pins(precision.policy(), config, model)
    norms = norm_parameters(model.named_modules())
    seed = config.seed
    parts = [Part(model)]
    context = ParallelContext(
        config=config,
        topology=topology,
        accelerator=accelerator,
        communication=communication,
        precision=policy,
        device=device,
        materializer=materializer(model, seed=0 if seed is None else seed),
    )
    applied = parallelism.apply(parts, context)
    assert isinstance(applied, DataParallelApplied)
    try:
        built = build_optimizer(optimizer, config, applied, names, accelerator, norms)
        schedule = _schedule(lr_scheduler, config, built)
        loader = _loader(data, config, topology, batch.micro, control)
    except BaseException:
        applied.close()
        raise
    if seed is not None:
        seed_ranks(seed, topology, accelerator)
    scaler = precision.scaler()
    return Setup(
        model=model,
        config=config,
        batch=batch,
        accelerator=accelerator,
        communication=communication,
        control=control,
        watchdog=watchdog,
        topology=topology,
        device=device,
        applied=applied,
        data_parallel=parallelism.name,
        optimizer=built,
        lr_scheduler=schedule,
        scaler=scaler,
        check_overflow=scaler is not None or (config.precision == "bf16" and config.bf16.check_grad_overflow),
        dtypes=_dtypes(policy, applied),
        observers=Observers.load(config, accelerator, rank=topology.rank),
        data=loader,
        honoured=frozenset(parallelism.honours),
        owns_topology=own_topology,
    )


def _context(name: str, config: Config, accelerator: Accelerator | None) -> PluginContext:
    return PluginContext(name, dict(config.backends.options.get(name, {})), config, accelerator)


def _data_parallelism(config: Config, accelerator: Accelerator) -> Parallelism:
    """Choose the one data-parallel plugin: by name, else ddp at stage 0, else zero where installed, else fsdp2."""
    stage = config.zero_optimization.stage
    name = config.backends.data_parallel
    if name == "auto":
        present = {entry.name for entry in installed("parallelism")}
        name = "ddp" if stage == 0 else "zero" if "zero" in present else "fsdp2"
    plugin: Parallelism = load("parallelism", name, _context(name, config, accelerator))
    if plugin.role != "data":
        raise ConfigError(
            f"backends.data_parallel = {name!r}", why="it is a model-parallel plugin", fix="Write 'auto' or 'fsdp2'"
        )
    if stage not in plugin.stages:
        stages = ", ".join(map(str, plugin.stages))
        raise ConfigError(
            f"zero_optimization.stage = {stage} with backends.data_parallel = {name!r}",
            why=f"{name} implements stage {stages}",
            fix="Set backends.data_parallel to 'auto', or choose a stage it implements",
        )
    return plugin


def _plugin_names() -> frozenset[str]:
    """Names that ``backends.options`` may hold: those of every installed plugin."""
    return frozenset(entry.name for kind in KINDS for entry in installed(kind))


def _activate(accelerator: Accelerator) -> torch.device:
    """Make this rank's device the current one."""
    accelerator.activate()
    count = accelerator.device_count()
    index = env.local_rank(env.launch().rank) % max(count, 1)
    accelerator.set_device(index)
    return accelerator.device()


def _agree(control: Control, config: Config, model: nn.Module) -> None:
    """Check that all ranks were started with one configuration and one model."""
    if control.world_size == 1:
        return
    _agree_on_configuration(control, config)
    own = fingerprint(model)
    if len(set(control.share("model", own.digest, what="model fingerprint"))) == 1:
        return
    found = [Fingerprint.from_json(text) for text in control.share("model-detail", own.to_json(), what="model")]
    other = next(rank for rank, entry in enumerate(found) if entry.digest != found[0].digest)
    raise RankError(
        f"Ranks were started with different models: rank 0 and rank {other} differ",
        why=first_difference(found[0], found[other]) or "their digests differ",
        fix="Build the same model on every rank",
    )


def _agree_on_configuration(control: Control, config: Config) -> None:
    """Compare what must be equal on all ranks; keys that only print may differ."""
    if len(set(control.share("configuration", config.digest(), what="configuration"))) == 1:
        return
    found = control.share("configuration-detail", config.as_dict(), what="configuration")
    for rank, other in enumerate(found):
        differing = differences(found[0], other)
        if differing:
            path, one, two = differing[0]
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise RankError(
                f"Ranks were started with different configurations: {path}{more}",
                why=f"rank 0 has {one!r}, rank {rank} has {two!r}",
                fix="Give every rank the same configuration",
            )


def _schedule(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        return None
    if given is None:
        if config.scheduler is None:
            return None
        from polyscale.schedules import build_scheduler

        return build_scheduler(optimizer, config.scheduler)
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        if given.optimizer is not optimizer:
            raise PolyscaleError(
                "An lr_scheduler of another optimizer",
                why="it would change the learning rate of groups that are not trained",
                fix="Pass the optimizer it was made with as optimizer=, or a callable of the optimizer",
            )
        return given
    return given(optimizer) if callable(given) else given


def _loader(data: Any, config: Config, topology: Topology, micro_batch: int, control: Control) -> Any:
    """Make a resumable loader of a dataset; take another iterable as it is."""
    is_loader = isinstance(data, torch.utils.data.DataLoader) or hasattr(data, "state_dict")
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if data is None or is_loader or not is_dataset:
        return data
    from polyscale.data import loader

    control.agree("data", len(data), what="number of samples")
    return loader(
        data,
        topology=topology,
        micro_batch_size=micro_batch,
        seed=config.seed or 0,
        drop_last=True,
    )


def seed_ranks(seed: int, topology: Topology, accelerator: Accelerator) -> None:
    """Seed host and device generators: different on ranks with different samples, equal across tensor parallelism."""
    text = f"polyscale:{seed}:{topology.dp_rank}:{topology.coordinate('pp')}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    torch.manual_seed(own)
    accelerator.manual_seed(own)


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
        for note in setup.config.notes(setup.honoured):
            log.info("%s has no effect here: %s", note.key, note.reason)


def numel_of(setup: Setup) -> int:
    """Number of elements of the whole model, tied parameters once."""
    return sum(torch.Size(info.shape).numel() for info in setup.applied.store.infos.values())


def _close_at_exit(engine: Engine) -> None:
    reference = weakref.ref(engine)

    def end() -> None:
        alive = reference()
        if alive is not None and not alive._closed:
            if alive._accumulation.open:
                log.warning("%s", alive._accumulation.open_error("The process ends"))
            alive._release()

    atexit.register(end)
    weakref.finalize(engine, atexit.unregister, end)
