"""The command line: one-machine fleets and single services."""
