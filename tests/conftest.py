"""Settings for all tests."""

from hypothesis import settings

# A deadline measures the machine, not the code; shared CI machines pause for seconds.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
