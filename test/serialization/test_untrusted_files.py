"""No reader runs code from a file, whatever the code is and wherever it stands.

Every payload works: the first tests show that Python's pickle runs it.
"""

import collections
import contextlib
import copy as copies
import copyreg
import functools
import io
import json
import operator
import os
import pathlib
import pickle
import pickletools
import struct
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_xla_ckpt as xc
from torch_xla_ckpt.serialization import metadata as metadata_file
from torch_xla_ckpt.storage.seal import SealedPieces

METADATA = "torch.distributed.checkpoint.metadata"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Detected pickle protocol")]
REFUSED = (xc.UnsafeObjectError, xc.CorruptCheckpointError)


# Hand-made pickles. Each function returns opcodes that leave one object on the stack.


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def many(*entries):
    return b"(" + b"".join(entries) + b"t"


def named(module, name):
    return text(module) + text(name) + b"\x93"


def call(function, *args):
    return function + many(*args) + b"R"


def attribute(thing, name):
    return call(named("builtins", "getattr"), thing, text(name))


def entry(mapping, key):
    return call(attribute(mapping, "get"), text(key))


def opcodes(value, protocol=4):
    """The opcodes of a pickled value, without the first and last opcode and the frame of the pickle."""
    raw = pickletools.optimize(pickle.dumps(value, protocol))
    ops = [(op.name, at) for op, _, at in pickletools.genops(raw)]
    ends = [at for _, at in ops[1:]] + [len(raw)]
    assert not any("GET" in name for name, _ in ops)
    return b"".join(raw[at:end] for (name, at), end in zip(ops, ends) if name not in ("PROTO", "FRAME", "STOP"))


