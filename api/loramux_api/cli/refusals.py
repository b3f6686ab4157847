"""What the house refuses, as a click error: one clear sentence on stderr and exit code 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def refused() -> Iterator[None]:
    """Turn the house's own errors into click's; everything else is a bug and keeps its traceback."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        if isinstance(error, _ours()):
            raise click.ClickException(str(error)) from None
        raise


def _ours() -> tuple[type[Exception], ...]:
    from loramux.billing import BillingError
    from loramux.client import LoramuxError
    from loramux.exports import ExportError
    from loramux.gateway import EngineDied, RecordsError
    from loramux.limits import LimitsError
    from loramux.settings import SettingsError
    from loramux.simulator import ScenarioError
    from loramux.tenants import TenantsError

    return (
        LoramuxError,
        SettingsError,
        RecordsError,
        TenantsError,
        LimitsError,
        BillingError,
        ExportError,
        EngineDied,
        ScenarioError,
    )
