"""The hyper-parameters of a configured optimizer, judged by the factory that will make it: its own and its groups'.

Notable: a factory may have ``check_group(options)``, which knows what cannot differ between groups; without it, a
group's hyper-parameters are checked as the optimizer's own would be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyscale.config.errors import each
from polyscale.config.sections.optimizer import OptimizerSection
from polyscale.errors import PolyscaleError

if TYPE_CHECKING:
    from polyscale.interfaces.optimizer import OptimizerFactory

_PLACE = "optimizer.params"


def wrong_hyper_parameters(section: OptimizerSection, factory: OptimizerFactory) -> list[PolyscaleError]:
    """Return what ``factory`` would refuse, with the path of each, before there is a model."""
    errors = _refused(lambda: factory.check(dict(section.params)))
    told = {str(error) for error in errors}
    check_group = getattr(factory, "check_group", None)
    for index, group in enumerate(section.groups):
        found: list[PolyscaleError] = []
        if check_group is not None:
            found = _refused(lambda options=group.params: check_group(dict(options)))  # type: ignore[misc]
        if not found:
            merged = {**section.params, **group.params}
            found = _refused(lambda merged=merged: factory.check(merged))  # type: ignore[misc]
        errors += [_moved(one, f"optimizer.groups[{index}].params") for one in found if str(one) not in told]
    return errors


def _refused(call: Callable[[], Any]) -> list[PolyscaleError]:
    try:
        call()
    except PolyscaleError as error:
        return list(each(error))
    return []


def _moved(error: PolyscaleError, place: str) -> PolyscaleError:
    """Return ``error`` about the same hyper-parameter at ``place``."""
    if not error.given.startswith(_PLACE):
        return type(error)(f"{place}: {error.given}", why=error.why, fix=error.fix)
    return type(error)(error.given.replace(_PLACE, place, 1), why=error.why, fix=error.fix)
