"""Names of torch that are private or depend on its version. Nothing else in polyscale uses such a name.

Supported: torch 2.11 and newer. Each function says what it stands for, so that a torch release that renames one is
mended here alone. torch is imported inside the functions: importing this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]


def default_store() -> Store:
    """The store behind the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to the leaves of a nest of tuples, lists, dicts and dataclasses that torch knows."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a nest of containers that torch knows."""
    from torch.utils import _pytree

    return list(_pytree.tree_leaves(tree))


def innermost(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that hold the elements of ``tensor``, which may wrap others, at any depth: a DTensor's local
    one, the one that a collective still writes into (not waited for), values and indices of a sparse or nested one.
    """
    import torch

    if tensor.layout == torch.sparse_coo:
        inside = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inside = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        inside = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        attributes = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        inside = [each for each in attributes if isinstance(each, torch.Tensor)]  # a DTensor names its mesh, too
    else:
        yield tensor
        return
    for each in inside:
        yield from innermost(each)


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook`` with the gradient of ``tensor`` in backward; the graph holds it as long as it lives."""
    return tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def hook_after_accumulation(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> Any:
    """Call ``hook`` whenever autograd has added to ``parameter.grad``; returns a handle with ``remove()``."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward (as a recompute of activations does)."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None, *, async_op: bool) -> Any:
    """``all_gather_single``, which was called ``all_gather_into_tensor`` before torch 2.13."""
    import torch.distributed as dist

    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, input, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None, *, async_op: bool) -> Any:
    """``reduce_scatter_single``, which was called ``reduce_scatter_tensor`` before torch 2.13."""
    import torch.distributed as dist

    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output, input, group=group, async_op=async_op)


# FSDP2's inner objects: units ("param groups") and their parameters.


def fsdp_units(module: nn.Module) -> list[Any]:
    """All FSDP2 parameter groups below ``module``, in module order, each once."""
    from torch.distributed.fsdp import FSDPModule

    units: dict[int, Any] = {}
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            for group in groups:
                units.setdefault(id(group), group)
    return list(units.values())


def fsdp_unit_parameters(unit: Any) -> list[tuple[Any, nn.Parameter]]:
    """(inner parameter object, sharded parameter) of every parameter of a unit."""
    return [(inner, inner.sharded_param) for inner in unit.fsdp_params]


def fsdp_has_gradient(inner: Any) -> bool:
    """Whether a parameter has an unsharded gradient that was not reduced yet."""
    unsharded = getattr(inner, "_unsharded_param", None)
    if inner.unsharded_accumulated_grad is not None:
        return True
    return unsharded is not None and unsharded.grad is not None


def fsdp_hold(unit: Any, dtype: torch.dtype | None) -> None:
    """Add the fresh gradients of a unit to those it holds, in ``dtype`` (FSDP2 itself holds in the reduction's)."""
    for inner in unit.fsdp_params:
        unsharded = getattr(inner, "_unsharded_param", None)
        if unsharded is None or unsharded.grad is None:
            continue
        if inner.unsharded_accumulated_grad is not None:
            inner.unsharded_accumulated_grad += unsharded.grad
        else:
            inner.unsharded_accumulated_grad = unsharded.grad if dtype is None else unsharded.grad.to(dtype)
        unsharded.grad = None


def fsdp_prepare_reduction(unit: Any, *, divisor: float) -> None:
    """Make the coming reduction of a unit cover every trainable parameter, in one dtype, divided by ``divisor``.

    Ranks that used different parameters would otherwise reduce buffers of different sizes, which gloo answers with a
    signal; and FSDP2 refuses a mix of gradients accumulated in fp32 and fresh ones in the compute dtype. FSDP2's own
    divisor is not used: torch 2.13 applies it twice where a unit is not sharded.
    """
    import torch

    for inner in unit.fsdp_params:
        unsharded = getattr(inner, "_unsharded_param", None)
        if unsharded is None:
            continue
        if not fsdp_has_gradient(inner) and unsharded.requires_grad:
            unsharded.grad = torch.zeros_like(unsharded)
    held = [inner.unsharded_accumulated_grad for inner in unit.fsdp_params]
    dtype = next((gradient.dtype for gradient in held if gradient is not None), None)
    if dtype is not None:
        fsdp_hold(unit, dtype)
    if divisor != 1.0:
        for inner in unit.fsdp_params:
            held_or_fresh = inner.unsharded_accumulated_grad
            if held_or_fresh is None and getattr(inner, "_unsharded_param", None) is not None:
                held_or_fresh = inner._unsharded_param.grad
            if held_or_fresh is not None:
                held_or_fresh.div_(divisor)


def fsdp_drop_gradients(unit: Any) -> None:
    """Drop unsharded gradients that were not reduced."""
    for inner in unit.fsdp_params:
        inner.unsharded_accumulated_grad = None
        unsharded = getattr(inner, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def fsdp_end_backward(module: nn.Module) -> None:
    """Do what the end of a backward does, for every unit: reduce or hold its gradients. Collective, last unit first."""
    units = fsdp_units(module)
    for child in _fsdp_modules(module):
        child.unshard()
    for unit in reversed(units):
        unit.post_backward()
    for unit in units:
        unit.finalize_backward()
        unit._training_state = type(unit._training_state).IDLE
        _release_reductions(unit)
    fsdp_reshard(module)


def _release_reductions(unit: Any) -> None:
    """Let go of the buffers of finished reductions: a list since torch 2.13, one state before."""
    if hasattr(unit.comm_ctx, "reduce_scatter_states"):
        unit.comm_ctx.reduce_scatter_states.clear()
    else:
        unit.comm_ctx.reduce_scatter_state = None


def fsdp_reset_after_error(module: nn.Module) -> None:
    """Bring FSDP2 back to its idle state after an exception in forward or backward, gradients dropped.

    Memory runs out in the middle of anything, so parts are undone whatever the unit says of itself: one that was
    gathered by half still counts as sharded, and the first forward may have ended while it made the units ready.
    """
    units = fsdp_units(module)
    for child in _fsdp_modules(module):
        state = child._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._training_state = type(state._training_state).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
    for unit in units:
        unit._training_state = type(unit._training_state).IDLE
        fsdp_drop_gradients(unit)
        unit._partial_reduce_output = None
        if hasattr(unit.comm_ctx, "all_gather_stream"):
            unit.finalize_backward()
            unit.comm_ctx.post_forward_order.clear()
            unit.comm_ctx.all_gather_state = None
            _release_reductions(unit)
    fsdp_reshard(module)
    for unit in units:
        for inner in unit.fsdp_params:
            inner.free_unsharded_param()
    if not all(unit._reset_sharded_params for unit in units):
        _fsdp_begin_anew(module)


def _fsdp_begin_anew(module: nn.Module) -> None:
    """Let the next forward make FSDP2's units ready, as the first one does."""
    for child in _fsdp_modules(module):
        state = child._get_fsdp_state()
        state._is_root = None
        state._state_ctx.all_states.clear()
    for unit in fsdp_units(module):
        unit._module_fqn = None


def fsdp_memory(module: nn.Module, name: Callable[[nn.Parameter], str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of all that FSDP2 holds at this moment beside shards and their gradients.

    Args:
        module: the root.
        name: the name of a sharded parameter.
    """
    for unit in fsdp_units(module):
        label = next((f"unit of {name(inner.sharded_param)}" for inner in unit.fsdp_params), "empty unit")
        for inner in unit.fsdp_params:
            fqn = name(inner.sharded_param)
            yield from (("gathered parameters", fqn, tensor) for tensor in inner.all_gather_outputs)
            unsharded = getattr(inner, "_unsharded_param", None)
            for gradient in (inner.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
                if gradient is not None:
                    yield "gradients before reduction", fqn, gradient
        if unit._all_gather_result is not None:
            yield "buffers of collectives", f"all_gather of the {label}", unit._all_gather_result[0]
    for context in {id(unit.comm_ctx): unit.comm_ctx for unit in fsdp_units(module)}.values():
        gathering = getattr(context, "all_gather_state", None)
        if gathering is not None:
            yield "buffers of collectives", "the last all_gather", gathering[0][0]
        reductions = getattr(context, "reduce_scatter_states", None) or [getattr(context, "reduce_scatter_state", None)]
        for reduction in filter(None, reductions):
            yield "buffers of collectives", "the last reduce_scatter", reduction[0]


def fsdp_reshard(module: nn.Module) -> None:
    """Free whole parameters, so that the next forward gathers them from the shards."""
    for child in _fsdp_modules(module):
        child.reshard()


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child


# The elastic agent's extension points ("Extending the Agent" in torch's documentation) are underscored methods.


def elastic_agent(spec: Any, logs: Any, *, on_start: Callable[[dict[int, int]], None], hold: Callable[[], bool]) -> Any:
    """A ``LocalElasticAgent`` that tells the process ids it started and leaves its ranks alone while ``hold()``.

    The agent's own events look up the host's name several times, seconds each where it does not resolve, and nobody
    receives them (handler "null"): here they carry nothing.

    Args:
        spec: ``WorkerSpec`` of the ranks.
        logs: ``LogsSpecs`` that says where each rank's output goes.
        on_start: given local rank -> process id, once they run.
        hold: while it returns true, the agent neither judges nor ends ranks.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.events.api import Event, EventSource

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            on_start(pids)
            return pids

        def _monitor_workers(self, worker_group: Any) -> RunResult:
            return RunResult(state=WorkerState.HEALTHY) if hold() else super()._monitor_workers(worker_group)

        def _construct_event(self, *args: Any, **kwargs: Any) -> Event:
            return Event(name="", source=EventSource.AGENT)

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            super()._shutdown(*args, **kwargs)
            for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
                for stream in (handler._stdout, handler._stderr):  # left open where a rank ended by itself
                    if stream is not None:
                        stream.close()

    return Agent(spec=spec, logs_specs=logs)


def foreach(operation: str) -> Any:
    """``torch._foreach_<operation>``: one elementwise operation over lists of tensors ("add_", "mul")."""
    import torch

    return getattr(torch, f"_foreach_{operation}")


def makes_states(error: BaseException, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``error`` was raised while ``optimizer`` made states for its parameters, before it computed anything.

    torch's optimizers do that in a method of one name; there is no public sign of it.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "_init_group" and frame.f_locals.get("self") is optimizer:
            return True
        trace = trace.tb_next
    return False


def privateuse1_owner() -> str | None:
    """Name of the device type that owns torch's one slot for out-of-tree devices (PrivateUse1); None while it is free.

    Importing a device's package is what claims the slot; there is no public way to ask.
    """
    import torch

    name = torch._C._get_privateuse1_backend_name()
    return None if name == "privateuseone" else str(name)


# Recording of tensor operations: dispatch modes and what an operator's schema says.


def dispatch_mode(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """A context manager under which ``handler(func, args, kwargs)`` stands for every ATen operator of this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(func, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]


@contextmanager
def without_modes() -> Iterator[None]:
    """Run operators as if no dispatch mode, function mode or tensor subclass had a say."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes into."""
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def returns_alias(func: Any) -> bool:
    """Whether an operator may return memory of its arguments (views and in-place operators do)."""
    return any(result.alias_info is not None for result in func._schema.returns)


def dcp_metadata_names() -> frozenset[tuple[str, str]]:
    """(module, name) of all that torch.distributed.checkpoint pickles into ``.metadata``, besides sizes and dtypes."""
    dcp = "torch.distributed.checkpoint"
    classes = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties"
    names = {(f"{dcp}.metadata", name) for name in (*classes.split(), "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")}
    paths = {(module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("", "Posix", "Windows")}
    return frozenset(names | paths | {(f"{dcp}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")})


def dcp_storage_info(path: str, offset: int, length: int, transforms: list[str] | None) -> Any:
    """Where torch.distributed.checkpoint's reader finds one stored block."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length, transforms)


def forget_meshes() -> None:
    """Empty DTensor's caches, which hold for every equal mesh and name the process groups of the first of them.

    Names of groups begin anew with each default process group, so a stale entry may even name a wrong group.
    """
    import sys

    import torch

    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (
        getattr(propagator, "propagate_op_sharding", None),
        getattr(propagator, "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
    ):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()
    clear_compiled = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_compiled is not None:
        clear_compiled()


def version(tensor: torch.Tensor) -> int:
    """How many in-place operators autograd has counted on a tensor and its views; -1 where it does not count."""
    return -1 if tensor.is_inference() else int(tensor._version)


def dispatch_key(device_type: str) -> str:
    """Name of the dispatch key under which kernels for tensors of ``device_type`` are registered.

    Raises:
        RuntimeError: torch knows no such device type.
    """
    import torch

    return str(torch._C._dispatch_key_for_device(device_type))
