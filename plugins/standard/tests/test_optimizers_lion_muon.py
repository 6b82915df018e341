"""Lion and Muon against the formulas of their papers, written out here in float64, and against torch's Muon."""

import copy

import pytest
import torch

from polyscale import PluginContext
from polyscale.interfaces.optimizer import OptimizerGroup
from polyscale.parameters.info import ParamInfo
from polyscale_standard import optimizers

STEPS = 4
SHAPES = {
    "embed.weight": (6, 4),
    "layers.0.wide": (3, 5),
    "layers.0.tall": (7, 2),
    "layers.0.square": (4, 4),
    "layers.0.conv": (2, 3, 3),
    "layers.0.none": (0, 4),
    "norm.weight": (4,),
    "lm_head.weight": (6, 4),
}
MATRICES = ("layers.0.wide", "layers.0.tall", "layers.0.square", "layers.0.none")


class WorldOfOne:
    """What a store is when this rank holds everything."""

    def __init__(self, shapes, tied=None):
        self.infos = {
            name: ParamInfo(name, tuple(shape), torch.float64, True, tied_to=(tied or {}).get(name, ()))
            for name, shape in shapes.items()
        }

    def assemble(self, fqn, local):
        return local

    def extract(self, fqn, full):
        return full


class TwoShards(WorldOfOne):
    """A store in which one process plays both ranks: parameters are flat halves, named ``fqn``, of a matrix."""

    def __init__(self, shapes):
        super().__init__(shapes)
        self.pending = {}
        self.assembled = []

    def of_rank(self, rank):
        return OneOfTwo(self, rank)


class OneOfTwo:
    def __init__(self, both, rank):
        self.infos, self.both, self.rank = both.infos, both, rank

    def assemble(self, fqn, local):
        self.both.pending.setdefault(fqn, {})[self.rank] = local.clone()
        parts = self.both.pending[fqn]
        self.both.assembled.append((self.rank, fqn))
        other = parts.get(1 - self.rank)
        if other is None:  # the other rank steps later: let it come first
            raise LookupError(fqn)
        return torch.cat([parts[0], parts[1]]).view(self.infos[fqn].shape)

    def extract(self, fqn, full):
        flat = full.reshape(-1)
        half = flat.numel() // 2
        return flat[:half] if self.rank == 0 else flat[half:]


def parameters(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, dtype=dtype, generator=generator)) for n, s in shapes.items()}


def gradients(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield {n: torch.randn(s, dtype=dtype, generator=generator) for n, s in shapes.items()}


def train(optimizer, params, shapes=SHAPES, dtype=torch.float64):
    for grads in gradients(shapes, dtype):
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()


def muon_of(params, settings, store=None, options=None):
    factory = optimizers.MuonPlugin().polyscale_optimizer(PluginContext("muon"))
    shapes = {name: param.shape for name, param in params.items()}
    return factory.build([OptimizerGroup(params, options or {})], factory.check(settings), store or WorldOfOne(shapes))


def test_lion_follows_algorithm_2_of_the_paper():
    lr, beta1, beta2, decay = 0.05, 0.9, 0.97, 0.1
    params, expected = parameters(), parameters()
    factory = optimizers.LionPlugin().polyscale_optimizer(PluginContext("lion"))
    settings = factory.check({"lr": lr, "betas": [beta1, beta2], "weight_decay": decay})
    train(factory.build([OptimizerGroup(params)], settings, None), params)
    momentum = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for grads in gradients():
        for name, g in grads.items():
            theta, m = expected[name].data, momentum[name]
            c = beta1 * m + (1 - beta1) * g
            momentum[name] = beta2 * m + (1 - beta2) * g
            expected[name].data = theta - lr * (torch.sign(c) + decay * theta)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-13, atol=1e-14)


