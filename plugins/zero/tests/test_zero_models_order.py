"""What is foreseen of a pass from the last one, and which unit a parameter belongs to; no rank is started."""

from torch import nn

from polyscale.interfaces.parallelism import Part
from polyscale.parameters.inspect import find_parameters
from polyscale_zero.order import VisitOrder
from polyscale_zero.planning import owners


def _visit(order, units):
    foreseen = []
    for unit in units:
        foreseen.append(next(order.upcoming(), None) == unit)
        order.visit(unit)
    order.end()
    return foreseen


def test_the_second_pass_is_foreseen_as_a_whole():
    order = VisitOrder()
    assert not any(_visit(order, [0, 1, 2, 2, 1, 0]))
    assert all(_visit(order, [0, 1, 2, 2, 1, 0]))


def test_another_path_is_found_again_where_it_joins():
    order = VisitOrder()
    _visit(order, [0, 1, 2, 3, 4])
    assert _visit(order, [0, 2, 3, 4]) == [True, False, True, True]
    assert _visit(order, [0, 2, 3, 4]) == [True] * 4
    assert _visit(order, [0, 9, 3, 4]) == [True, False, False, True]
    assert _visit(order, [0, 9, 3, 4]) == [True] * 4


def test_a_pass_without_visits_changes_nothing():
    order = VisitOrder()
    _visit(order, [0, 1])
    order.end()
    assert all(_visit(order, [0, 1]))


def test_what_several_units_hold_belongs_to_the_root():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
    blocks[2][0] = blocks[0][0]  # a module
    blocks[1][1].weight = blocks[0][1].weight  # a parameter
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(2, 2)})
    owner = owners(find_parameters([Part(model)]), [model], list(blocks))
    assert {name for name, unit in owner.items() if unit == -1} == {
        "blocks.0.0.weight",
        "blocks.0.0.bias",
        "blocks.0.1.weight",
        "head.weight",
        "head.bias",
    }
    assert owner["blocks.0.1.bias"] == 0 and owner["blocks.1.0.weight"] == 1 and owner["blocks.2.1.bias"] == 2
