"""Benchmarks, each a program of its own.

- ``async_saves``: what an async save costs a training loop, beside torch_xla's ``CheckpointManager.save_async``
- ``storage``: the time and memory of saving and loading, beside torch_xla's planners, bare copies and Orbax
- ``planning``: the time of planning and of the proof of an exact cover, beside DCP's own validation
- ``looking``: the commands of ``xc`` on large checkpoints
- ``compare_torch_xla``: which states the planners of torch_xla and of this package restore, lose or refuse
"""
