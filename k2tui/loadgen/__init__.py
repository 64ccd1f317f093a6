"""The benchmark client: its own process, true stamps."""
