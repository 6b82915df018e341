import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyscale.testing import parity
from polyscale.testing.parity import Case, Task
from polyscale.testing.parity.cases import CLIP_AT, FACTORS, OPTIMIZERS
from polyscale.testing.parity.covering import combinations, covering_array
from polyscale.testing.parity.oracle import Lion, Muon, make_optimizers, orthogonalised

CASES = parity.parity_cases("naive", stages=(0,))


class NaiveEngine:
    """Data parallelism in its plainest form: masters, gradients summed by all_reduce, one optimizer per rank."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.master = task, model
        self.compute = copy.deepcopy(model).bfloat16() if task.dtype == "bf16" else model
        self.optimizers = make_optimizers(task.optimizer, model.named_parameters())
        self.device = torch.device("cpu")
        self.grad_norm = None
        self.micro = 0
        self.sums: dict[str, torch.Tensor] = {}
        self.parameters_store = self

    def __call__(self, *args, **kwargs):
        return self.compute(*args, **kwargs)

    def backward(self, loss):
        loss.backward()
        for name, low in self.compute.named_parameters():
            if low.grad is not None:
                grad = low.grad.to(self.master.get_parameter(name).dtype)
                self.sums[name] = self.sums[name] + grad if name in self.sums else grad
                low.grad = None

    def step(self):
        self.micro += 1
        if self.micro % self.task.accumulation:
            return False
        self.reduce()
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self.sums = {}
        self.master.zero_grad()
        with torch.no_grad():
            for low, high in zip(self.compute.parameters(), self.master.parameters(), strict=True):
                low.copy_(high)
        return True

    def used_somewhere(self, used):
        flag = torch.tensor(float(used))
        dist.all_reduce(flag)
        return flag.item() > 0

    def divisor(self):
        return dist.get_world_size() * self.task.accumulation

    def reduce(self):
        for name, parameter in self.master.named_parameters():
            if not parameter.requires_grad or not self.used_somewhere(name in self.sums):
                continue
            total = self.sums.get(name, torch.zeros_like(parameter))
            dist.all_reduce(total)
            parameter.grad = total / self.divisor()

    def clip(self):
        limit = CLIP_AT if self.task.clipped else math.inf
        self.grad_norm = nn.utils.clip_grad_norm_(self.master.parameters(), limit)

    def iter_full(self):
        yield from self.master.named_parameters(remove_duplicate=False)

    def close(self):
        pass


def naive(case, model):
    return NaiveEngine(case.task, model)


class TorchEngine(NaiveEngine):
    """One of torch's own, which averages over ranks; the micro-batches are left to divide by."""

    def backward(self, loss):
        loss.backward()

    def reduce(self):
        for parameter in self.master.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.task.accumulation


class TorchDdp(TorchEngine):
    """torch's own DistributedDataParallel."""

    def __init__(self, task, model):
        super().__init__(task, model)
        self.compute = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def __call__(self, *args, **kwargs):
        self.compute.require_backward_grad_sync = (self.micro + 1) % self.task.accumulation == 0
        return self.compute(*args, **kwargs)


def torch_ddp(case, model):
    return TorchDdp(case.task, model)


class TorchFsdp2(TorchEngine):
    """torch's own fully_shard, block by block."""

    def __init__(self, task, model):
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        super().__init__(task, fully_shard(model))

    def clip(self):
        super().clip()
        self.grad_norm = self.grad_norm.full_tensor()

    def iter_full(self):
        for name, value in super().iter_full():
            yield name, value.full_tensor()


def torch_fsdp2(case, model):
    return TorchFsdp2(case.task, model)


def fsdp2_can(task):
    elementwise = task.optimizer in ("sgd", "adamw")
    return elementwise and task.dtype != "bf16" and task.branch != "one-rank" and not task.empty


class WrongDivisor(NaiveEngine):
    def divisor(self):
        return self.task.accumulation


class SkipsLastMicroStep(NaiveEngine):
    def backward(self, loss):
        if (self.micro + 1) % self.task.accumulation or self.task.accumulation == 1:
            super().backward(loss)


class ReducesOnlyTheLastMicroStep(NaiveEngine):
    def backward(self, loss):
        mine = {name: value / dist.get_world_size() for name, value in self.sums.items()}
        self.sums = {}
        super().backward(loss)
        for name in self.sums:
            self.sums[name] = self.sums[name] + mine.get(name, 0)


class MovesWhatNobodyUsed(NaiveEngine):
    def used_somewhere(self, used):
        super().used_somewhere(used)
        return True


class IgnoresWhatOneRankDidNotUse(NaiveEngine):
    def used_somewhere(self, used):
        flag = torch.tensor(float(used))
        dist.all_reduce(flag)
        return flag.item() == dist.get_world_size()


