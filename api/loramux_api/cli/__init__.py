"""`loramux`: one command, its parts loaded when they are used."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from loramux_api.cli.refusals import refused

COMMANDS = {
    "serve": ("loramux_api.cli.serving:serve", "Serve one base model and everybody's adapters."),
    "demo": ("loramux_demo.cli:demo_command", "See it work: five adapters and the base model in the same batches."),
    "migrate": ("loramux_api.cli.records:migrate", "Bring the database to this release's schema."),
    "tenant": ("loramux_api.cli.tenants:tenant", "Make, list, move and suspend tenants (customers)."),
    "tier": ("loramux_api.cli.tenants:tier", "Levels of service: a scheduler class and a weight."),
    "key": ("loramux_api.cli.keys:key", "Make, list, rotate and revoke API keys."),
    "project": ("loramux_api.cli.people:project", "A tenant's projects."),
    "member": ("loramux_api.cli.people:member", "A tenant's people and their roles."),
    "limit": ("loramux_api.cli.limits:limit", "What tenants, projects and keys may use."),
    "budget": ("loramux_api.cli.limits:budget", "How much they may spend."),
    "audit": ("loramux_api.cli.people:audit", "Who changed what."),
    "price": ("loramux_api.cli.billing:price", "Add price lists, and give them to tenants."),
    "usage": ("loramux_api.cli.exporting:usage", "Close periods, write invoices and exports, and prove them."),
    "adapter": ("loramux_api.cli.adapters:adapter", "Upload, release and retire adapters on a running server."),
    "simulate": (
        "loramux_api.cli.simulating:simulate",
        "Try loads and policies on a model of a device.",
    ),
    "plan": ("loramux_api.cli.planning:plan", "Find the settings and the number of GPUs that a workload needs."),
}


class LazyGroup(click.Group):
    """Imports a command when it is called: `loramux --help` must not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """In the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        """Import it."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        """The list, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, meaning) for name, (_, meaning) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Refusals become one sentence and exit code 1."""
        with refused():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("loramux"), prog_name="loramux")
def main() -> None:
    """Host thousands of customers' LoRA fine-tunes of one base model behind one OpenAI-compatible API.

    \b
    The way in:
      loramux demo                                              see it work
      loramux serve  --config configs/single-node.toml          serve your model
      loramux tenant create acme --config configs/single-node.toml
      loramux key create --tenant acme --config configs/single-node.toml
      loramux adapter push ./my-adapter --name support-bot --key-file key.txt
    """