class Runs:
    """Pickles to a call of ``call(*args)``."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def saved_by_torch(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


MKDIR = named("os", "mkdir")
POPEN = named("subprocess", "Popen")
PARTIAL = named("functools", "partial")
GLOBALS = attribute(attribute(named(METADATA, "Metadata"), "__init__"), "__globals__")
ENUM_GLOBALS = attribute(attribute(named(METADATA, "_MEM_FORMAT_ENCODING"), "__new__"), "__globals__")

# Each payload makes a folder at a path when Python's pickle loads it.
PAYLOADS = {
    **{f"reduce, protocol {n}": lambda path, n=n: opcodes(Runs(os.mkdir, path), n) for n in range(6)},
    "os.system": lambda path: opcodes(Runs(os.system, f"mkdir {path}")),
    "subprocess": lambda path: opcodes(Runs(subprocess.call, ["mkdir", path])),
    "GLOBAL": lambda path: call(b"cos\nmkdir\n", text(path)),
    "INST": lambda path: b"(" + text(path) + b"ios\nmkdir\n",
    "OBJ": lambda path: b"(" + MKDIR + text(path) + b"o",
    "eval": lambda path: call(named("builtins", "eval"), text(f"__import__('os').mkdir({path!r})")),
    "exec": lambda path: call(named("builtins", "exec"), text(f"import os; os.mkdir({path!r})")),
    "__import__ and getattr": lambda path: call(
        attribute(call(named("builtins", "__import__"), text("os")), "mkdir"), text(path)
    ),
    "getattr out of an admitted class": lambda path: call(attribute(entry(GLOBALS, "os"), "mkdir"), text(path)),
    "getattr out of an admitted enumeration": lambda path: call(
        attribute(entry(attribute(entry(ENUM_GLOBALS, "sys"), "modules"), "os"), "mkdir"), text(path)
    ),
    "dotted name, through DCP": lambda path: call(named(METADATA, "os.mkdir"), text(path)),
    "dotted name, through torch": lambda path: call(named("torch", "serialization.os.mkdir"), text(path)),
    "dotted name, through torch.hub": lambda path: call(named("torch", "hub.os.mkdir"), text(path)),
    "dotted name, through an admitted class": lambda path: call(
        attribute(call(named(METADATA, "Metadata.__init__.__globals__.get"), text("os")), "mkdir"), text(path)
    ),
    "dotted name, through an admitted function": lambda path: call(
        named("builtins", "getattr.__self__.exec"), text(f"import os; os.mkdir({path!r})")
    ),
    "another module's os": lambda path: call(named("torch.serialization", "os.mkdir"), text(path)),
    "partial": lambda path: call(call(PARTIAL, MKDIR, text(path))),
    "partial, by its state": lambda path: (
        call(PARTIAL, named("builtins", "print")) + many(MKDIR, many(text(path)), b"}", b"N") + b"b)R"
    ),
    "copyreg's reconstructor": lambda path: call(
        named("copyreg", "_reconstructor"), POPEN, POPEN, b"]" + text("mkdir") + b"a" + text(path) + b"a"
    ),
    "a pickle in the pickle": lambda path: opcodes(Runs(pickle.loads, pickle.dumps(Runs(os.mkdir, path)))),
    "map": lambda path: call(
        named("builtins", "list"), call(named("builtins", "map"), MKDIR, b"]" + text(path) + b"a")
    ),
    "attrgetter": lambda path: call(
        call(opcodes(operator.attrgetter("mkdir")), call(named("importlib", "import_module"), text("os"))), text(path)
    ),
    "torch's own": lambda path: call(
        named("torch.storage", "_load_from_bytes"), opcodes(saved_by_torch(Runs(os.mkdir, path)))
    ),
    "deep inside plain data": lambda path: opcodes({"a": [({"b": collections.OrderedDict(c=Runs(os.mkdir, path))},)]}),
    "a module that acts when imported": lambda path: named(f"acts_for_{pathlib.Path(path).name}", "nothing"),
    "EXT1": lambda path: call(b"\x82\xf1", text(path)),
    "EXT2": lambda path: call(b"\x83\xf1\x00", text(path)),
    "EXT4": lambda path: call(b"\x84\xf1\x00\x00\x00", text(path)),
    "EXT1, known already": lambda path: call(b"\x82\xf2", text(path)),
}


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """Register extension codes as an application would, use one, and put a module on the path."""
    copyreg.add_extension("os", "mkdir", 0xF1)
    copyreg.add_extension("os", "makedirs", 0xF2)
    assert pickle.loads(b"\x80\x02\x82\xf2.") is os.makedirs
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "acts_for_ran.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nnothing = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield
    sys.modules.pop("acts_for_ran", None)
    copyreg.remove_extension("os", "mkdir", 0xF1)
    copyreg.remove_extension("os", "makedirs", 0xF2)


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "ran"


def payload(name, canary):
    return PAYLOADS[name](str(canary))


# A hand-made checkpoint as stock DCP writes it.


def tensor_entry(host):
    chunk = ChunkStorageMetadata(torch.Size([0] * host.dim()), host.shape)
    return TensorStorageMetadata(TensorProperties(dtype=host.dtype), host.shape, [chunk])


def stock(path, items, change=lambda metadata: metadata):
    """Write a stock checkpoint. ``items`` maps keys to pairs of metadata entry and bytes."""
    path.mkdir(exist_ok=True)
    places, at = {}, 0
    for key, (said, data) in items.items():
        offset = torch.Size([0] * len(said.size)) if isinstance(said, TensorStorageMetadata) else None
        places[MetadataIndex(key, offset)] = _StorageInfo("__0_0.distcp", at, len(data))
        at += len(data)
    (path / "__0_0.distcp").write_bytes(b"".join(data for _, data in items.values()))
    entries = {key: said for key, (said, _) in items.items()}
    metadata = change(Metadata(entries, {key: (key,) for key in items}, places, StorageMeta()))
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else dumps(metadata))
    return path


SAVED = torch.arange(6.0)


def harmless():
    return {"t": (tensor_entry(SAVED), saved_by_torch(SAVED)), "step": (BytesStorageMetadata(), saved_by_torch(7))}


class Raw:
    """Opcodes instead of an object."""

    def __init__(self, body):
        self.body = body


class RawPickler(pickle._Pickler):
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Raw):
            self.write(obj.body)
        else:
            super().save(obj, save_persistent_id)


def dumps(metadata):
    """Pickle without frames, in a protocol that splits names at dots."""
    data = io.BytesIO()
    RawPickler(data, protocol=3).dump(metadata)
    return b"\x80\x04" + data.getvalue()[2:]


def changed(metadata, **fields):
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


PLACES = {
    "all of it": lambda metadata, body: b"\x80\x04" + body + b".",
    "before the metadata": lambda metadata, body: b"\x80\x04" + body + b"0" + dumps(metadata)[2:],
    "behind the metadata": lambda metadata, body: dumps(metadata)[:-1] + body + b"0.",
    "an entry": lambda metadata, body: changed(
        metadata, state_dict_metadata={**metadata.state_dict_metadata, "x": Raw(body)}
    ),
    "a key": lambda metadata, body: changed(
        metadata, state_dict_metadata={**metadata.state_dict_metadata, Raw(body): BytesStorageMetadata()}
    ),
    "storage_data": lambda metadata, body: changed(metadata, storage_data=Raw(body)),
    "a place in storage_data": lambda metadata, body: changed(
        metadata, storage_data={**metadata.storage_data, MetadataIndex("x"): Raw(body)}
    ),
    "planner_data": lambda metadata, body: changed(metadata, planner_data=Raw(body)),
    "storage_meta": lambda metadata, body: changed(metadata, storage_meta=StorageMeta(modules=Raw(body))),
}


def poisoned(path, place, body):
    """A stock checkpoint with opcodes inserted into its metadata."""
    return stock(path, harmless(), lambda metadata: PLACES[place](metadata, body))


def load(path, **options):
    target = {"t": torch.zeros(6), "step": 0}
    xc.load(target, path, **options)
    return target


def load_with_stock_planner(path):
    try:
        dcp.load({"t": torch.zeros(6)}, storage_reader=xc.ShardReader(path), planner=dcp.DefaultLoadPlanner())
    except CheckpointException as error:
        raise error.failures[0][0] from error


def verify(path):
    report = xc.verify(path)
    if not report.ok:
        raise xc.CorruptCheckpointError(str(report), report.damages)


READERS = {
    "load": load,
    "load, verify=False": functools.partial(load, verify=False),
    "load, trust_pickle=True": functools.partial(load, trust_pickle=True),  # is about objects, not about metadata
    "verify": verify,
    "stock planner": load_with_stock_planner,
    "metadata": lambda path: xc.ShardReader(path).read_metadata().state_dict_metadata,
}


def came_alive(canary):
    """Whether the payload made its folder. Some payloads start a process first."""
    for _ in range(100):
        if canary.exists():
            canary.rmdir()
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("name", PAYLOADS)
def test_pickle_runs_this_payload(name, canary):
    """Otherwise the tests below would prove nothing."""
    pickle.loads(b"\x80\x04" + payload(name, canary) + b".")
    assert came_alive(canary)


@pytest.mark.parametrize("place", PLACES)
def test_stock_torch_runs_a_payload_in_this_place(place, canary, tmp_path):
    body = payload("GLOBAL", canary)
    path = poisoned(tmp_path / "checkpoint", place, body)
    with open(path / ".metadata", "rb") as file:
        pickle.load(file)
    assert came_alive(canary)


def test_the_hand_made_checkpoint_loads(tmp_path):
    path = stock(tmp_path / "checkpoint", harmless())
    assert xc.verify(path).ok
    for target in (load(path), {"t": torch.zeros(6), "step": 0}):
        if not target["step"]:
            dcp.load(target, checkpoint_id=path)
        assert torch.equal(target["t"], SAVED) and target["step"] == 7


def refuses(read, path, canary, names=(".metadata",)):
    with pytest.raises(REFUSED) as caught:
        read(path)
    assert not canary.exists(), "it ran"
    assert any(name in str(caught.value) for name in names), caught.value
    return caught.value


@pytest.mark.parametrize("name", PAYLOADS)
def test_code_in_stock_metadata_is_refused_by_every_reader(name, canary, tmp_path):
    for place in PLACES:
        path = poisoned(tmp_path / "checkpoint", place, payload(name, canary))
        for read in READERS.values():
            error = refuses(read, path, canary)
            if "mkdir" in name or name in ("GLOBAL", "INST", "OBJ", "EXT1"):
                assert "mkdir" in str(error) and any("mkdir" in type_ for type_ in error.types)


@pytest.mark.parametrize("name", PAYLOADS)
def test_saving_over_metadata_does_not_run_code_in_it(name, canary, tmp_path):
    for place in PLACES:
        path = poisoned(tmp_path / "checkpoint", place, payload(name, canary))
        xc.save({"t": SAVED, "step": 7}, path, sync=False)
        assert not canary.exists()
        assert torch.equal(load(path)["t"], SAVED) and xc.verify(path).ok
        for file in path.iterdir():
            file.unlink()


@pytest.mark.parametrize("name", PAYLOADS)
def test_code_in_a_ranks_own_metadata_is_refused(name, canary, tmp_path):
    path = stock(tmp_path / "checkpoint", harmless())
    (path / ".metadata").unlink()
    (path / "__0.metadata").write_bytes(b"\x80\x04" + payload(name, canary) + b".")
    refuses(load, path, canary)
    refuses(load_with_stock_planner, path, canary)


def ours(path):
    """Save a checkpoint. Return its pickle, and the path and content of its manifest."""
    xc.save({"t": SAVED, "step": 7}, path, sync=False)
    (manifest,) = path.glob("manifest-*.json")
    data = (path / ".metadata").read_bytes()
    return data[: data.rindex(b"\ntorch_xla_ckpt ")], manifest, json.loads(manifest.read_bytes())


def sealed(top):
    """The bytes of a manifest, with the right checksum."""
    top = {key: value for key, value in top.items() if key != "xxh3_64"} if isinstance(top, dict) else top
    body = json.dumps(top).encode()[:-1] + b","
    return body + b'\n"xxh3_64": "%s"}' % xxhash.xxh3_64_hexdigest(body).encode()


def publish(path, pickled, manifest):
    """Commit a pickle and a manifest with valid checksums, as an attacker with write access can."""
    save_id = next(path.glob("__0_0-*.distcp")).name[6:22]
    for old in path.glob("manifest-*.json"):
        old.unlink()
    (path / f"manifest-{save_id}.json").write_bytes(manifest)
    (path / ".metadata").write_bytes(b"".join(SealedPieces([pickled], save_id, xxhash.xxh3_64_digest(manifest))))


@pytest.mark.parametrize("name", PAYLOADS)
def test_code_in_our_metadata_with_valid_checksums_never_runs(name, canary, tmp_path):
    path = tmp_path / "checkpoint"
    for place in ("all of it", "behind the metadata", "planner_data"):
        pickled, manifest, top = ours(path)
        body = PLACES[place](pickle.loads(pickled), payload(name, canary))
        body = body if isinstance(body, bytes) else dumps(body)
        # The manifest says that the planner's data is in the pickle: the checkpoint opens without it.
        publish(path, body, sealed({**top, "paths": "pickled"}))
        for read in READERS.values():
            read(path)
            assert not canary.exists(), "it ran"
        # The manifest is lost; what remains is the pickle.
        publish(path, body, sealed(top))
        (path / manifest.name).unlink()
        for read in READERS.values():
            refuses(read, path, canary, (".metadata", manifest.name))
        # With its manifest, our pickle is never opened.
        publish(path, body, sealed(top))
        assert torch.equal(load(path)["t"], SAVED) and torch.equal(load(path, verify=False)["t"], SAVED)
        assert xc.verify(path).ok
        xc.save({"t": SAVED, "step": 7}, path, sync=False)
        assert not canary.exists()


@pytest.mark.parametrize("opcode", [b"P5\n", text("x") + b"Q", text("storage") + b"\x85Q"], ids=repr)
def test_persistent_ids_in_metadata_are_refused(opcode, canary, tmp_path):
    path = poisoned(tmp_path / "checkpoint", "planner_data", opcode)
    for read in READERS.values():
        refuses(read, path, canary)


def nested(times, start=b")"):
    """A tuple of two references to a tuple of two references, and so on: 2**times leaves in a few bytes."""
    return start + b"".join(b"2\x86" for _ in range(times))


SIZE = named("torch", "Size")
BOMBS = {
    "a slot of the memo that is far away": b"N" + b"r" + struct.pack("<I", 0xFFFFFFF0),
    "the same, in text": b"Np4294967280\n",
    "a large key": b"}" + nested(60) + b"Ns",
    "a large element of a set": b"\x8f(" + nested(60) + b"\x90",
    "a large frozenset": b"(" + nested(60) + b"\x91",
    "a large text": call(named("builtins", "str"), nested(60)),
    "a large size": call(SIZE, nested(60)),
    "a large number of bytes": b"\x8e" + struct.pack("<Q", 1 << 40),
    "a large bytearray": b"\x96" + struct.pack("<Q", 1 << 40),
    "a large index": (named(METADATA, "MetadataIndex") + b")\x81}(" + text("fqn") + nested(60) + b"ub}" + b"2" + b"Ns"),
    "a deep list": b"]" * 100_000 + b"a" * 99_999,
}


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_that_multiplies_its_data_is_handled_quickly(name, tmp_path):
    for place in PLACES:
        path = poisoned(tmp_path / "checkpoint", place, BOMBS[name])
        is_ok(path)


def test_metadata_of_a_newer_torch_with_more_fields_is_read(tmp_path, monkeypatch):
    """torch 2.15 adds a tensor's strides, which torch 2.9 cannot unpickle."""
    state_of = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*state_of(self), (1,), "a later field"))
        path = stock(tmp_path / "checkpoint", harmless())
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads((path / ".metadata").read_bytes())
    assert torch.equal(load(path)["t"], SAVED)


