"""Settings for all tests."""

import pytest
from hypothesis import settings

# A deadline measures the machine, not the code; shared CI machines pause for seconds.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: their files take minutes, so that one left over would have a core idle.

    Files keep together (a file's tests share servers); the sort is stable.
    """
    serving = {item.path for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: item.path not in serving)
