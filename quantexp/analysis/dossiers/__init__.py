"""Looks at the dossiers of a run: what moved before something went wrong."""
