"""Sweeps: from the words of a multirun to validated points (`points`), and the list that is kept of them (`record`)."""
