"""Settings for all tests."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from eval import server
from tests import forked_servers

# A deadline measures the machine, not the code; shared CI machines pause for seconds.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: their files take minutes, so that one left over would have a core idle. Before
    them the longest file of all.

    Files keep together (a file's tests share servers); the sort is stable.
    """
    serving = {item.path for item in items if item.get_closest_marker("server")}
    longest = Path(__file__).parent / "emulated" / "test_serving.py"
    items.sort(key=lambda item: (item.path != longest, item.path not in serving))


@pytest.fixture(scope="session", autouse=True)
def _fork_servers() -> Iterator[None]:
    """Servers start within seconds."""
    with mock.patch.object(server, "start", forked_servers.start):
        yield


@pytest.fixture(scope="module", autouse=True)
def _as_users_do(request: pytest.FixtureRequest, _fork_servers: None) -> Iterator[None]:
    """But for files that want them as users have them."""
    wanted = getattr(request.module, "AS_USERS_DO", False)
    with mock.patch.object(
        server, "start", forked_servers.start_as_users_do if wanted else server.start
    ):
        yield
