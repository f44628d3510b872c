"""Runs of a CheckpointManager: a small state for each step, and which step comes back."""

import torch


def state(n):
    return {"t": torch.full((20,), float(n)), "n": n}


def fill(manager, *steps):
    """Save some steps, and close the manager."""
    with manager:
        for step in steps:
            manager.save(step, state(step), force=True)


def save_steps(manager, *steps, **how):
    """Save some steps, and wait for them and for retention. The manager stays open."""
    for step in steps:
        assert manager.save(step, state(step), force=True, **how)
    manager.wait()


def newest(reader):
    """What ``restore_latest`` restores, which must be of one step."""
    target = state(-1)
    step = reader.restore_latest(target)
    assert step is None or (target["n"] == step and target["t"].eq(step).all())
    return step
