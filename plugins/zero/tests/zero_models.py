"""Models that are hard to spread over ranks, most of three blocks that become units, all of them small."""

import dataclasses
import types
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 5, 3


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Net(nn.Module):
    """An inner layer, three blocks (units), a head."""

    block = Block

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Modules that stand in the way of a simple spreading.


def _to_nothing(width):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Initializing zero-element tensors is a no-op"
        return nn.Linear(width, 0)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Block()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.trunk(x))


class OddSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(size)) for size in (8, 0, 24)])
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(WIDTH, 2)
        self.nothing = _to_nothing(2)

    def forward(self, x):
        output = self.layer(x) * self.scalar + sum(part.sum() for part in self.parts)
        return output + self.nothing(output).sum()


class EmptyBlock(nn.Module):
    """A unit without an element."""

    def __init__(self):
        super().__init__()
        self.inner = _to_nothing(WIDTH)

    def forward(self, x):
        return x * 1.5 + self.inner(x).sum()


class EmptyBlocks(Net):
    block = EmptyBlock


class OneElement(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.only


class Recomputed(nn.Module):
    """``what`` is recomputed: a "block" twice, "all" blocks, a "part" of each, a "part twice"."""

    def __init__(self, what, reentrant):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(RecomputedPart(what, reentrant) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.what, self.reentrant = what, reentrant

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.what == "all":
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            elif self.what == "block twice" and number == 1:
                for _ in range(2):
                    x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x)


class RecomputedPart(Block):
    def __init__(self, what, reentrant):
        super().__init__()
        self.what, self.reentrant = what, reentrant

    def part(self, x):
        return torch.tanh(self.down(torch.tanh(self.up(x)))) * self.scale

    def forward(self, x):
        if not self.what.startswith("part"):
            return x + self.part(x)
        for _ in range(2 if self.what == "part twice" else 1):
            x = x + checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.up(x)[:, :WIDTH]


class CalledOften(Net):
    def forward(self, x):
        x = self.first(x)
        for number in (0, 1, 0, 0, 2, 1):
            x = self.blocks[number](x)
        return self.head(x)


class Paths(Net):
    """Runs its blocks in another order at some steps, all ranks alike."""

    def forward(self, x, order):
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


class SharedModule(Net):
    """Blocks 0 and 2 hold one Linear; block 1's weight is another name of block 0's other weight."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].down.weight = self.blocks[0].down.weight


class TiedEnds(nn.Module):
    """The first and the last block hold the embedding's matrix."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Embed(), *(Ring() for _ in range(2)), Embed()])
        self.layers[3].table.weight = self.layers[0].table.weight

    def forward(self, x):
        x = self.layers[0](x)
        x = self.layers[2](self.layers[1](x))
        return self.layers[3](x)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.table(x)


class Ring(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return self.inner(x)


class InPlaceOutside(Net):
    """Writes into what a unit returned, a view too."""

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = x.view(-1) if number == 1 else x
            x += 1.0
            x = x.view(ROWS, WIDTH)
            x[:, 0].mul_(0.5)
        return self.head(x)


class InPlaceBlock(Block):
    """Writes into what it was given and returns it."""

    def forward(self, x):
        first = x * 1.0
        x.add_(self.down(torch.tanh(self.up(first))) * self.scale)
        x[0] += 1.0
        return x


class InPlaceInside(Net):
    block = InPlaceBlock


@dataclasses.dataclass
class Pair:
    first: object
    second: object


class Returning(Block):
    """Returns its result in a container of kind ``how``."""

    how = "tensor"

    def forward(self, *args, **kwargs):
        x, y = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        x, y = super().forward(x), y * self.scale
        match self.how:
            case "tuple":
                return x, None, (y, "text")
            case "dict":
                return {"x": x, "none": None, "y": [y]}
            case "dataclass":
                return Pair(x, Pair(None, y))
            case "object":
                return types.SimpleNamespace(x=x, deep=types.SimpleNamespace(y=y))
            case "views":
                return torch.cat([x, y]).chunk(2)
            case "arguments":
                return x, y
            case "own parameter":
                return x, self.scale
            case "view of its parameter":
                return x, self.up.weight[:ROWS], y


class ReturningNet(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Returning() for _ in range(3))
        for block in self.blocks:
            block.how = how
        self.head = nn.Linear(WIDTH, 2)
        self.how = how

    def forward(self, x):
        x = self.first(x)
        y = torch.sin(x)
        for block in self.blocks:
            match self.how:
                case "tuple":
                    x, _, (y, _) = block(x, y)
                case "dict":
                    found = block(x, y=y)
                    x, y = found["x"], found["y"][0]
                case "dataclass":
                    found = block(x, y)
                    x, y = found.first, found.second.second
                case "object":
                    found = block(x=x, y=y)
                    x, y = found.x, found.deep.y
                case "views" | "arguments":
                    x, y = block(x=x, y=y) if self.how == "arguments" else block(x, y)
                case "own parameter":
                    x, scale = block(x, y)
                    y = y + scale.square() * 0.1
                case "view of its parameter":
                    x, weight, y = block(x, y)
                    y = y * weight
        return self.head(x + y)


class ModelReturning(Net):
    """The model itself returns a dataclass, or an object that torch cannot look into."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        output = super().forward(x)
        return Pair(None, output) if self.kind == "dataclass" else Hidden(output)


class Hidden:
    """Only calls it to get at the tensor."""

    __slots__ = ("second",)

    def __init__(self, tensor):
        self.second = lambda: tensor


class Frozen(Net):
    """Freezes ``what`` before training."""

    def __init__(self, what):
        super().__init__()
        match what:
            case "a part of each block":
                for block in self.blocks:
                    block.up.requires_grad_(False)
            case "a block":
                self.blocks[1].requires_grad_(False)
            case "the beginning":
                self.first.requires_grad_(False)
                self.blocks[0].requires_grad_(False)
            case "all but adapters":
                self.requires_grad_(False)
                for block in self.blocks:
                    block.down = Adapter(block.down)


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class FirstBlocks(nn.Module):
    """Nothing before the units: the first one's input has no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Nest(nn.Module):
    """A block that holds a list of blocks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.experts[0](x) + self.experts[1](torch.sigmoid(self.gate(x)))


class Nested(Net):
    block = Nest


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x[None])[0][0]


class RecurrentNet(Net):
    block = Recurrent

    def __init__(self):
        super().__init__()
        self.first = Recurrent()


class Collecting(Block):
    """Is given a list and a dict, uses what is in them and writes into them."""

    def forward(self, pair, found, info):
        assert pair[0] is pair[1], "one tensor stays one"
        x = super().forward(pair[0] + info["last"] * 0.5)
        found.append(x)
        info["last"] = x
        return x


class CollectingNet(Net):
    block = Collecting

    def forward(self, x):
        x = self.first(x)
        found, info = [torch.sin(x)], {"last": torch.cos(x)}
        for block in self.blocks:
            x = block((x, x), found, info=info)
        assert len(found) == 4 and info["last"] is found[-1]
        return self.head(sum(found))


class GivesWeights(Net):
    """Parameters of the root are given to units as arguments, and used with functional calls."""

    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x, weight):
            return self.norm(x) + self.own(x) + nn.functional.linear(x, weight)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.first.weight)
        return self.head(x)
