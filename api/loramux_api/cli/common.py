"""Options, output and error handling that the commands share."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from loramux.common.settings.file import load_settings
from loramux_api.cli.default_server import default_config

if TYPE_CHECKING:
    from loramux.accounts.tenants.account import Account
    from loramux.accounts.tenants.entities import Tenant
    from loramux.accounts.tenants.tenants import Tenants
    from loramux.money.limits.limits import Limits
    from loramux.server.platform import BillingServices

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

CONFIG_HELP = "Settings file. `loramux init` writes one."
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."
)
tenant_option = click.option("--tenant", "tenant_name", required=True, help="Tenant name.")
period_option = click.option("--period", required=True, metavar="YYYY-MM", help="Calendar month, UTC.")


def config_option(*, required: bool = True) -> Callable[[Command], Command]:
    """Return the option --config. Its default is LORAMUX_CONFIG, or else the settings of `loramux serve MODEL`.

    Without `required`, the command gets None if the file does not exist.
    """

    def or_default(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
        if value is not None or default_config().is_file():
            return value or default_config()
        if not required or context.resilient_parsing:
            return None
        raise click.MissingParameter(
            "`loramux init` writes a settings file, and after `loramux serve MODEL` none is needed "
            f"({default_config()} does not exist).",
            ctx=context,
            param=parameter,
        )

    return click.option(
        "--config",
        "config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="LORAMUX_CONFIG",
        show_envvar=True,
        callback=or_default,
        help=f"{CONFIG_HELP} Default: that of `loramux serve MODEL`.",
    )


class CommandGroup(click.Group):
    """A group whose help has the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands; click's own cuts their sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
            )


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as aligned columns below their heads; an empty text without rows.

    None and an empty text are shown as `-`.
    """
    cells = [["-" if cell is None else str(cell) or "-" for cell in row] for row in rows]
    if not cells:
        return ""
    cells.insert(0, list(heads))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def put(as_json: bool, data: Any, text: str) -> None:
    """Print the command's result, as JSON or as text."""
    click.echo(msgspec.json.encode(data).decode() if as_json else text)


def note(as_json: bool, text: str) -> None:
    """Print a remark on stderr; with --json, print nothing."""
    if not as_json:
        click.echo(text, file=sys.stderr)


def day(microseconds: int | None) -> str:
    """Return the date of a time stamp, `-` for None."""
    return "-" if microseconds is None else datetime.fromtimestamp(microseconds / 1e6, UTC).date().isoformat()


def with_tenants(config: Path, act: Callable[[Tenants], Awaitable[T]]) -> T:
    """Open the records of `config`, run `act` and close them. Operators' commands need no running server."""
    from loramux.server.platform import open_tenants

    settings = load_settings(config)

    async def run() -> T:
        async with open_tenants(settings) as tenants:
            return await act(tenants)

    return asyncio.run(run())


def with_account(config: Path, tenant_name: str, act: Callable[[Account], Awaitable[T]]) -> T:
    """Run `act` on one tenant's keys, projects and members. Raises TenantNotFound."""

    async def run(tenants: Tenants) -> T:
        return await act(await tenants.account(tenant_name))

    return with_tenants(config, run)


def with_limits(config: Path, tenant_name: str, act: Callable[[Limits, Tenant], Awaitable[T]]) -> T:
    """Run `act` on one tenant and its limits. Raises TenantNotFound."""
    from loramux.money.billing.catalog import PlanPrices
    from loramux.money.limits.limits import Limits

    async def run(tenants: Tenants) -> T:
        limits = Limits(tenants.changes, PlanPrices(tenants.changes.database))
        return await act(limits, await tenants.named(tenant_name))

    return with_tenants(config, run)


def with_billing(config: Path, act: Callable[[BillingServices], Awaitable[T]]) -> T:
    """Run `act` on the billing services of `config`'s database."""
    from loramux.server.platform import open_billing

    settings = load_settings(config)

    async def run() -> T:
        async with open_billing(settings) as desk:
            return await act(desk)

    return asyncio.run(run())


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn known errors into click errors: one sentence on stderr, exit code 1. Bugs keep their traceback.

    Ctrl-C ends a command quietly, with the exit code of its signal.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        if isinstance(error, _known_errors()):
            raise click.ClickException(" ".join(str(error).split())) from None
        raise


def _known_errors() -> tuple[type[Exception], ...]:
    from loramux.common.errors import LoramuxError
    from loramux.common.settings.file import SettingsError
    from loramux.engine.client import EngineDied
    from loramux.simulator.scenario import ScenarioError
    from loramux_client import ClientError

    return (LoramuxError, ClientError, EngineDied, SettingsError, ScenarioError)
