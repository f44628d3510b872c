"""Fuzz the reading of items: mutated archives and pickles of every type, loaded in a child that is watched.

    scripts/fuzz_archives --cases 100000 --seed 0

A case fails if it kills the child, takes longer than ``--seconds``, asks for much memory, does something that Python's
audit hooks see (imports, opens a file, starts a process, ...), or returns a value of a type that is not harmless. Case
n of a seed is always the same; ``--first n --cases 1`` runs it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import functools
import io
import itertools
import os
import pathlib
import pickle
import pickletools
import random
import resource
import select
import struct
import subprocess
import sys
import traceback
import uuid
import warnings
import zipfile

MEMORY = 512 << 20  # bytes that a case may ask for in addition to what the program has
NODES = 20_000  # of a result, that are looked at


# What is mutated.


class State:
    """Pickles to a call and a state, whatever they are."""

    def __init__(self, call, arguments, *state):
        self.parts = call, arguments, *state

    def __reduce__(self):
        return self.parts


def forged_dtype(rng):
    import numpy as np

    def part(depth=0):
        if depth < 2 and rng.random() < 0.3:
            return forged(depth + 1)
        return np.dtype(rng.choice(["f8", "O", "i1", "U3", "M8[s]", "V8", "?", "c16", "S0", [("a", "O")]]))

    def forged(depth=0):
        size = rng.choice([-1, 0, 1, 8, 8, 8, 16, 1 << 20, -8, 1 << 31, 1 << 62])
        fields = {
            name: (part(depth), rng.choice([0, 0, 0, 4, 8, -8, -(1 << 20), 1 << 20, 1 << 31, 1 << 40]))
            for name in rng.sample("abc", rng.randrange(3))
        }
        names = rng.choice([tuple(fields), tuple(fields), None, ("a",), ("a", "a")])
        sub = rng.choice([None, None, (part(depth), (rng.choice([1, 2, 8, 1 << 20, 1 << 40, -1]),)), (part(depth), 8)])
        state = (
            *(rng.choice([3, 4]), rng.choice("<>|=="), sub, names, rng.choice([None, fields, fields]), size),
            *(rng.choice([1, 8, 0, -1]), rng.choice([0, 1, 16, 27, 63, 128, 144, 255, -1])),
        )
        if rng.random() < 0.3:
            unit = rng.choice([b"D", b"us", b"generic", b"x", "s", 5])
            state += (rng.choice([None, {}, {"x": 1}, (None, (unit, rng.choice([1, 25, 0, -1, 1 << 40]), 1, 1))]),)
        spec = rng.choice(["V8", "V8", "f8", "O8", "M8", "U2", "i4", "V16", "b1", "U999999999", "f8,O", "O", "S3", "T"])
        return State(np.dtype, (spec, False, True), state)

    return forged()


def forged_array(rng):
    import numpy as np

    build, (cls, _, code), _ = np.empty(0).__reduce__()
    dtype = forged_dtype(rng) if rng.random() < 0.8 else np.dtype(rng.choice(["O", "f8", "U2", "?", "M8[D]"]))
    raw = rng.choice([b"\x41" * rng.choice([0, 1, 8, 16, 64]), [1], [None] * 8, ["x", (1, 2)], [(1,)], "text", None, 5])
    if rng.random() < 0.3:
        return State(np.float32().__reduce__()[0], (dtype, raw))
    shape = rng.choice([(1,), (2,), (8,), (), (0,), (1 << 40,), (-1,), (1, 1), (1 << 32, 1 << 32), (2, 4), "x", [1]])
    state = (rng.choice([1, 1, 0, "x"]), shape, dtype, rng.choice([False, True, 1]), raw)
    return State(build, (rng.choice([cls, cls, cls, np.dtype, dict]), (0,), code), state[: rng.choice([5, 5, 5, 4])])


def seeds():
    """Values of every type that loads without a word of the caller."""
    import numpy as np
    import torch

    utc = datetime.timezone(datetime.timedelta(hours=2), "x")
    base = torch.arange(12.0)
    parameter, marked, ordered = torch.nn.Parameter(torch.ones(2)), torch.ones(2), collections.OrderedDict(a=1)
    parameter.note, marked.note, ordered._metadata = 3, [1], {"": {"version": 1}}
    cyclic = [1]
    cyclic.append(cyclic)
    values = [
        *(None, True, 5, -(2**70), 2.5, 1j, "text", "é\ud800", b"", b"bytes", bytearray(b"xy"), cyclic),
        *((), (1, (2, "x")), [1, [2]], {"a": {1: 2}, (1, 2): 3}, {1, 2}, frozenset({3}), range(3), slice(1, 5, 2)),
        *(np.float32(1.5), np.bool_(True), np.str_("s"), np.datetime64("2026-01-02"), np.void(b"ab"), np.longdouble(1)),
        *(np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.array([None, [1]], dtype=object), np.empty((0, 3))),
        *(np.zeros(2, [("a", "i4"), ("b", "f8", (2,))]), np.array([(1, "x")], [("a", "i4"), ("b", "O")])),
        *(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.dtype("M8[25us]"), np.zeros(2, ">i4"), np.zeros(3, "?")),
        *(datetime.datetime(2026, 1, 2, 3, tzinfo=utc), datetime.date(2026, 1, 2), datetime.time(3, fold=1)),
        *(datetime.timedelta(days=1), ordered, collections.Counter("aab"), collections.deque([1, 2], 3)),
        *(collections.defaultdict(list, a=[1]), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:/x")),
        *(uuid.UUID(int=5), uuid.UUID(int=6, is_safe=uuid.SafeUUID.safe), decimal.Decimal("1.10"), torch.float16),
        *(torch.Size([1, 2]), torch.device("cpu"), [base[2:4], base.view(3, 4).t()], parameter, marked),
        *(torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag),
        *(
            torch.quantize_per_tensor(base, 0.1, 10, torch.quint8),
            base.untyped_storage(),
            torch.empty(2, device="meta"),
        ),
        torch.quantize_per_channel(torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
        *(torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(4).to_sparse_bsr((2, 2))),
        *(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(1).expand(5), torch.tensor(3)),
        {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3}]},
    ]
    for dtype in dict.fromkeys(one for one in vars(torch).values() if isinstance(one, torch.dtype)):
        tensor = torch.empty(0, dtype=dtype).set_(torch.ones(64, dtype=torch.uint8).untyped_storage(), 0, (2,), (1,))
        if saved(tensor):
            values.append(tensor)
    return values


def saved(value, **options):
    """What ``torch.save`` writes; None if it cannot."""
    import torch

    data = io.BytesIO()
    try:
        torch.save(value, data, **options)
    except Exception:
        return None
    return data.getvalue()


def records(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def archived(members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return data.getvalue()


def operations(pickled):
    """A pickle's opcodes with their arguments, apart."""
    starts = [at for _, _, at in pickletools.genops(pickled)] + [len(pickled)]
    return [pickled[a:b] for a, b in itertools.pairwise(starts)]


