"""Orbax, which saves and loads the same number of arrays of the same size, for ``scripts/benchmarks/storage``.

Run with the Python of ``scripts/env orbax``. Each line of the input is a JSON list of a command and its arguments. The
program prints a line when it has carried out the command. The benchmark measures the time between the two.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import json
import logging
import sys
from typing import Any

import jax  # type: ignore[import-not-found]
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-not-found]
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # type: ignore[import-not-found]
from orbax.checkpoint._src.serialization import tensorstore_utils  # type: ignore[import-not-found]


class Arrays:
    """The arrays, with one method for each command.

    Args:
        tensors: the number of arrays.
        shape: the shape of each array.
    """

    def __init__(self, tensors: int, shape: tuple[int, ...]):
        generator = np.random.default_rng(0)
        self._wanted = {f"t{n}": generator.random(shape, dtype=np.float32) for n in range(tensors)}
        self._state: dict[str, Any] = {}
        self._checkpointer = ocp.StandardCheckpointer()

    def make(self, *mesh: int) -> None:
        """Put the arrays on the devices."""
        self._state = jax.device_put(self._wanted, tiled(mesh))
        jax.block_until_ready(self._state)

    def save(self, folder: str) -> None:
        self._checkpointer.save(folder, self._state)
        self._checkpointer.wait_until_finished()

    def load(self, folder: str, *mesh: int) -> None:
        target = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=tiled(mesh)) for k, v in self._wanted.items()}
        self._state = self._checkpointer.restore(folder, target)
        jax.block_until_ready(self._state)

    def drop(self) -> None:
        """Remove the arrays from the devices."""
        self._state = {}

    def check(self, *mesh: int) -> None:
        """Compare every shard on every device."""
        for key, wanted in self._wanted.items():
            assert self._state[key].sharding == tiled(mesh), f"Orbax has loaded {key} with another sharding"
            for shard in self._state[key].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), wanted[shard.index]), (
                    f"Orbax has loaded wrong values for {key}"
                )


def tiled(mesh: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(mesh), ("x", "y")), PartitionSpec("x", "y"))


def do_not_sync() -> None:
    """Save without fsync, as all other sides do. Orbax has no option for that."""
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context["file_io_sync"] = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tensors", type=int)
    parser.add_argument("shape", type=int, nargs="+")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    do_not_sync()
    arrays = Arrays(options.tensors, tuple(options.shape))
    print(f"Orbax {ocp.__version__}, JAX {jax.__version__}", flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        getattr(arrays, command)(*arguments)
        print("done", flush=True)


if __name__ == "__main__":
    main()
