"""CheckpointManager: the checkpoints of a run, over months.

``manager`` is the object that a training loop holds; ``when`` and ``keep`` are the policies it is given: when to save,
and what to keep. ``steps`` knows what lies in the run's folder, ``newest`` restores the newest step, ``retention``
deletes, ``journal`` remembers. ``agreement`` lets processes agree on when to save and stop, ``preemption`` listens to
SIGTERM, ``rng`` carries the random generators.
"""

from torch_xla_ckpt.manager import keep, when
from torch_xla_ckpt.manager.journal import History, Record
from torch_xla_ckpt.manager.manager import CheckpointManager
from torch_xla_ckpt.manager.retention import Verdict

__all__ = [
    "CheckpointManager",
    "History",
    "Record",
    "Verdict",
    "keep",
    "when",
]