class ClipsByTheLocalNorm(NaiveEngine):
    def clip(self):
        norm = torch.stack([total.norm() for total in self.sums.values()]).norm()
        super().clip()
        self.grad_norm = norm


class DoesNotClip(NaiveEngine):
    def clip(self):
        self.grad_norm = nn.utils.clip_grad_norm_(self.master.parameters(), math.inf)


class CountsTiedTwiceInTheNorm(NaiveEngine):
    def clip(self):
        named = dict(self.master.named_parameters(remove_duplicate=False))
        norm = torch.stack([value.grad.norm() for value in named.values() if value.grad is not None]).norm()
        super().clip()
        self.grad_norm = norm


class UntiesTheHead(NaiveEngine):
    def __init__(self, task, model):
        if task.tied:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        super().__init__(task, model)


class LosesTheSecondUse(NaiveEngine):
    def __call__(self, *args, **kwargs):
        self.compute.reuse = False
        return super().__call__(*args, **kwargs)


class TrainsTheFrozen(NaiveEngine):
    def __init__(self, task, model):
        model.requires_grad_(True)
        super().__init__(task, model)


class AccumulatesInBf16(NaiveEngine):
    def reduce(self):
        self.sums = {name: value.bfloat16().to(value.dtype) for name, value in self.sums.items()}
        super().reduce()


class KeepsMastersInBf16(NaiveEngine):
    def step(self):
        stepped = super().step()
        with torch.no_grad():
            for parameter in self.master.parameters() if self.task.dtype == "bf16" else ():
                parameter.copy_(parameter.bfloat16())
        return stepped


class RanksDrift(NaiveEngine):
    def step(self):
        stepped = super().step()
        with torch.no_grad():
            self.master.blocks[2].down.bias.add_(1e-12 * dist.get_rank())
        return stepped


class TellsANumberlessLoss(NaiveEngine):
    """Its gradients are right, and its first losses; NaN is neither more nor less than they."""

    def __call__(self, *args, **kwargs):
        loss = super().__call__(*args, **kwargs)
        return loss + torch.full_like(loss, math.nan).detach() if self.micro == 2 else loss


class StepsTooOften(NaiveEngine):
    def step(self):
        super().step()
        return True


class Raises(NaiveEngine):
    def step(self):
        if dist.get_rank() == 1:
            raise RuntimeError("no memory on rank 1")
        return super().step()


# What is wrong, a task on which it must be found, and words of the message.
MUTANTS = {
    WrongDivisor: (Task(), "off by"),
    SkipsLastMicroStep: (Task(accumulation=3, dtype="fp32"), "off by"),
    ReducesOnlyTheLastMicroStep: (Task(accumulation=3, optimizer="lion"), "off by"),
    MovesWhatNobodyUsed: (Task(idle=True, optimizer="adamw", dtype="bf16"), "idle.weight has no gradient"),
    IgnoresWhatOneRankDidNotUse: (Task(branch="one-rank", optimizer="muon"), "branch.weight is off"),
    ClipsByTheLocalNorm: (Task(clipped=True, dtype="fp32"), "grad_norm of update"),
    DoesNotClip: (Task(clipped=True, dtype="bf16"), "off by"),
    CountsTiedTwiceInTheNorm: (Task(tied=True), "grad_norm"),
    UntiesTheHead: (Task(tied=True, dtype="bf16"), "head.weight is off"),
    LosesTheSecondUse: (Task(reuse=True, dtype="bf16"), "loss of"),
    TrainsTheFrozen: (Task(frozen=True), "blocks.1.up.weight has no gradient"),
    AccumulatesInBf16: (Task(dtype="fp32"), "off by"),
    KeepsMastersInBf16: (Task(dtype="bf16", optimizer="sgd"), "off by"),
    RanksDrift: (Task(), "rank 1 holds other weights"),
    TellsANumberlessLoss: (Task(), "loss of .* is nan: off by nan"),
    StepsTooOften: (Task(accumulation=3), "step\\(\\) returned"),
}


def mutant(case, model):
    return next(kind for kind in MUTANTS if kind.__name__ == case.plugin)(case.task, model)


def raising(case, model):
    return Raises(case.task, model) if case.task.idle else naive(case, model)


def exits(case, model):
    import os

    if case.task.idle and dist.get_rank() == 1:
        os._exit(75)
    return naive(case, model)