class Corpus:
    def __init__(self):
        self.archives = [saved(value) for value in seeds()]
        self.members = [records(data) for data in self.archives]
        self.pickles = [operations(members["data.pkl"]) for members in self.members]
        self.pool = [op for ops in self.pickles for op in ops]
        self.pool += [bytes([n]) for n in range(256)]
        for name in ("os\nsystem", "posix\nmkdir", "builtins\neval", "builtins\ngetattr", "builtins\n__import__"):
            self.pool += [b"c" + name.encode() + b"\n"] * 5
        for name in ("builtins\nobject", "builtins\ntype", "numpy\nload", "torch\nload", "functools\npartial"):
            self.pool += [b"c" + name.encode() + b"\n"] * 2
        self.globals = [op for op in self.pool if op[:1] == b"c"]


# Mutations.

ODD = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1]


def flipped(rng, data, corpus):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def spliced(rng, data, corpus):
    other = rng.choice(corpus.archives)
    a, b, c = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(len(other))
    return rng.choice([data[:a] + other[c:], data[:a] + data[b:], data[:a] + other[c : c + 64] + data[a:], data[:a]])


def edited(rng, data, corpus):
    """A field of a header becomes an odd number."""
    marks = [b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08"]
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        mark = rng.choice(marks)
        places = [n for n in range(len(data) - 4) if data[n : n + 4] == mark] or [0]
        at = min(rng.choice(places) + rng.randrange(4, 56), len(data) - 8)
        form = rng.choice("BHIQ")
        size = struct.calcsize(form)
        old = struct.unpack_from("<" + form, data, at)[0]
        new = rng.choice([*ODD, old + rng.randrange(-64, 64), len(data), len(data) - at])
        struct.pack_into("<" + form, data, at, new % (1 << 8 * size))
    return bytes(data)


def surrounded(rng, data, corpus):
    other = rng.choice([rng.choice(corpus.archives), bytes(rng.randrange(1, 100)), b"PK\5\6" + bytes(18)])
    return rng.choice([other + data, data + other, other + data + other])


def shifted(rng, data, corpus):
    """An archive before another one, whose directory tells offsets as if it were, or were not, alone."""
    first = rng.choice(corpus.archives)
    ends = data.rindex(b"PK\5\6")
    size, at = struct.unpack_from("<II", data, ends + 12)
    directory = bytearray(data[at : at + size])
    place = 0
    by = rng.choice([len(first), len(first) - at, 0, 64])
    while place + 46 <= len(directory):
        (offset,) = struct.unpack_from("<I", directory, place + 42)
        struct.pack_into("<I", directory, place + 42, (offset + by) % (1 << 32))
        lengths = struct.unpack_from("<HHH", directory, place + 28)
        place += 46 + sum(lengths)
    count = struct.unpack_from("<H", data, ends + 10)[0]
    end = struct.pack(
        "<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, rng.choice([at, at + len(first), len(first)]), 0
    )
    return first + data[:at] + bytes(directory) + end


def doubled(rng, data, corpus):
    """Names twice, other members, other methods."""
    members = list(records(data).items())
    extra = rng.choice(corpus.members)
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", rng.choice([0, 0, 0, 8])) as archive:
        warnings.simplefilter("ignore")
        for name, content in [*members, *rng.sample(list(extra.items()), 1)]:
            archive.writestr(rng.choice(["archive", "archive", "archive", "Archive", "x/y"]) + "/" + name, content)
            if rng.random() < 0.1:
                archive.writestr(f"archive/{name.upper()}", content)
        archive.comment = rng.choice([b"", b"", b"x", b"PK\5\6" + bytes(18)])
    return out.getvalue()


def repickled(rng, members, corpus, pickled):
    ops = list(pickled)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        mutate = rng.choice([dropped, inserted, replaced, swapped, repeated, joined, numbered, renamed, resized])
        mutate(rng, ops, corpus)
    return archived({**members, "data.pkl": b"".join(ops)})


def place(rng, ops):
    return rng.randrange(1, max(2, len(ops)))


def dropped(rng, ops, corpus):
    a = place(rng, ops)
    del ops[a : a + rng.choice([1, 1, 2, 5])]


def inserted(rng, ops, corpus):
    ops.insert(place(rng, ops), rng.choice(corpus.pool))


def replaced(rng, ops, corpus):
    ops[min(place(rng, ops), len(ops) - 1)] = rng.choice(corpus.pool)


def swapped(rng, ops, corpus):
    a, b = place(rng, ops) % len(ops), place(rng, ops) % len(ops)
    ops[a], ops[b] = ops[b], ops[a]


def repeated(rng, ops, corpus):
    a = place(rng, ops)
    ops[a:a] = ops[a : a + rng.choice([1, 2, 5])] * rng.choice([1, 1, 2, 50])


def joined(rng, ops, corpus):
    other = rng.choice(corpus.pickles)
    a, b = place(rng, ops), place(rng, other)
    ops[a:a] = other[b : b + rng.choice([1, 3, 10, 30])]


def numbered(rng, ops, corpus):
    numbers = [n for n, op in enumerate(ops) if op[:1] in (b"K", b"M", b"J", b"\x8a", b"G", b"h", b"q")]
    if numbers:
        odd = rng.choice([-1, 0, 1, 3, 255, 65535, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 63, -(1 << 63), 1 << 200])
        ops[rng.choice(numbers)] = operations(pickle.dumps(odd, 2))[1]


def renamed(rng, ops, corpus):
    named = [n for n, op in enumerate(ops) if op[:1] == b"c"]
    if named:
        ops[rng.choice(named)] = rng.choice(corpus.globals)


def resized(rng, ops, corpus):
    texts = [n for n, op in enumerate(ops) if op[:1] == b"X"]
    if texts:
        text = rng.choice(
            ["", "f8", "O", "V8", "0", "1", "storage", "latin1", "x" * 1000, "\x00", "D", "|", "<", "cuda"]
        )
        ops[rng.choice(texts)] = operations(pickle.dumps(text, 2))[1]


def case(rng, corpus):
    """The bytes of one case."""
    n = rng.randrange(len(corpus.archives))
    data, kind = corpus.archives[n], rng.random()
    if kind < 0.4:
        mutate = rng.choice([flipped, flipped, spliced, edited, edited, surrounded, shifted, doubled])
        return mutate(rng, data, corpus)
    if kind < 0.85:
        return repickled(rng, corpus.members[n], corpus, corpus.pickles[n])
    forged = saved(forged_array(rng) if rng.random() < 0.7 else [forged_dtype(rng)])
    if rng.random() < 0.3:
        members = records(forged)
        return repickled(rng, members, corpus, operations(members["data.pkl"]))
    return forged


# The child.


def plain_types():
    import numpy as np
    import torch

    from torch_xla_ckpt.serialization.storages import StorageKind
    from torch_xla_ckpt.serialization.table import CheckedFunction

    leaves = (
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, type, type(np.dtype("f8").type)),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, decimal.Decimal),
        *(uuid.UUID, uuid.SafeUUID, pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, type(np.dtype)),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.qscheme, torch.storage.TypedStorage),
        *(torch._C._TensorMeta, torch.nn.parameter._ParameterMeta),
        *(CheckedFunction, StorageKind),  # stand-ins that nothing can call
        *{type(np.dtype(code)) for code in np.typecodes["All"]},
    )
    return frozenset(leaves)


