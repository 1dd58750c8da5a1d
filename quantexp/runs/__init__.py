"""One run folder on disk: paths, status, lock, fencing, ranks, metrics, source snapshot, provenance."""
