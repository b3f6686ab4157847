"""Rows: the schema, its migrations, and the repositories that hold every SQL statement.

One aggregate, one module (`tenants`, `credentials`, `limits`, ...): first its rows (`...Row`, subclasses of
`base.Base`), then the structs that only its services use (those that go further are in `data.entities`), then its
repositories (subclasses of `base.Repository`), which take a session and never commit. `schema` imports every module
that declares tables. `base` has the SQL that several repositories share, `database` the transactions, locks and leases.
"""
