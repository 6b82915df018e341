"""Starting values: makes every rank begin with the same weights, whatever the model was built on.

Three starts: *real* (the model holds its weights: data-parallel rank 0's win, as a rank that was not seeded would
otherwise contribute another model's shard), *deferred* (``partitioned_init``: rank 0 replays one parameter at a time)
and *meta* (values depend on seed and name only, so nothing is sent).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.sharded_store import local_tensor


def start_value(fqn: str, like: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Return the whole starting value of a parameter or buffer on the device, equal on all data-parallel ranks."""
    materializer = context.materializer
    alone = context.topology.dp_size == 1
    value: torch.Tensor
    if materializer.kind == "meta" or alone or context.topology.dp_rank == 0:
        value = materializer.value(fqn).to(context.device)
    else:
        value = torch.empty(like.shape, dtype=like.dtype, device=context.device)
    if materializer.kind != "meta" and not alone:
        broadcast_from_first(value, context)
    return value


def broadcast_from_first(tensor: torch.Tensor, context: ParallelContext) -> None:
    """Overwrite ``tensor`` with that of the first data-parallel rank."""
    group = context.topology.group("grad")
    source = 0 if group is None else dist.get_global_rank(group, 0)
    payload = tensor if tensor.is_contiguous() else tensor.contiguous()
    context.communication.broadcast(payload, source, group).wait_host()
    if payload is not tensor:
        tensor.copy_(payload)


@torch.no_grad()
def fill_whole(parts: list[Part], context: ParallelContext) -> None:
    """Give every module its whole starting values on the device.

    A parameter on the meta device becomes a new one, and so does one on the host where torch cannot put memory of the
    device into it (devices that are not in torch itself).
    """
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        for prefix, module in part.named_modules():
            for attribute, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fqn = f"{prefix}.{attribute}" if prefix else attribute
                    whole = _whole_parameter(fqn, parameter, context, made)
                    if whole is not parameter:
                        setattr(module, attribute, whole)  # recurrent modules keep lists of theirs, which this renews
            fill_buffers(module, prefix, context)


def fill_buffers(module: nn.Module, prefix: str, context: ParallelContext) -> None:
    """Give the direct buffers of ``module`` their starting values, dtype kept."""
    for attribute, buffer in list(module._buffers.items()):
        if buffer is None:
            continue
        fqn = f"{prefix}.{attribute}" if prefix else attribute
        if buffer.is_meta:
            module._buffers[attribute] = start_value(fqn, buffer, context)
            continue
        moved = buffer.to(context.device)
        if context.topology.dp_size > 1 and moved.numel():
            broadcast_from_first(moved, context)
        module._buffers[attribute] = moved


def _whole_parameter(
    fqn: str, parameter: nn.Parameter, context: ParallelContext, made: dict[int, nn.Parameter]
) -> nn.Parameter:
    if id(parameter) in made:
        return made[id(parameter)]
    if parameter.is_meta:
        result = nn.Parameter(start_value(fqn, parameter, context), requires_grad=parameter.requires_grad)
    else:
        result = _moved(parameter, context.device)
        if context.topology.dp_size > 1 and parameter.numel():
            broadcast_from_first(local_tensor(result.data), context)
    made[id(parameter)] = result
    return result


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    data = parameter.data.to(device)
    try:
        parameter.data = data
    except RuntimeError:  # "incompatible tensor type"
        moved = nn.Parameter(data, requires_grad=parameter.requires_grad)
        vars(moved).update(vars(parameter))
        return moved
    return parameter
