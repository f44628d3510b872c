"""CheckpointManager: the checkpoints of a run, over months.

``manager`` is the object that a training loop holds. ``when`` and ``keep`` are its policies.

Saving: ``schedule`` decides when to save, from ``agreement`` between the ranks and ``preemption`` (``sigterm``).
``saves`` runs a save. Restoring: ``restores`` runs a restore, ``newest`` finds the newest step that is whole, and
``origin`` finds the run to start from. ``rng`` carries the random generators.

The run's folder: ``run`` opens it after a ``preflight``. ``steps`` knows its steps, from ``step_folder``, ``memory``
and ``facts`` (their manifests), and ``retries`` repeats requests. ``catalog`` answers questions about them.

Retention: ``verdicts`` decides what stays, ``retention`` deletes the rest with ``deletion``, ``deletion_status`` tells
the other ranks, ``active`` knows what is being saved. ``journal`` writes down what happened, and ``history`` shows it.
``run_folder`` looks at a run from outside of the training program; ``uncommitted`` looks at folders without
``.metadata``.
"""

from torch_xla_ckpt.manager import keep, when
from torch_xla_ckpt.manager.history import History, Record
from torch_xla_ckpt.manager.manager import CheckpointManager
from torch_xla_ckpt.manager.run_folder import RunFolder, RunStep
from torch_xla_ckpt.manager.verdicts import Verdict

__all__ = [
    "CheckpointManager",
    "History",
    "Record",
    "RunFolder",
    "RunStep",
    "Verdict",
    "keep",
    "when",
]
