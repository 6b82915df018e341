"""The simulated device as one of torch's: indices, operators, mixed devices, random numbers, serialization, faults."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import functional as F

from polyscale_sim import device as sim_device
from polyscale_sim import faults

pytestmark = pytest.mark.usefixtures("on_sim")


def test_devices_are_counted_and_an_index_out_of_range_names_the_count():
    assert torch.sim.device_count() == torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator().type == "sim"
    for use in (
        lambda: torch.empty(1, device="sim:4"),
        lambda: torch.sim.set_device(9),
        lambda: torch.ones(1).to("sim:7"),
        lambda: torch.sim.memory_allocated("sim:4"),
        lambda: torch.Stream(device="sim:5"),
        lambda: torch.Generator(device="sim:6"),
    ):
        with pytest.raises(RuntimeError, match="there are 4 devices"):
            use()


def test_the_current_device_is_where_tensors_go():
    assert torch.sim.current_device() == 0
    torch.sim.set_device(2)
    assert torch.empty(1, device="sim").device.index == 2
    with torch.sim.device(1):
        assert torch.empty(1, device="sim").device.index == 1
    with torch.device("sim:3"):
        assert torch.empty(1).device.index == 3
    assert torch.accelerator.current_device_index() == 2
    torch.sim.set_device("sim:0")
    assert torch.sim.get_device_name(1) == "sim device 1"
    assert torch.sim.get_device_properties(1).total_memory == torch.sim.mem_get_info(1)[1]


def test_registering_again_does_nothing_and_another_name_is_refused():
    from polyscale.errors import UnsupportedError

    sim_device.register("sim")
    with pytest.raises(UnsupportedError, match="'sim' owns it"):
        sim_device.register("acme")
    assert sim_device.registered_name() == "sim"


def test_another_claimant_is_refused_after_sim():
    from polyscale.errors import UnsupportedError
    from polyscale.torch_accelerator import TorchAccelerator

    class Acme(TorchAccelerator):
        name = device_type = "acme"
        private = True

    with pytest.raises(UnsupportedError, match="'sim' owns it"):
        Acme().activate()


def test_operands_on_several_devices_are_refused():
    here, there, host = torch.ones(3, device="sim"), torch.ones(3, device="sim:1"), torch.ones(3)
    index = torch.tensor([0, 1, 2])
    condition = torch.tensor([True, False, True])
    for operator in (
        lambda: here + there,
        lambda: here + host,
        lambda: host + here,
        lambda: here.add_(host),
        lambda: host.add_(here),
        lambda: torch.cat([here, host]),
        lambda: torch.cat([here, there]),
        lambda: torch.stack([host, here]),
        lambda: torch.where(condition, here, here),
        lambda: torch.where(condition.to("sim"), here, host),
        lambda: here.index_select(0, index),
        lambda: here.gather(0, index),
        lambda: torch.gather(host, 0, index.to("sim")),
        lambda: torch.add(here, 1, out=host),
        lambda: torch.add(host, 1, out=here),
        lambda: torch.add(here, here, out=there),
        lambda: F.linear(torch.ones(2, 3), torch.ones(3, 3, device="sim")),
        lambda: F.embedding(index, torch.ones(3, 3, device="sim")),
        lambda: F.conv1d(here.view(1, 1, 3), there.view(1, 1, 3)),
        lambda: F.conv1d(here.view(1, 1, 3), host.view(1, 1, 3)),
        lambda: F.cross_entropy(torch.ones(3, 3, device="sim"), index),
        lambda: here.index_put_((index.to("sim"),), host),
        lambda: torch._foreach_add_([here], [host]),
        lambda: here.masked_fill_(condition, 1.0),
    ):
        with pytest.raises(RuntimeError, match="device"):
            operator()
    assert here.tolist() == there.tolist() == host.tolist() == [1, 1, 1]


def test_what_real_devices_allow_is_allowed():
    here = torch.arange(3.0, device="sim")
    assert (here * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert torch.where(here > 1, here, torch.tensor(-1.0)).tolist() == [-1, -1, 2]
    assert here[torch.tensor([2, 0])].tolist() == [2, 0]
    assert here.copy_(torch.ones(3)).device.type == "sim"
    here[0:2] = torch.zeros(2)
    assert here.to("sim:1").tolist() == [0, 0, 1]


def test_views_share_memory_and_in_place_operators_write_through():
    x = torch.zeros(4, 4, device="sim")
    x[1:3].t().add_(1)
    x.diagonal().mul_(5)
    x.view(-1)[0] = 7
    x.unbind(0)[3].fill_(2)
    x.unfold(0, 2, 2)[0, 0, 1].sub_(1)
    host = torch.zeros(4, 4)
    host[1:3].t().add_(1)
    host.diagonal().mul_(5)
    host.view(-1)[0] = 7
    host.unbind(0)[3].fill_(2)
    host.unfold(0, 2, 2)[0, 0, 1].sub_(1)
    assert torch.equal(x.cpu(), host)
    assert x.t().untyped_storage().data_ptr() == x.data_ptr()
    assert x[1:].is_set_to(x[1:])
    shared = sim_device.cpu_view(x)
    shared[0, 0] = -3
    assert x[0, 0].item() == -3
    del x
    assert shared[3, 3].item() == 2


def test_the_storage_is_replaced_by_set():
    x, y = torch.zeros(6, device="sim"), torch.arange(6.0, device="sim")
    x.set_(y.untyped_storage(), 2, (2, 2), (2, 1))
    assert x.tolist() == [[2, 3], [4, 5]]
    x.data = y[:2]
    assert x.tolist() == [0, 1]
    x.set_()
    assert x.numel() == 0
    x.set_(y)
    assert x.is_set_to(y)


def test_random_numbers_equal_the_hosts_for_the_same_seed():
    draws = (
        lambda device: torch.randn(1001, device=device),
        lambda device: torch.rand(7, 3, device=device),
        lambda device: torch.randint(0, 100, (50,), device=device),
        lambda device: torch.randperm(64, device=device),
        lambda device: torch.empty(33, device=device).normal_(),
        lambda device: torch.bernoulli(torch.full((100,), 0.3, device=device)),
        lambda device: torch.multinomial(torch.ones(20, device=device), 5),
        lambda device: F.dropout(torch.ones(400, device=device), 0.5),
        lambda device: torch.native_dropout(torch.ones(300, device=device), 0.5, True)[0],
        lambda device: torch.nn.init.trunc_normal_(torch.empty(50, device=device)),
        lambda device: torch.randn_like(torch.ones(9, device=device)),
    )
    for index in (0, 3):
        torch.sim.set_device(index)
        torch.manual_seed(11)
        ours = [draw("sim").cpu() for draw in draws]
        torch.manual_seed(11)
        hosts = [draw("cpu") for draw in draws]
        for one, other in zip(ours, hosts, strict=True):
            assert torch.equal(one, other)
    torch.sim.set_device(0)


def test_devices_and_host_draw_independently():
    torch.manual_seed(5)
    torch.randn(100, device="sim:1")
    F.dropout(torch.ones(100, device="sim:2"))
    first = torch.randn(4)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4), first)
    torch.sim.manual_seed(9)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4, device="sim").cpu(), first)


def test_random_state_is_saved_and_restored_per_device():
    torch.sim.manual_seed_all(3)
    states = torch.sim.get_rng_state_all()
    first = [torch.rand(5, device=f"sim:{i}").cpu() for i in range(4)]
    torch.sim.set_rng_state(states[2], "sim:2")
    assert torch.equal(torch.rand(5, device="sim:2").cpu(), first[2])
    assert not torch.equal(torch.rand(5, device="sim:1").cpu(), first[1])
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(5, device="sim:1").cpu(), first[1])
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(3, device="sim")
    generator = torch.Generator(device="sim").manual_seed(4)
    assert generator.device.type == "sim"
    twin = torch.Generator().manual_seed(4)
    assert torch.equal(torch.rand(4, device="sim", generator=generator).cpu(), torch.rand(4, generator=twin))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="sim", generator=twin)
    copy_of = generator.clone_state()
    assert torch.equal(torch.rand(4, device="sim", generator=copy_of), torch.rand(4, device="sim", generator=generator))


def test_tensors_are_saved_loaded_copied_and_pickled():
    x = {"a": torch.randn(3, 4, device="sim:1")[1:], "p": torch.nn.Parameter(torch.ones(2, device="sim"))}
    file = io.BytesIO()
    torch.save(x, file)
    for target, device in ((None, "sim:1"), ("cpu", "cpu"), ("sim:2", "sim:2"), (torch.device("sim", 3), "sim:3")):
        file.seek(0)
        loaded = torch.load(file, map_location=target)
        assert str(loaded["a"].device) == device
        assert torch.equal(loaded["a"].cpu(), x["a"].cpu())
    host = io.BytesIO()
    torch.save(torch.ones(3), host)
    host.seek(0)
    assert torch.load(host, map_location="sim").device == torch.device("sim", 0)
    assert torch.equal(copy.deepcopy(x["a"]), x["a"])
    assert copy.deepcopy(x["p"]).requires_grad
    again = pickle.loads(pickle.dumps(x["a"]))
    assert torch.equal(again, x["a"])
    assert again.device == x["a"].device
    with pytest.raises(RuntimeError, match="sim"):
        file.seek(0)
        torch.load(file, map_location="sim:9")


def test_a_module_keeps_its_parameters_when_it_moves():
    model = torch.nn.Linear(3, 3)
    weight = model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("sim")
    assert model.weight is weight
    assert weight.is_sim
    model(torch.ones(2, 3, device="sim")).sum().backward()
    before = weight.detach().cpu().clone()
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), before - 0.1 * weight.grad.cpu())
    assert not model.cpu().weight.is_sim


def test_a_dead_device_answers_no_call_and_others_do():
    x, y = torch.ones(3, device="sim:1"), torch.ones(3, device="sim")
    pinned = torch.ones(3).pin_memory()
    event = torch.Event(device="sim:1")
    recorded = torch.accelerator.current_stream(1).record_event()
    faults.kill_device(1)
    for call in (
        lambda: x + 1,
        lambda: x.add_(1),
        lambda: torch.empty(3, device="sim:1"),
        x.cpu,
        lambda: x.copy_(pinned, non_blocking=True),
        lambda: y.to("sim:1"),
        lambda: x.to("sim:0"),
        lambda: x.sum().item(),
        x.tolist,
        lambda: torch.accelerator.synchronize(1),
        lambda: torch.Stream(device="sim:1").synchronize(),
        lambda: event.record(torch.accelerator.current_stream(1)),
        recorded.synchronize,
        recorded.query,
        lambda: F.conv1d(x.view(1, 1, 3), x.view(1, 1, 3)),
        lambda: torch.randn(3, device="sim:1"),
        lambda: x.untyped_storage().resize_(100),
    ):
        with pytest.raises(RuntimeError, match="sim:1 is dead"):
            call()
    assert (y + 1).tolist() == [2, 2, 2]
    faults.revive_device(1)
    assert (x + 1).tolist() == [2, 2, 2]


def test_pinned_memory_is_known_inside_and_counted():
    before = torch.sim.pinned_memory_allocated()
    pinned = torch.ones(100).pin_memory()
    made = torch.empty(10, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[50:].is_pinned()
    assert made.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert not torch.ones(3, device="sim").is_pinned()
    assert torch.sim.pinned_memory_allocated() - before == 440
    assert torch.ones(3, device="sim").to("cpu", non_blocking=True).tolist() == [1, 1, 1]
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)
    del pinned, made
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(3, device="sim", pin_memory=True)


def test_work_on_the_host_is_not_charged_to_the_device():
    base = torch.accelerator.memory_allocated(0)
    x = torch.randn(1000, 10)
    y = (x @ x.t()).sort().values
    assert torch.accelerator.memory_allocated(0) == base
    assert torch.equal(y, (x @ x.t()).sort().values)
