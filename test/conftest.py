"""Eight virtual CPU devices, set up before torch_xla is imported, and settings for property tests."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from support import devices

devices.set_up()

# No deadline: the first example of a property pays for compiling. Derandomised: CI fails on what was changed.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("ci"), max_examples=10)
settings.load_profile("ci")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the devices first: torch's autograd engine counts them when backward first runs, also on the host."""
    if session.config.getoption("numprocesses", None):
        return  # this process only hands tests to the workers
    import torch_xla.runtime as xr

    xr.use_spmd()
    xr.global_runtime_device_count()


@pytest.fixture(autouse=True)
def collector_stays_on() -> Iterator[None]:
    """Fail a test that turns the garbage collector off for the tests after it. They would keep all device tensors."""
    yield
    off = not gc.isenabled()
    gc.enable()
    assert not off, "the test has left Python's garbage collector turned off"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of slow tests: several files run at a time, and the last ones to end should be quick."""
    quick = {item.path for item in items if item.get_closest_marker("slow") is None}
    items.sort(key=lambda item: item.path in quick)
