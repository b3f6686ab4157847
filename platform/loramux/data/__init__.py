"""What is kept: rows in SQL, files in a folder or an object store."""
