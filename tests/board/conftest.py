"""Property tests on a shared machine: slow drawing is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("k2tui", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("k2tui")
