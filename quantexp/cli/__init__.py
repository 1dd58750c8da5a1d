"""The command line: arguments, verbs, help."""
