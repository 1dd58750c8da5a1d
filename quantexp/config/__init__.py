"""From words on the command line to a validated experiment."""