NAIVE = parity.Suite([case for case in CASES if case.task.dtype != "fp64"], naive)
DDP = parity.Suite([case for case in CASES if case.task.dtype == "fp64"], torch_ddp)
FSDP2 = parity.Suite([case for case in CASES if fsdp2_can(case.task)], torch_fsdp2)
WRONG = parity.Suite([Case(task, kind.__name__, 0) for kind, (task, _) in MUTANTS.items()], mutant)


@pytest.mark.parametrize("case", NAIVE.cases, ids=str)
def test_plain_data_parallelism_passes(case):
    parity.check(case, NAIVE.result(case))


@pytest.mark.parametrize("case", DDP.cases, ids=str)
def test_torch_ddp_passes(case):
    parity.check(case, DDP.result(case))


@pytest.mark.parametrize("case", FSDP2.cases, ids=str)
def test_torch_fully_shard_passes(case):
    parity.check(case, FSDP2.result(case))


@pytest.mark.parametrize("case", WRONG.cases, ids=lambda case: case.plugin)
def test_every_mutant_is_caught(case):
    words = next(words for kind, (_, words) in MUTANTS.items() if kind.__name__ == case.plugin)
    with pytest.raises(parity.ParityError, match=words):
        parity.check(case, WRONG.result(case))


def three_cases():
    return [
        Case(Task(idle=idle, tied=tied), "broken", 0) for idle, tied in ((False, False), (True, False), (False, True))
    ]


@pytest.mark.parametrize(("factory", "words"), [(raising, "no memory on rank 1"), (exits, "exit code 75")])
def test_a_case_that_fails_does_not_take_others_with_it(factory, words):
    cases = three_cases()
    suite = parity.Suite(cases, factory)
    parity.check(cases[0], suite.result(cases[0]))
    parity.check(cases[2], suite.result(cases[2]))
    with pytest.raises(parity.ParityError, match=words):
        parity.check(cases[1], suite.result(cases[1]))


def test_quick_cases_cover_every_pair_in_float64_and_again_below():
    factors = {"stage": (1, 2, 3), **FACTORS}
    cases = parity.parity_cases("fsdp2", stages=(1, 2, 3), communication="shm")
    for dtypes in (("fp64",), ("fp32", "bf16")):
        rows = [vars(case.task) | {"stage": case.stage} for case in cases if case.task.dtype in dtypes]
        for pair in combinations(factors | {"dtype": dtypes}, 2):
            assert any(all(row[name] == value for name, value in pair) for row in rows), pair
    assert len(cases) <= 48 and len({str(case) for case in cases}) == len(cases)
    assert all(case.config()["backends"]["communication"] == "shm" for case in cases)


def test_full_cases_cover_every_three_settings_and_are_the_same_each_time():
    factors = {"stage": (0, 1), "dtype": ("fp64",), **FACTORS}
    rows = covering_array(factors, strength=3)
    assert rows == covering_array(factors, strength=3)
    for combination in combinations(factors, 3):
        assert any(all(row[name] == value for name, value in combination) for row in rows)


def test_oracle_optimizers_do_what_the_papers_say():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    weight.grad = torch.tensor([0.5, -0.1, 0.0])
    Lion([weight], lr=0.1, betas=[0.9, 0.99], weight_decay=0.5).step()
    assert torch.allclose(weight, torch.tensor([1 - 0.1 * (1 + 0.5), -2 - 0.1 * (-1 - 1.0), 3 - 0.1 * 1.5]))
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(16, 6, generator=torch.Generator().manual_seed(0))))
    assert singular.min() > 0.6 and singular.max() < 1.3
    matrix = nn.Parameter(torch.eye(4, 2))
    matrix.grad = torch.eye(4, 2)
    Muon([matrix], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    moved = (torch.eye(4, 2) - matrix.detach()) / (0.1 * math.sqrt(4 / 2))
    assert 0.68 < moved[0, 0] < 1.2 and torch.allclose(moved, moved[0, 0] * torch.eye(4, 2), atol=1e-5)


def test_joined_batch_equals_its_parts():
    task = Task()
    model = parity.oracle.make_model(task)
    parts = [parity.oracle.batch_of(0, 0, rank) for rank in range(2)]
    joined = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
    norm = torch.stack([grad.norm() for grad in torch.autograd.grad(joined, list(model.parameters()))]).norm()
    run = parity.oracle_run(task)
    assert (run.losses[0, 0, 0] + run.losses[0, 0, 1]) / 2 == pytest.approx(joined.item(), abs=1e-12)
    assert run.norms[0] == pytest.approx(norm.item(), abs=1e-12)


def test_clipping_is_active_and_every_option_is_written_out():
    assert all(norm > CLIP_AT for norm in parity.oracle_run(Task(clipped=True)).norms[:2])
    assert set(OPTIMIZERS) == set(FACTORS["optimizer"])
