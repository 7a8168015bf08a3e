"""Processes: resources, shutdown, and commands as steps."""
