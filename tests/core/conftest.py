"""Property tests judge the code and never the machine: no clock fails them, and every run tries the same examples."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "keepstep",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
settings.load_profile("keepstep")