def look_at(value, leaves):
    """Touch what was loaded; raises TypeError at a type that is not harmless."""
    import numpy as np
    import torch

    waiting, seen = [value], set()
    while waiting and len(seen) < NODES:
        one = waiting.pop()
        kind = type(one)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            waiting += [*one.keys(), *one.values(), *getattr(one, "__dict__", {}).values()]
        elif kind in (list, tuple, set, frozenset, collections.deque):
            waiting += list(one)
        elif kind is slice:
            waiting += [one.start, one.stop, one.step]
        elif kind is np.ndarray:
            if one.dtype.hasobject or one.size < 10_000:
                waiting.append(one.tolist() if one.dtype.names is None else [cell.item() for cell in one.flat])
            one.copy(), repr(one.dtype), one[..., None] if one.ndim < 8 else one
        elif isinstance(one, np.generic):
            if one.dtype.hasobject:
                raise TypeError("a scalar of objects")
            one.item(), repr(one)
        elif kind in (torch.Tensor, torch.nn.Parameter):
            touch(one)
            waiting += list(vars(one).values())
        elif kind not in leaves and not isinstance(one, np.dtype):
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__} came out")
        elif kind is torch.storage.TypedStorage:
            bytes(one.untyped())


def touch(tensor):
    import torch

    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return
    if tensor.is_nested:
        [one.clone() for one in tensor.unbind()]
    elif tensor.layout != torch.strided:
        if tensor.numel() < 1 << 16:
            tensor.to_dense()
    elif tensor.numel() < 1 << 16:
        raw = tensor.untyped_storage()
        bytes(raw)
        if tensor.is_quantized:
            tensor.int_repr() if tensor.dtype not in (torch.quint4x2, torch.quint2x4) else None
        elif tensor.dtype.itemsize in (1, 2, 4, 8) and not (tensor.is_conj() or tensor.is_neg()):
            tensor.view(dtype={1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).clone()


def child(first, count, seed):
    warnings.simplefilter("ignore")
    import torch

    from torch_xla_ckpt.serialization.objects import decode

    torch.set_num_threads(1)
    corpus, leaves = Corpus(), plain_types()
    from torch_xla_ckpt.errors import CheckpointError

    events = []
    watching = False

    def hook(event, arguments):
        if watching:
            events.append(event)

    def load(data):
        value = decode("key", io.BytesIO(data), (), False)
        look_at(value, leaves)

    for data in corpus.archives:  # what is imported lazily is imported now
        load(data)
    for n in range(300):
        with contextlib.suppress(CheckpointError):
            load(case(random.Random(f"warm {n}"), corpus))
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sys.addaudithook(hook)
    for n in range(first, first + count):
        print(f"case {n}", flush=True)
        data = case(random.Random(f"{seed} {n}"), corpus)
        events.clear()
        outcome = "loaded"
        watching = True
        try:
            load(data)
        except CheckpointError as error:
            outcome = "refused"
            cause = repr(error.__cause__)
            if isinstance(error.__cause__, (MemoryError, RecursionError)) or "allocate" in cause:
                outcome = f"FAILED: {cause}"
        except BaseException:
            outcome = "FAILED: " + traceback.format_exc()
        watching = False
        if bad := [event for event in events if event not in QUIET]:
            outcome = f"FAILED: did {sorted(set(bad))}"
        print(outcome.replace("\n", " | "), flush=True)


# Events that say nothing: looking at an attribute, and what the interpreter does by itself.
QUIET = {"builtins.id", "object.__getattr__", "sys._getframe", "gc.get_objects", "array.__new__"}


# The watcher.


def watch(first, count, seed, seconds):
    """Run cases in children; what went wrong, and how many were loaded and refused."""
    failures, tally = [], collections.Counter()
    command = [sys.executable, "-m", "support.archive_fuzzer", "--child"]
    at, stop = first, first + count
    while at < stop:
        process = subprocess.Popen(
            [*command, f"--first={at}", f"--cases={stop - at}", f"--seed={seed}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stop - first == 1 else subprocess.DEVNULL,
            text=True,
        )
        begun, limit, why = None, 120.0, ""
        read = functools.partial(os.read, process.stdout.fileno(), 1 << 16)
        rest = ""
        while True:
            if not select.select([process.stdout], [], [], limit)[0]:
                why = f"took longer than {seconds} s"
                process.kill()
                break
            text = read()
            if not text:
                break
            *lines, rest = (rest + text.decode()).split("\n")
            for line in lines:
                if line.startswith("case "):
                    begun, limit = int(line[5:]), seconds
                else:
                    tally[line.split(":")[0]] += 1
                    if line.startswith("FAILED"):
                        failures.append((begun, line))
                    at, begun = begun + 1, None
        process.wait()
        if begun is not None or (process.returncode and not why):
            failures.append((begun, why or f"the child ended with {process.returncode}"))
            if begun is None:
                break
            at = begun + 1
        process.stdout.close()
    return failures, tally


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.first, options.cases, options.seed)
    failures, tally = watch(options.first, options.cases, options.seed, options.seconds)
    for number, what in failures:
        print(f"case {number}: {what}")
    print(f"{options.cases} cases: {tally['loaded']} loaded, {tally['refused']} refused, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
