"""`loramux`: one command. Subcommands are imported when they are used, because torch takes seconds to import."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from loramux_api.cli.common import errors_as_sentences

COMMANDS = {
    "serve": ("loramux_api.cli.serving:serve", "Serve base models and their adapters."),
    "demo": ("loramux_demo.cli:demo_command", "Run the demo: six adapters and the base model in the same batches."),
    "init": ("loramux_api.cli.serving:init", "Write settings for a first server."),
    "migrate": ("loramux_api.cli.serving:migrate", "Upgrade the database to this release's schema."),
    "tenant": ("loramux_api.cli.tenants:tenant", "Create, list, move and suspend tenants (customers)."),
    "tier": ("loramux_api.cli.tenants:tier", "Manage service tiers: a scheduler class and a weight."),
    "project": ("loramux_api.cli.tenants:project", "Manage a tenant's projects."),
    "key": ("loramux_api.cli.access:key", "Create, list, rotate and revoke API keys."),
    "member": ("loramux_api.cli.access:member", "Manage a tenant's members and their roles."),
    "audit": ("loramux_api.cli.access:audit", "Read the audit log."),
    "limit": ("loramux_api.cli.tenants:limit", "Limit the rates of tenants, projects and keys."),
    "budget": ("loramux_api.cli.tenants:budget", "Limit the spending of tenants, projects and keys."),
    "price": ("loramux_api.cli.billing:price", "Add price lists, and assign them to tenants."),
    "usage": ("loramux_api.cli.billing:usage", "Close months, write invoices and exports, and verify the ledger."),
    "adapter": ("loramux_api.cli.adapters:adapter", "Upload, release and delete adapters on a running server."),
    "batch": ("loramux_api.cli.batches:batch", "Run files of requests on a running server when there is room."),
    "finetune": ("loramux_api.cli.training:finetune", "Fine-tune adapters on a running server."),
    "trainer": ("loramux_api.cli.training:trainer", "Run the fine-tuning jobs of a server, here or elsewhere."),
    "base": ("loramux_api.cli.fleet:base", "Add, list, retire and migrate base models."),
    "fleet": ("loramux_api.cli.fleet:fleet", "Show, drain and restart a running server's engines."),
    "engine": ("loramux_api.cli.fleet:engine", "Serve one engine for servers on other machines."),
    "measure": ("loramux_api.cli.measuring:measure", "Measure this machine for `plan` and `simulate`."),
    "simulate": ("loramux_api.cli.simulating:simulate", "Simulate the scheduler on a model of a device."),
    "plan": ("loramux_api.cli.planning:plan", "Find the settings and the number of GPUs for a workload."),
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Return the names in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  click's signature
        """Import the command, and return it."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name][0].split(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        """Write the list without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, meaning) for name, (_, meaning) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Known errors become one sentence and exit code 1."""
        with errors_as_sentences():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("loramux"), prog_name="loramux")
def main() -> None:
    """Host thousands of customers' LoRA fine-tunes behind one OpenAI-compatible API.

    \b
    First steps:
      loramux demo                                              try it
      loramux serve ./model                                     serve your model
      loramux tenant create acme
      loramux key create --tenant acme
      loramux adapter push ./my-adapter --name support-bot --key-file key.txt
    """