def quintic(g):
    """Jordan et al. 2024, on the singular values: five times s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def test_muon_moves_the_singular_values_of_whole_matrices():
    lr, beta, decay = 0.05, 0.9, 0.1
    for nesterov in (True, False):
        params, expected = parameters(), parameters()
        settings = {"lr": lr, "momentum": beta, "weight_decay": decay, "nesterov": nesterov}
        train(muon_of(params, settings), params)
        buffers = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in MATRICES}
        for grads in gradients():
            for name in MATRICES[:3]:
                g, theta = grads[name], expected[name].data
                buffers[name] = beta * buffers[name] + (1 - beta) * g
                direction = (1 - beta) * g + beta * buffers[name] if nesterov else buffers[name]
                rows, columns = SHAPES[name]
                scale = max(1.0, rows / columns) ** 0.5
                expected[name].data = theta - lr * decay * theta - lr * scale * quintic(direction)
        for name in MATRICES[:3]:
            torch.testing.assert_close(params[name], expected[name], rtol=1e-10, atol=1e-11)


def test_what_is_no_hidden_matrix_gets_adamw():
    params, expected = parameters(), parameters()
    settings = {"lr": 0.5, "adam_lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
    train(muon_of(params, settings), params)
    rest = [name for name in SHAPES if name not in MATRICES]
    reference = torch.optim.AdamW(
        [expected[name] for name in rest], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False
    )
    train(reference, expected)
    for name in rest:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-13, atol=1e-14)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_with_bf16_iteration_is_close_to_torch(adjust):
    shapes = {name: SHAPES[name] for name in MATRICES[:3]}
    params, expected = (parameters(shapes, torch.float32) for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "bf16", "adjust_lr": adjust}
    train(muon_of(params, settings), params, shapes, torch.float32)
    reference = torch.optim.Muon(expected.values(), lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust)
    train(reference, expected, shapes, torch.float32)
    for name in shapes:
        moved = (expected[name] - parameters(shapes, torch.float32)[name]).norm()
        assert (params[name] - expected[name]).norm() < 0.1 * moved, name


def test_shards_of_a_matrix_are_updated_as_the_whole():
    shapes = {"a.weight": (4, 6), "b.weight": (5, 2)}
    whole = parameters(shapes)
    train(muon_of(whole, {"lr": 0.05, "weight_decay": 0.1}), whole, shapes)
    both = TwoShards(shapes)
    halves = [
        {n: torch.nn.Parameter(p.data.reshape(-1).chunk(2)[rank].clone()) for n, p in parameters(shapes).items()}
        for rank in (0, 1)
    ]
    ranks = [muon_of(halves[r], {"lr": 0.05, "weight_decay": 0.1}, both.of_rank(r)) for r in (0, 1)]
    updates = _momenta_of_both_ranks(shapes)
    for step, grads in enumerate(gradients(shapes)):
        both.pending = {name: dict(enumerate(updates[step][name].reshape(-1).chunk(2))) for name in shapes}
        for rank in (0, 1):
            for name, param in halves[rank].items():
                param.grad = grads[name].reshape(-1).chunk(2)[rank].clone()
            ranks[rank].step()
    for name in shapes:
        joined = torch.cat([halves[0][name], halves[1][name]]).view(shapes[name])
        torch.testing.assert_close(joined, whole[name], rtol=1e-12, atol=1e-13)
    # Both ranks went through the same matrices in the same order, each once a step: no rank waits for another.
    assert both.assembled == [(rank, name) for _ in range(STEPS) for rank in (0, 1) for name in shapes]


def _momenta_of_both_ranks(shapes):
    """The Nesterov updates of each step, which a rank gets from the other in a collective."""
    buffers = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    result = []
    for grads in gradients(shapes):
        step = {}
        for name, g in grads.items():
            buffers[name] = 0.95 * buffers[name] + 0.05 * g
            step[name] = 0.05 * g + 0.95 * buffers[name]
        result.append(step)
    return result


def test_learning_rates_fall_back_as_documented():
    def rates(settings):
        return [group["lr"] for group in muon_of(parameters(), settings).param_groups]

    assert rates({}) == [0.02, 3e-4]
    assert rates({"lr": 0.1}) == [0.1, 0.1]
    assert rates({"lr": 0.1, "adam_lr": 0.2}) == [0.1, 0.2]
    assert rates({"lr": 0.1, "muon_lr": 0.3}) == [0.3, 0.1]


def test_tied_and_named_parameters_go_where_their_names_say():
    names = {"transformer.wte.weight": (6, 4), "blocks.0.proj": (4, 4), "blocks.0.attention_heads.weight": (4, 4)}
    tied = {"blocks.0.proj": ("lm_head.weight",)}

    def orthogonalised(settings, tied=None):
        groups = muon_of(parameters(names), settings, WorldOfOne(names, tied)).param_groups
        return [name for group in groups if group["algorithm"] == "muon" for name in group["param_names"]]

    assert orthogonalised({}) == ["blocks.0.proj", "blocks.0.attention_heads.weight"]
    assert orthogonalised({}, tied) == ["blocks.0.attention_heads.weight"]
    assert orthogonalised({"adam_patterns": ["blocks.*"]}) == ["transformer.wte.weight"]


def test_groups_reach_both_halves_of_muon():
    optimizer = muon_of(parameters(), {"lr": 0.1, "weight_decay": 0.2}, options={"weight_decay": 0.0, "adam_lr": 0.3})
    assert [(g["algorithm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("muon", 0.1, 0.0),
        ("adamw", 0.3, 0.0),
    ]


def test_muon_leaves_parameters_without_gradient_alone():
    params = parameters()
    optimizer = muon_of(params, {"lr": 0.1, "weight_decay": 0.5})
    train(optimizer, params)
    idle = ("layers.0.wide", "norm.weight")
    before = {name: params[name].detach().clone() for name in idle}
    for name in idle:
        params[name].grad = None
    optimizer.step()
    assert all(torch.equal(params[name], before[name]) for name in idle)
    assert int(optimizer.state[params["norm.weight"]]["step"]) == STEPS


def test_states_are_local_tensors_by_name_and_can_be_restored():
    one, two = parameters(), parameters()
    first, second = muon_of(one, {"lr": 0.05}), muon_of(two, {"lr": 0.05})
    train(first, one)
    states = {name: set(first.state[param]) for name, param in one.items()}
    assert states["layers.0.wide"] == {"momentum_buffer"}
    assert states["norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    for param in one.values():
        for key, value in first.state[param].items():
            assert value.shape == (() if key == "step" else param.shape)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name in SHAPES:
        two[name].data.copy_(one[name].data)
    train(first, one)
    train(second, two)
    assert all(torch.equal(one[name], two[name]) for name in SHAPES)


def test_a_zero_gradient_gives_a_zero_update():
    params = {"w": torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))}
    params["w"].grad = torch.zeros(3, 3, dtype=torch.float64)
    muon_of(params, {"lr": 0.1}).step()
    assert torch.equal(params["w"], torch.ones(3, 3, dtype=torch.float64))


def test_a_matrix_is_updated_the_same_in_any_company():
    shapes = {"a": (4, 6), "tall": (6, 4), "b": (4, 6), "large": (70, 65), "large_too": (70, 65), "c": (4, 6)}
    settings = {"lr": 0.05, "weight_decay": 0.1}
    together = parameters(shapes)
    train(muon_of(together, settings), together, shapes)
    for name in shapes:
        alone = {name: parameters(shapes)[name]}
        optimizer = muon_of(alone, settings)
        for grads in gradients(shapes):
            alone[name].grad = grads[name]
            optimizer.step()
        torch.testing.assert_close(together[name], alone[name], rtol=1e-12, atol=1e-13)
