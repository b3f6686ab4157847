"""Rows: the schema, its migrations, and the repositories that hold every SQL statement.

Each aggregate has one module (`tenants`, `credentials`, `limits`, ...). It has first the rows (`...Row`, subclasses of
`base.Base`), then the structs that only its services use (other structs are in `data.entities`), then the repositories
(subclasses of `base.Repository`). Repositories take a session and never commit. `schema` imports every module that
declares tables. `base` has the SQL that several repositories share, `database` the transactions,
`leases` the holds of servers on rows.
"""
