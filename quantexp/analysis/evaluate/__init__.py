"""The numbers, tables and figures of `quantexp evaluate`."""
