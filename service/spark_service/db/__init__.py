"""The one DuckDB file: its owner, its schema, and what is read from and written to it."""
