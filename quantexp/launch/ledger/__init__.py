"""What has become of runs: asked of the scheduler, read from their folders, shown, and ended on request."""
