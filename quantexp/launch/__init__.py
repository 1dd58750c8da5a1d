"""From an experiment to a run: identity, attempts, reuse, refusals, and the ledger."""
