"""Stored data: rows in SQL, files in a folder or an object store."""
