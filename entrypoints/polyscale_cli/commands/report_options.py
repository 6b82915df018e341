"""Options of the report, and reading them without the command-line framework, which takes a tenth of a second to
import: that is longer than ``--list`` takes, and much of what the report may take beyond importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyscale_cli.report.kinds import parse_kind
from polyscale_cli.report.requirements import Requirement, parse_requirement


@dataclass(frozen=True)
class ReportOptions:
    """What is asked of the report.

    Attributes:
        json: for programs.
        names: only names, without importing any plugin.
        kind: only this kind; None: all.
        require: plugins that must be usable.
    """

    json: bool = False
    names: bool = False
    kind: str | None = None
    require: tuple[Requirement, ...] = ()

    @property
    def kinds(self) -> set[str] | None:
        """Kinds to collect; None: all. What is only required needs no more than its own kind."""
        if self.kind is not None:
            return {self.kind, *(each.kind for each in self.require)}
        if self.require and not self.json:
            return {each.kind for each in self.require}
        return None


def quick_options(arguments: Sequence[str]) -> ReportOptions | None:
    """Options that ``arguments`` spell plainly; None for anything else, help and mistakes included.

    Raises:
        PolyscaleError: a bad kind or requirement.
    """
    flags: set[str] = set()
    values: dict[str, list[str]] = {"--kind": [], "--require": []}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word in ("--json", "--list"):
            flags.add(word)
        elif name in values and equals:
            values[name].append(value)
        elif word in values and (following := next(words, None)) is not None:
            values[word].append(following)
        else:
            return None
    return ReportOptions(
        json="--json" in flags,
        names="--list" in flags,
        kind=parse_kind(values["--kind"][-1]) if values["--kind"] else None,
        require=tuple(map(parse_requirement, values["--require"])),
    )
