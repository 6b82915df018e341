"""What is done with a hard model in one step, and with which model."""

import dataclasses
import functools

import torch
from torch import nn
from zero_models import (
    CalledOften,
    CollectingNet,
    EmptyBlocks,
    FirstBlocks,
    Frozen,
    GivesWeights,
    InPlaceInside,
    InPlaceOutside,
    ModelReturning,
    Nested,
    Net,
    OddSizes,
    OneElement,
    Paths,
    Recomputed,
    RecurrentNet,
    ReturningNet,
    SharedModule,
    TiedEnds,
    TwoHeads,
)


@dataclasses.dataclass
class Place:
    """Where a scenario stands: ``call`` is the model, ``module`` its modules, ``x`` this rank's input."""

    call: object
    module: nn.Module
    backward: object
    step: int
    rank: int
    x: torch.Tensor

    def loss(self, output):
        return (output - 1).square().mean()

    def run(self, *args, **kwargs):
        self.backward(self.loss(self.call(self.x, *args, **kwargs)))


# What is done with a model in one step.


def simply(place):
    place.run()


def heads_in_turn(place):
    place.run(place.step % 2)


def a_head_on_one_rank(place):
    place.run(place.rank)


def with_gradient_of_the_input(place):
    place.x.requires_grad_()
    place.run()
    assert place.x.grad is not None and float(place.x.grad.abs().sum()) > 0


def two_forwards_then_two_backwards(place):
    losses = [place.loss(place.call(place.x * factor)) for factor in (1.0, 0.5)]
    for loss in losses:
        place.backward(loss)


def backwards_in_the_other_order(place):
    losses = [place.loss(place.call(place.x * factor)) for factor in (1.0, 0.5)]
    for loss in reversed(losses):
        place.backward(loss)


def gradient_of_the_input_first(place):
    """Twice backward over one graph: once for the input alone, keeping the graph."""
    place.x.requires_grad_()
    loss = place.loss(place.call(place.x))
    for _ in range(2):
        (slope,) = torch.autograd.grad(loss, place.x, retain_graph=True)
    assert float(slope.abs().sum()) > 0
    place.backward(loss)


def eval_between(place):
    loss = place.loss(place.call(place.x))
    for _ in range(2):
        with torch.no_grad():
            place.call(place.x * 2)
    place.backward(loss)


def no_grad_first(place):
    with torch.no_grad():
        target = place.call(place.x)
    place.backward((place.call(place.x) - 2 * target).square().mean())


def thrown_away(place):
    place.call(place.x)
    place.run()


def freezes_afterwards(place):
    if place.step == 1:
        place.module.blocks[1].up.requires_grad_(False)
        place.module.head.bias.requires_grad_(False)
    place.run()


def other_paths(place):
    place.run([(0, 1, 2), (2, 1, 0), (1, 1, 2), (0, 1, 2), (2,)][place.step])


def takes_pairs(place):
    output = place.call(place.x).second
    place.backward(place.loss(output() if callable(output) else output))


def pairs_with_eval_between(place):
    output = place.call(place.x).second
    with torch.no_grad():
        place.call(place.x)
    place.backward(place.loss(output() if callable(output) else output))


def adds_a_penalty_of_the_root(place):
    output = place.call(place.x)
    penalty = place.module.head.weight.square().sum() + place.module.first.bias.abs().sum()
    place.backward(place.loss(output) + 0.1 * penalty)


SCENARIOS = {
    "two heads in turn": (TwoHeads, heads_in_turn),
    "a head idle on one rank": (TwoHeads, a_head_on_one_rank),
    "odd sizes": (OddSizes, simply),
    "units without elements": (EmptyBlocks, simply),
    "one element": (OneElement, simply),
    "called often": (CalledOften, simply),
    "two forwards then two backwards": (Net, two_forwards_then_two_backwards),
    "backwards in the other order": (CalledOften, backwards_in_the_other_order),
    "gradient of the input": (Net, with_gradient_of_the_input),
    "one graph twice": (CalledOften, gradient_of_the_input_first),
    "one graph twice with two inputs": (functools.partial(ReturningNet, "tuple"), gradient_of_the_input_first),
    "eval between forward and backward": (Net, eval_between),
    "no_grad first": (Net, no_grad_first),
    "a forward that is thrown away": (Net, thrown_away),
    "frozen afterwards": (Net, freezes_afterwards),
    "other paths at some steps": (Paths, other_paths),
    "a module in two units": (SharedModule, simply),
    "a weight of the first and the last unit": (TiedEnds, simply),
    "in place on outputs": (InPlaceOutside, simply),
    "in place on inputs": (InPlaceInside, simply),
    "the model returns a dataclass": (functools.partial(ModelReturning, "dataclass"), takes_pairs),
    "the model returns an object": (functools.partial(ModelReturning, "object"), takes_pairs),
    "an object, eval between": (functools.partial(ModelReturning, "object"), pairs_with_eval_between),
    "no layer before the units": (FirstBlocks, simply),
    "nested lists of blocks": (Nested, simply),
    "LSTM": (RecurrentNet, simply),
    "a loss on weights of the root": (Net, adds_a_penalty_of_the_root),
    "weights as arguments": (GivesWeights, simply),
    "lists and dicts as arguments": (CollectingNet, simply),
    **{
        f"units return {how}": (functools.partial(ReturningNet, how), simply)
        for how in (
            "tuple",
            "dict",
            "dataclass",
            "object",
            "views",
            "arguments",
            "own parameter",
            "view of its parameter",
        )
    },
    **{
        f"frozen: {what}": (functools.partial(Frozen, what), simply)
        for what in ("a part of each block", "a block", "the beginning", "all but adapters")
    },
}
RECOMPUTES = {
    f"{'reentrant' if reentrant else 'non-reentrant'} recompute: {what}": (
        functools.partial(Recomputed, what, reentrant),
        simply,
    )
    for what in ("block twice", "all", "part", "part twice")
    for reentrant in (True, False)
}
ALL = SCENARIOS | RECOMPUTES
MORE_STEPS = {"other paths at some steps": 5}
