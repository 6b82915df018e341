"""``--require KIND=NAME``: whether scripts can count on a plugin."""

from __future__ import annotations

from dataclasses import dataclass

from polyscale.discovery.missing import unknown
from polyscale.errors import PolyscaleError
from polyscale_cli.report.kinds import OP, parse_kind
from polyscale_cli.report.model import Report

_ANY_CASE = "optimizer"  # as in configurations, which say "Adam" for "adam"


@dataclass(frozen=True)
class Requirement:
    """One plugin that must be usable."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}={self.name}"


def parse_requirement(text: str) -> Requirement:
    """Return the requirement written as ``KIND=NAME``.

    Raises:
        PolyscaleError: it is not of that form, or there is no such kind.
    """
    kind, equals, name = (part.strip() for part in text.partition("="))
    if not (kind and equals and name):
        raise PolyscaleError(
            f"--require {text}", why="it is not of the form KIND=NAME", fix="For instance: --require accelerator=cpu"
        )
    return Requirement(parse_kind(kind), name)


def unmet(requirement: Requirement, report: Report) -> str:
    """Why the required plugin cannot be used; "" when it can."""
    if requirement.kind == OP:
        reasons = [(row.name, row.why) for row in report.ops or []]
    else:
        reasons = [(row.name, row.why) for row in report.plugins[requirement.kind]]
    wanted = requirement.name
    if requirement.kind == _ANY_CASE:
        reasons, wanted = [(name.lower(), why) for name, why in reasons], wanted.lower()
    found = [why for name, why in reasons if name == wanted]
    if not found:
        return str(unknown(requirement.kind, requirement.name))
    return next(filter(None, found), "")