@pytest.mark.parametrize(("module", "name"), [name.rsplit(".", 1) for name in sorted(metadata_file._TABLE.values)])
def test_reading_metadata_does_not_change_the_named_classes_and_functions(module, name, tmp_path):
    """The opcode BUILD sets attributes of anything on the stack, also of classes, functions and enumeration members."""
    before = everything_admitted()
    new = b"}" + text("polluted") + b"Ns"
    try:
        for state in (b"N" + new + b"\x86", new, new + new + b"\x86"):
            for thing in (named(module, name), call(named(module, name), b"K\x00")):
                body = thing + state + b"b"
                path = poisoned(tmp_path / "checkpoint", "behind the metadata", body)
                is_ok(path)
                assert everything_admitted() == before
    finally:
        for thing, _ in before.values():
            vars(thing).pop("polluted", None) if type(vars(thing)) is dict else delete(thing, "polluted")
    assert xc.verify(stock(tmp_path / "whole", harmless())).ok


def delete(thing, name):
    with contextlib.suppress(AttributeError, TypeError):
        delattr(thing, name)


def everything_admitted():
    """Every class and function that metadata may name, with its attributes."""
    named_there = {name: getattr(thing, "make", thing) for name, thing in metadata_file._TABLE.values.items()}
    members = {str(member): member for member in sys.modules[METADATA]._MEM_FORMAT_ENCODING}
    things = {name: thing for name, thing in {**named_there, **members}.items() if hasattr(thing, "__dict__")}
    return {name: (thing, {key: id(value) for key, value in vars(thing).items()}) for name, thing in things.items()}


