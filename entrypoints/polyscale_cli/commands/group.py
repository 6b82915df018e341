"""What every group of commands has in common."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from polyscale.errors import PolyscaleError, nearest

HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """A group that names the nearest command when there is none of the given name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with.

        Raises:
            PolyscaleError: there is none.
        """
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            near = nearest(args[0], names)
            hint = f"Did you mean {near!r}? " if near else ""
            raise PolyscaleError(f"No command {args[0]!r}", fix=f"{hint}Commands: {', '.join(names)}")
        return super().resolve_command(ctx, args)
