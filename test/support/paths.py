"""Where the checkout lies, and environment variables for child processes that import from it."""

import functools
import os
import subprocess
from pathlib import Path

from support.devices import VARIABLES

TEST = Path(__file__).resolve().parents[1]
ROOT = TEST.parent


@functools.cache
def newer_python() -> str:
    """Return the Python of an environment with the newest torch, click and rich, without torch_xla and matplotlib."""
    done = subprocess.run([ROOT / "scripts" / "env", "newer"], stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0, "scripts/env newer failed"
    return done.stdout.strip()


def environment(**added: str) -> dict[str, str]:
    """Return environment variables for a child that imports ``torch_xla_ckpt`` and ``support``.

    They are this process's, and if they do not say which devices torch_xla uses, then the eight virtual ones.

    Args:
        added: further variables, which replace those of the same name.
    """
    return {**VARIABLES, **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TEST)]), **added}
