"""The sweep ledger: reads run status from folders, locks and the scheduler, shows it, and cancels runs."""
