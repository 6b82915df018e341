"""What the optimizer factories share: hyper-parameters are checked against a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polyscale_standard.optimizers import hyper


class TableFactory:
    """Base of factories whose hyper-parameters stand in a table.

    Attributes:
        name: the plugin's name.
        hypers: name of a hyper-parameter -> its default and what it may be.
    """

    name: str
    hypers: ClassVar[Mapping[str, hyper.Hyper]]

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
        """
        return hyper.check(self.name, self.hypers, params)

    def check_group(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of one parameter group, only those given.

        Raises:
            ConfigError: one is unknown, out of range, or holds for the whole optimizer only.
        """
        return hyper.check_group(self.name, self.hypers, options)
