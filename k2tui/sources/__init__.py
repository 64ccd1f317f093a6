"""Readers of the live world: NVML, host, log tails, HTTP. They leave store and screen alone."""