# Items.


def archive(pickled, records=()):
    """An archive as ``torch.save`` writes it, with the given pickle."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **dict(records)}.items():
            archive.writestr(f"archive/{name}", content)
    return data.getvalue()


def unarchived(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("key", ["t", "step"])
def test_code_in_a_stock_item_is_refused(key, name, canary, tmp_path):
    """The code stands in a tensor's item or in an object: alone, or before or behind the honest pickle."""
    body = payload(name, canary)
    items = harmless()
    said, data = items[key]
    records = unarchived(data)
    honest = records.pop("data.pkl")
    for protocol in (2, 4):
        start = b"\x80" + bytes([protocol])
        for pickled in (start + body + b".", start + body + b"0" + honest[2:], start + honest[2:-1] + body + b"0."):
            path = stock(tmp_path / "checkpoint", {**items, key: (said, archive(pickled, records))})
            error = refuses(load, path, canary, (repr(key),))
            assert not isinstance(error, xc.UnsafeObjectError) or error.key == key
            refuses(functools.partial(load, verify=False), path, canary, (repr(key),))
            xc.verify(path)
            assert not canary.exists()
            if key == "t":  # trust_pickle is about objects, not about tensors
                refuses(functools.partial(load, trust_pickle=True), path, canary, ("'t'",))


