"""What the tests of accel-inspect share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long a machine takes says nothing about what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":  # else another conftest has chosen one
    settings.load_profile("patient")
