"""Process groups and topologies."""

import os
import socket

from cases import Cpu, Gloo, case, free_ports, say


@case(2)
def hostname_does_not_resolve(control, rank):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    say("sum", [total.item(), socket.gethostname()])


@case(1)
def alone(rank):
    import torch.distributed as dist

    from polyscale.control.process_group import ensure_process_group
    from polyscale.errors import PolyscaleError
    from polyscale.topology import Topology

    def refusal():
        try:
            ensure_process_group(Gloo(), Cpu())
        except PolyscaleError as error:
            return f"{type(error).__name__}: {error}"

    os.environ.update({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "POLYSCALE_TIMEOUT": "1"})
    say("no one comes", refusal())
    os.environ["RANK"] = "5"
    say("rank too high", refusal())
    del os.environ["MASTER_ADDR"]
    say("no address", refusal())
    del os.environ["WORLD_SIZE"], os.environ["RANK"]
    control = ensure_process_group(Gloo(), Cpu())
    say("same", control is ensure_process_group(Gloo(), Cpu()))
    control.agree("config", {"lr": 1}, what="configuration")
    say("alone", [control.share("a", 1), control.decide("b", 2), str(Topology.build()), dist.get_world_size()])
    dist.destroy_process_group()
    say("new group, new control", ensure_process_group(Gloo(), Cpu()) is not control)


@case(4)
def topology(control, rank):
    import torch
    import torch.distributed as dist

    from polyscale.topology import Topology

    def members(group):
        return dist.get_process_group_ranks(group)

    hybrid = Topology.build(dp_replicate=2)
    say("hybrid", [str(hybrid), members(hybrid.mesh("dp_shard").get_group()), members(hybrid.group("grad"))])
    say("hybrid mesh", hybrid.mesh("dp_replicate", "dp_shard").mesh.tolist())
    mixed = Topology.build(dp_shard=2, tp=2, ep=2)
    groups = {name: members(mixed.group(name)) for name in ("batch", "grad", "expert_grad", "norm")}
    say("mixed", {**groups, "tp": members(mixed.mesh("tp").get_group()), "ep": members(mixed.mesh("ep").get_group())})
    say("dp", [mixed.dp_rank, mixed.dp_size, mixed.coordinate("tp"), mixed.size("edp")])
    three = Topology.build(dp_replicate=2, dp_shard=1, sp=2)
    say("three", [members(three.group("grad")), members(three.group("batch")), three.group("norm") is dist.group.WORLD])
    spanning = Topology.build(pp=2, dp_replicate=2, dp_shard=1)
    say("pipeline", [members(spanning.group("grad")), members(spanning.mesh("pp").get_group())])
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mixed.group("batch"))
    say("sum", total.item())
    control_group = hybrid.group("control")
    say("control", [dist.get_backend(control_group), control_group is hybrid.group("control")])
    for one in (hybrid, mixed, three, spanning):
        one.close()
    try:
        dist.get_process_group_ranks(control_group)
    except Exception as error:
        say("closed group", str(error))
    dist.barrier()


@case(4)
def remade_default_group(control, rank):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from polyscale.errors import RankError
    from polyscale.topology import Topology

    def sums(mesh):
        whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
        return (whole * 2).full_tensor().tolist()

    first, twin = Topology.build(dp_replicate=2), Topology.build(dp_replicate=2)
    say("shared", [first.dense is twin.dense, first.group("grad") is twin.group("grad")])
    say("before", sums(first.data_mesh()))
    twin.close()
    say("other closed", sums(first.data_mesh()))
    ports = control.share("port", free_ports(1)[0])
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=4)
    dist.new_group([0, 1]), dist.new_group([2, 3])  # names of groups begin anew, and now mean others
    try:
        first.group("grad")
    except RankError as error:
        say("stale", str(error))
    first.close()
    again = Topology.build(dp_replicate=2)
    say("after", sums(again.data_mesh()))
    dist.barrier()
