"""Questions about checkpoints and runs: what they hold, whether they are whole, and how two of them differ.

Each question is a function that returns a frozen dataclass, which ``print`` shows as text. Nothing here needs
torch_xla, a process group, a device, or the command line's packages. No code from a file runs, and only the bytes that
a question needs are read.

``opening`` finds what a path names, and ``step_names`` knows ``RUN/latest`` and ``RUN/best``. ``contents`` lists keys
and steps, with ``folding`` and ``trees``. ``values`` shows one key: ``slices`` are parsed, ``selecting`` and
``reading`` read them (``locating`` helps), and ``statistics``, ``objects`` and ``layouts`` (from ``shardings``)
describe them. ``checking`` finds damage, and ``diffing`` differences, by the ``equality`` of bits. ``explaining``
plans a load onto other ``meshes``, and into the ``targets`` that ``matching`` compares; ``overheads`` counts bytes
beside elements. ``reporting`` collects what a page shows, and ``pages`` writes it as HTML, with ``treemaps``. Two
functions change files: ``pruning`` deletes steps of a run, and ``converting`` rewrites a checkpoint. ``words``
describes shapes, and ``text`` is safe for terminals.
"""

from torch_xla_ckpt.inspecting.checking import Check, Checks, check, require_checked
from torch_xla_ckpt.inspecting.contents import Contents, RunContents, inspect
from torch_xla_ckpt.inspecting.converting import Conversion, convert
from torch_xla_ckpt.inspecting.diffing import Difference, KeyDifference, diff
from torch_xla_ckpt.inspecting.explaining import Explanation, ProcessPlan, TensorPlan, explain
from torch_xla_ckpt.inspecting.layouts import Layout
from torch_xla_ckpt.inspecting.matching import KeyChange
from torch_xla_ckpt.inspecting.objects import ObjectView
from torch_xla_ckpt.inspecting.opening import path_of_checkpoint
from torch_xla_ckpt.inspecting.pages import page
from torch_xla_ckpt.inspecting.pruning import Pruning, prune, require_deleted
from torch_xla_ckpt.inspecting.reporting import Report, TensorFacts, report
from torch_xla_ckpt.inspecting.step_names import require_new_name
from torch_xla_ckpt.inspecting.text import shown
from torch_xla_ckpt.inspecting.trees import Sort
from torch_xla_ckpt.inspecting.values import TensorView, show

__all__ = [
    "Check",
    "Checks",
    "Contents",
    "Conversion",
    "Difference",
    "Explanation",
    "KeyChange",
    "KeyDifference",
    "Layout",
    "ObjectView",
    "ProcessPlan",
    "Pruning",
    "Report",
    "RunContents",
    "Sort",
    "TensorFacts",
    "TensorPlan",
    "TensorView",
    "check",
    "convert",
    "diff",
    "explain",
    "inspect",
    "page",
    "path_of_checkpoint",
    "prune",
    "report",
    "require_checked",
    "require_deleted",
    "require_new_name",
    "show",
    "shown",
]
