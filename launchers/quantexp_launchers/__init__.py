"""The launchers, a folder for each kind."""
