"""The command line and the report it writes."""