def test_torch_load_runs_the_payload_in_a_stock_tensor_item(canary):
    body = payload("GLOBAL", canary)
    torch.load(io.BytesIO(archive(b"\x80\x02" + body + b".")), weights_only=False)
    assert came_alive(canary)


OBJECTS = {
    "reduce": lambda path: Runs(os.mkdir, path),
    "nested": lambda path: ({"deep": [(Runs(os.mkdir, path),)]},),
    "in an array": lambda path: np.array([Runs(os.mkdir, path)], dtype=object),
    "partial": lambda path: Runs(functools.partial(os.mkdir, path)),
    "eval": lambda path: Runs(eval, f"__import__('os').mkdir({path!r})"),
    "tensor subclass": lambda path: (torch.ones(2), Runs(os.mkdir, path)),
}


@pytest.mark.parametrize("how", OBJECTS)
def test_code_in_an_object_with_a_valid_checksum_is_refused(how, canary, tmp_path):
    xc.save({"t": SAVED, "step": OBJECTS[how](str(canary))}, tmp_path / "checkpoint")
    assert not canary.exists() and xc.verify(tmp_path / "checkpoint").ok
    error = refuses(load, tmp_path / "checkpoint", canary, ("'step'",))
    assert isinstance(error, xc.UnsafeObjectError) and error.key == "step" and "trust_pickle=True" in str(error)
    load(tmp_path / "checkpoint", trust_pickle=True)
    assert came_alive(canary)


