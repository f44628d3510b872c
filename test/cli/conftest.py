"""Checkpoints of every kind, made once for all tests of this folder."""

import pytest

from support import kinds


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A checkpoint of every kind, by name, and a run; no test changes them."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, save in kinds.CHECKPOINTS.items():
        save(folder / name)
    kinds.save_run(folder / "run")
    return folder
