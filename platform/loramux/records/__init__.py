"""The tables and every SQL statement; the only package that knows SQLAlchemy."""