def test_a_tensor_item_without_the_tensor_is_reported_as_damage(tmp_path, canary):
    for value in (5, {"a": 1}, torch.arange(7.0), [torch.arange(6.0)], torch.zeros(6, device="meta")):
        path = stock(tmp_path / "checkpoint", {**harmless(), "t": (tensor_entry(SAVED), saved_by_torch(value))})
        assert isinstance(refuses(load, path, canary, ("'t'",)), xc.CorruptCheckpointError)


def swollen(value, claimed):
    """A tensor's item that claims more elements than it has bytes for. torch up to 2.9 believes the claim."""
    records = unarchived(saved_by_torch(value))
    count = value.numel()
    assert count < 256
    pickled = records.pop("data.pkl")
    many = b"J" + struct.pack("<i", claimed)
    assert pickled.count(b"K%ctq" % count) == 1 and pickled.count(b"K%c\x85" % count) == 1
    pickled = pickled.replace(b"K%ctq" % count, many + b"tq").replace(b"K%c\x85" % count, many + b"\x85")
    return archive(pickled, records)


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path, canary):
    """Such a tensor would show and change foreign memory."""
    large = torch.zeros(1000)
    item = swollen(torch.arange(6.0), 1000)
    path = stock(tmp_path / "tensor", {**harmless(), "t": (tensor_entry(large), item)})
    with pytest.raises(REFUSED, match="'t'"):
        xc.load({"t": large}, path)
    path = stock(tmp_path / "object", {**harmless(), "step": (BytesStorageMetadata(), item)})
    with pytest.raises(xc.CheckpointError, match="'step'"):
        xc.load({"step": None}, path)


def array_with(dtype_state, raw, spec="V8"):
    """An array whose dtype has a forged state."""
    build, (cls, shape, code), _ = np.empty(0).__reduce__()

    class Forged:
        def __reduce__(self):
            return np.dtype, (spec, False, True), dtype_state

    class Array:
        def __reduce__(self):
            return build, (cls, shape, code), (1, (1,), Forged(), False, raw)

    return Array()


