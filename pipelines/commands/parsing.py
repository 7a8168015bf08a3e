"""What holds for the words of every command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from schemas.console import events
from schemas.errors import UsageError

__all__ = ["Command"]


class Command(TyperCommand):
    """A command none of whose arguments and options takes an empty value.

    An empty value mostly comes from a shell variable that is not set, and would otherwise stand for the current folder, or for
    everything.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command.

        Raises:
            UsageError: a value that was given is empty.
        """
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            output = ctx.params.get("output")
            events.record(command=self.name, output=None if output is None else str(output))
            for parameter in self.params:
                source = ctx.get_parameter_source(parameter.name)
                if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):  # A file may hold an empty list.
                    _refuse_empty(parameter, ctx.params.get(parameter.name))
        return rest


def _refuse_empty(parameter: Any, value: object) -> None:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str) and not item.strip(" \t\n,"):
            is_option = parameter.param_type_name == "option"
            name = parameter.opts[0] if is_option else parameter.metavar or parameter.name.upper()
            advice = ", or leave the option out for its default" if is_option else ""
            raise UsageError(f"{name} is {item!r}, expected a value: check the shell variable that it comes from{advice}")