FORGED = {
    "a pointer for an object": (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0),
    "a field behind the end": (3, "|", None, ("a",), {"a": (np.dtype("f8"), 1 << 20)}, 8, 1, 0),
    "a negative field": (3, "|", None, ("a",), {"a": (np.dtype("f8"), -(1 << 20))}, 8, 1, 0),
    "a larger part": (3, "|", (np.dtype("f8"), (1 << 20,)), None, None, 8, 1, 0),
    "an object deeper down": (
        *(3, "|", None, ("a",)),
        *({"a": (np.dtype([("b", "O")]), 0)}, 8, 1, 0),
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_numpy_dtype_that_reaches_outside_of_its_array_is_refused(how, tmp_path, canary):
    """numpy trusts the flags, offsets and sizes that a pickle gives a dtype. The test never reads the array."""
    value = array_with(FORGED[how], (0x4141414141414141).to_bytes(8, "little"))
    path = tmp_path / "checkpoint"
    xc.save({"t": SAVED, "step": {"in": [value]}}, path, sync=False)
    with pytest.raises(xc.CheckpointError, match="'step"):
        xc.load({"step": {"in": [None]}}, path)


# Names of files.


OUTSIDE = [
    "../victim",
    "../../victim",
    "/etc/passwd",
    "a/../../victim",
    "..",
    ".",
    "",
    "a:b",
    "C:\\victim",
    "..\\victim",
]


@pytest.mark.parametrize("name", [*OUTSIDE, "absolute", "sub/../../victim", "memory://victim", "x\0y"])
def test_files_outside_of_the_folder_are_neither_read_nor_removed(name, canary, tmp_path):
    """The victim holds the bytes of the item, so that a reader that follows the name succeeds."""
    victim = tmp_path / "outer" / "victim"
    path = tmp_path / "outer" / "checkpoint"
    victim.parent.mkdir()
    name = str(victim) if name == "absolute" else name

    def renamed(metadata):
        places = {index: _StorageInfo(name, p.offset, p.length) for index, p in metadata.storage_data.items()}
        return changed(metadata, storage_data=places)

    stock(path, harmless(), renamed)
    victim.write_bytes((path / "__0_0.distcp").read_bytes())
    (path.parent.parent / "victim").write_bytes(victim.read_bytes())
    for read in (load, functools.partial(load, verify=False), load_with_stock_planner):
        refuses(read, path, canary, (repr(name), name or "''"))
    assert not is_ok(path)
    xc.save({"t": SAVED, "step": 7}, path, sync=False)
    assert victim.exists() and (path.parent.parent / "victim").exists() and path.is_dir()

    pickled, _, top = ours(path)
    publish(path, pickled, sealed({**top, "files": [[name, size] for _, size in top["files"]]}))
    for read in (load, functools.partial(load, verify=False), load_with_stock_planner):
        refuses(read, path, canary, (repr(name), name or "''"))
    assert not is_ok(path)
    xc.save({"t": SAVED, "step": 7}, path, sync=False)
    assert torch.equal(load(path)["t"], SAVED) and victim.exists()


def is_ok(path):
    try:
        return xc.verify(path).ok
    except xc.CheckpointError:
        return False


def test_saving_over_a_checkpoint_removes_only_checkpoint_files(tmp_path):
    """Metadata that names a file of the user must not cause the file's deletion."""
    path = tmp_path / "checkpoint"

    def renamed(metadata):
        places = {i: _StorageInfo("notes.txt", p.offset, p.length) for i, p in metadata.storage_data.items()}
        return changed(metadata, storage_data=places)

    stock(path, harmless(), renamed)
    (path / "notes.txt").write_text("mine")
    (path / "model.py").write_text("mine")
    xc.save({"t": SAVED, "step": 7}, path, sync=False)
    assert (path / "notes.txt").exists() and (path / "model.py").exists()


# Well-formed metadata with nonsensical values.


def paths_in(node, path=()):
    yield path
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from paths_in(node[key], (*path, key))


def replaced(tree, path, value):
    tree = copies.deepcopy(tree)
    if not path:
        return value
    node = tree
    for key in path[:-1]:
        node = node[key]
    if value is paths_in:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return tree


ODD = [paths_in, None, True, -1, 0.5, 1 << 62, 1 << 70, "", "x", "zz" * 8, "float32", [], [[]], {}, {"a": 1}, [0, 1]]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "deleted" if odd is paths_in else repr(odd))
def test_a_nonsensical_manifest_with_valid_checksums_raises_a_checkpoint_error(odd, tmp_path):
    path = tmp_path / "checkpoint"
    pickled, _, top = ours(path)
    del top["xxh3_64"]
    wrong = []
    for where in paths_in(top):
        if where in ((), ("user_metadata",), ("time",), ("software",)) and odd != {}:
            continue
        publish(path, pickled, sealed(replaced(top, where, odd)))
        for name, read in (("load", load), ("verify", xc.verify)):
            try:
                found = read(path)
            except xc.CheckpointError as error:
                if any(raw in str(error) for raw in RAW):
                    wrong.append(f"{where}: {name} says {error}")
            except Exception as error:
                wrong.append(f"{where}: {name} raises {type(error).__name__}: {error}")
            else:
                if name == "load" and not torch.equal(found["t"], SAVED) and "dtype" not in where:
                    wrong.append(f"{where}: loads {found}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(line[:300] for line in wrong[:12])


RAW = ("KeyError", "TypeError", "IndexError", "AttributeError", "OverflowError", "RecursionError", "AssertionError")


@pytest.mark.parametrize(
    "manifest",
    [b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"format": 1}', b"{}" * 9],
    ids=lambda data: repr(data[:12]),
)
def test_a_file_that_is_no_manifest_raises_a_checkpoint_error(manifest, tmp_path):
    path = tmp_path / "checkpoint"
    pickled, _, _ = ours(path)
    body = manifest[:-1] + b","
    for data in (manifest, body + b'\n"xxh3_64": "%s"}' % xxhash.xxh3_64_hexdigest(body).encode()):
        publish(path, pickled, data)
        with pytest.raises(xc.CheckpointError) as caught:
            load(path)
        assert not any(raw in str(caught.value) for raw in RAW), caught.value
        assert not is_ok(path)


def test_a_manifest_of_a_later_version_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "checkpoint"
    pickled, _, top = ours(path)
    publish(path, pickled, sealed({**top, "version": 3}))
    for read in (load, xc.verify):
        with pytest.raises(xc.CheckpointError, match=r"version 3.*reads versions 1 and 2.*Install a newer"):
            read(path)


NONSENSE = {
    "no mapping": lambda m: changed(m, state_dict_metadata=5),
    "an entry that is a string": lambda m: changed(m, state_dict_metadata={"t": "x", "step": BytesStorageMetadata()}),
    "a key that is a number": lambda m: changed(m, state_dict_metadata={**m.state_dict_metadata, 5: "x"}),
    "no storage data": lambda m: changed(m, storage_data=None),
    "storage data that is a list": lambda m: changed(m, storage_data=[1]),
    "places that are numbers": lambda m: changed(m, storage_data=dict.fromkeys(m.storage_data, 5)),
    "places in unhashable files": lambda m: changed(
        m, storage_data=dict.fromkeys(m.storage_data, _StorageInfo([], 0, 1))
    ),
    "places that are negative": lambda m: changed(
        m, storage_data=dict.fromkeys(m.storage_data, _StorageInfo("__0_0.distcp", -5, -7))
    ),
    "places that are huge": lambda m: changed(
        m, storage_data=dict.fromkeys(m.storage_data, _StorageInfo("__0_0.distcp", 0, 1 << 62))
    ),
    "places that are text": lambda m: changed(
        m, storage_data=dict.fromkeys(m.storage_data, _StorageInfo("__0_0.distcp", "0", "1"))
    ),
    "chunks that are numbers": lambda m: changed(
        m, state_dict_metadata={"t": changed(tensor_entry(SAVED), chunks=[1, 2]), "step": BytesStorageMetadata()}
    ),
    "chunks of other dimensions": lambda m: changed(
        m,
        state_dict_metadata={
            "t": changed(tensor_entry(SAVED), chunks=[ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([6, 1]))]),
            "step": BytesStorageMetadata(),
        },
    ),
    "no dtype": lambda m: changed(
        m, state_dict_metadata={"t": changed(tensor_entry(SAVED), properties=None), "step": BytesStorageMetadata()}
    ),
    "a shape that is a string": lambda m: changed(
        m, state_dict_metadata={"t": changed(tensor_entry(SAVED), size="6"), "step": BytesStorageMetadata()}
    ),
    "an object that is called a tensor": lambda m: changed(
        m, storage_data={**m.storage_data, MetadataIndex("t", [0]): m.storage_data[MetadataIndex("step")]}
    ),
    "a tensor that is called an object": lambda m: changed(
        m, storage_data={**m.storage_data, MetadataIndex("step"): m.storage_data[MetadataIndex("t", [0])]}
    ),
}


@pytest.mark.parametrize("how", NONSENSE)
def test_nonsensical_stock_metadata_raises_a_checkpoint_error(how, tmp_path):
    path = stock(tmp_path / "checkpoint", harmless(), NONSENSE[how])
    try:
        load(path)
    except xc.CheckpointError as error:
        assert not any(raw in str(error) for raw in RAW), error
    else:
        assert how.startswith(("a key that is", "a tensor that is")), "loaded"
    is_ok(path)
    xc.save({"t": SAVED, "step": 7}, path, sync=False)
    assert torch.equal(load(path)["t"], SAVED)
