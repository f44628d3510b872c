"""ShardWriter and ShardReader as DCP storage: with any planner, mixed with stock storage, and their options."""

import io
import itertools
import json
import math
import pickle
import tempfile
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

import torch_xla_ckpt as xc
from support.dcp_storage import READERS, WRITERS, load, save, zeros
from support.meshes import holds, mesh, put, random_bits, same_bits
from torch_xla_ckpt.storage.frame import frame_of

BLOCK = 4 << 20
PAIRS = list(itertools.product(WRITERS, READERS))
every_pair = pytest.mark.parametrize(("writer", "reader"), PAIRS)

# torch_xla's planner has the signature of an older torch.
pytestmark = pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")


def manifest_of(path):
    reader = xc.ShardReader(path)
    reader.read_metadata()
    return reader.manifest


def cause(caught):
    """The error inside DCP's exception."""
    ((error, _),) = caught.value.failures.values()
    return error


# Any planner, either storage.

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@st.composite
def tensors(draw):
    """0-d, empty and odd tensors, and tensors around the size from which ShardWriter writes a tensor separately."""
    dtype = draw(st.sampled_from(DTYPES))
    small = st.lists(st.integers(0, 7), max_size=4)
    around = st.integers((256 << 10) // dtype.itemsize - 700, (256 << 10) // dtype.itemsize + 9).map(lambda n: [n])
    return random_bits(tuple(draw(small | small | around)), dtype, draw(st.integers(0, 99)))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(tensors(), min_size=1, max_size=4))
def test_our_storage_and_stock_storage_exchange_every_bit_with_dcps_planners(hosts):
    state = {str(n): host for n, host in enumerate(hosts)}
    with tempfile.TemporaryDirectory() as folder:
        for writer in WRITERS:
            save(state, f"{folder}/{writer}", writer)
            for reader in READERS:
                target = zeros(state)
                load(target, f"{folder}/{writer}", reader)
                assert all(map(same_bits, target.values(), hosts)), (writer, reader)
            assert xc.verify(f"{folder}/{writer}").ok


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_storage_and_stock_storage_exchange_every_dtype(dtype, tmp_path):
    state = {str(n): random_bits(shape, dtype, n) for n, shape in enumerate([(), (0, 3), (1,), (5, 3), (70_001,)])}
    for writer, reader in PAIRS:
        save(state, tmp_path / writer, writer)
        target = zeros(state)
        load(target, tmp_path / writer, reader)
        assert all(map(same_bits, target.values(), state.values())), (writer, reader)


OFFS = (-64, -63, -1, 0, 1, 63, 64)


def test_tensors_that_end_near_the_end_of_a_block_come_back(tmp_path):
    head = len(frame_of(torch.uint8, (BLOCK,)).head)
    sizes = {f"block{off:+}": BLOCK - head + off for off in OFFS}
    # torch puts what follows the elements at a multiple of 64, so an item grows in steps.
    tail = len(frame_of(torch.uint8, (BLOCK,)).tail)
    sizes |= {f"item{off:+}": BLOCK - head - tail // 64 * 64 + off for off in range(-256, 192, 64)}
    sizes["two blocks"] = 2 * BLOCK - head
    state = {key: random_bits((size,), torch.uint8, n) for n, (key, size) in enumerate(sizes.items())}
    state["large"] = random_bits((1100, 2001), torch.float32, 99)  # more than two blocks
    save(state, tmp_path)
    stored = {index.fqn: item for index, item in manifest_of(tmp_path).stored.items()}
    assert all(stored[f"block{off:+}"].data + sizes[f"block{off:+}"] == BLOCK + off for off in OFFS)
    assert {BLOCK - 64, BLOCK, BLOCK + 64} <= {item.extent for item in stored.values()}
    assert stored["large"].length > 2 * BLOCK and xc.verify(tmp_path).ok
    for reader in READERS:
        target = zeros(state)
        load(target, tmp_path, reader)
        assert all(map(same_bits, target.values(), state.values())), reader


class RawSave(dcp.DefaultSavePlanner):
    """Writes objects of bytes without pickling them."""

    def transform_object(self, write_item, object):
        return io.BytesIO(object)


class RawLoad(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.state_dict[read_item.dest_index.fqn] = self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_items_that_end_near_the_end_of_a_block_come_back(tmp_path):
    lengths = [
        0,
        1,
        63,
        64,
        65,
        *((256 << 10) + off for off in OFFS),
        *(n * BLOCK + off for off in OFFS for n in (1, 2)),
    ]
    state = {str(n): random_bits((n,), torch.uint8, n).numpy().tobytes() for n in lengths}
    save(state, tmp_path, planner=RawSave())
    assert {item.length for item in manifest_of(tmp_path).stored.values()} == set(lengths)
    target = dict.fromkeys(state, b"")
    load(target, tmp_path, planner=RawLoad())
    assert target == state
    assert xc.verify(tmp_path).ok


@every_pair
def test_planners_of_torch_xla_work_with_our_storage(writer, reader, tmp_path):
    # More bytes than a read job has, so that several threads call the planner.
    hosts = {"tiled": random_bits((64, 96 << 10), torch.int32), "rows": random_bits((8, 6), torch.float32, 1)}
    hosts["whole"] = random_bits((5, 3), torch.bfloat16, 2)
    specs = {"tiled": ("a", None), "rows": ("b", None), "whole": (None, None)}
    state = {"model": {key: put(host, mesh((8, 1)), specs[key]) for key, host in hosts.items()}, "step": 7}
    save(state, tmp_path, writer, torch_xla_checkpoint.SPMDSavePlanner())
    target = {"model": {key: put(torch.zeros_like(h), mesh((4, 2)), specs[key]) for key, h in hosts.items()}, "step": 0}
    load(target, tmp_path, reader, torch_xla_checkpoint.SPMDLoadPlanner())
    assert target["step"] == 7
    for key, host in hosts.items():
        assert holds(target["model"][key], host), key
    assert xc.verify(tmp_path).ok


class Alone(dcp.DefaultLoadPlanner):
    """Notices when two threads ask for buffers at the same time, or one asks while another commits."""

    def __init__(self):
        super().__init__()
        self.inside, self.met = 0, False

    def _visit(self):
        self.inside += 1
        self.met |= self.inside > 1
        time.sleep(0.005)
        self.inside -= 1

    def resolve_tensor(self, read_item):
        self._visit()
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item, tensor):
        self._visit()


@pytest.mark.slow
def test_planners_without_thread_safety_get_one_call_at_a_time(tmp_path):
    """torch_xla's planner fetches a tensor's shards on the first call. Two calls at once lose data."""
    state = {str(n): random_bits((33 << 20,), torch.uint8, n) for n in range(4)}
    save(state, tmp_path)
    planner, target = Alone(), zeros(state)
    dcp.load(target, storage_reader=xc.ShardReader(tmp_path, threads=4), planner=planner)
    assert all(map(same_bits, target.values(), state.values()))
    assert not planner.met


def test_our_planners_and_stock_planners_exchange_checkpoints_through_our_storage(tmp_path):
    host = random_bits((24, 10), torch.float32)
    save({"t": put(host, mesh((4, 2)), ("a", "b")), "n": 3}, tmp_path / "a", planner=xc.SPMDSavePlanner())
    target = {"t": torch.zeros_like(host), "n": 0}
    load(target, tmp_path / "a")
    assert same_bits(target["t"], host) and target["n"] == 3
    save({"t": host, "n": 3}, tmp_path / "b")
    target = {"t": put(torch.zeros_like(host), mesh((2, 4)), ("b", "a")), "n": 0}
    load(target, tmp_path / "b", planner=xc.SPMDLoadPlanner())
    assert holds(target["t"], host) and target["n"] == 3


class Labelled(torch.Tensor):
    """A subclass of tensor."""


def quantized(values, scale=0.5):
    return torch.quantize_per_tensor(values, scale, 3, torch.quint8)


base = random_bits((6, 8), torch.int8).float()
complex_base = torch.complex(base, base + 1)
UNUSUAL = {
    "transposed": base.t(),
    "strided": base[::2, 1::3],
    "row of a large storage": torch.arange(1 << 20).view(-1, 8)[77],
    "expanded": base[:, :1].expand(6, 5),
    "conjugate": complex_base.conj(),
    "negative": complex_base.conj().imag,
    "parameter": torch.nn.Parameter(base.clone()),
    "parameter, transposed": torch.nn.Parameter(base.t()),
    "channels last": random_bits((2, 3, 4, 5), torch.int16).contiguous(memory_format=torch.channels_last),
    "0-d view": base[2, 3],
    "inference": torch.inference_mode()(base.clone)(),
}


@every_pair
def test_tensors_of_every_memory_layout_are_saved_by_value(writer, reader, tmp_path):
    save(UNUSUAL, tmp_path, writer)
    target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in UNUSUAL.items()}
    load(target, tmp_path, reader)
    for key, value in UNUSUAL.items():
        assert torch.equal(target[key], value.detach()), key
    assert xc.verify(tmp_path).ok
    if writer == "ours":
        assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 100_000, (
            "more than the elements is saved"
        )


@pytest.mark.parametrize("reader", READERS)
def test_targets_of_every_memory_layout_are_loaded(reader, tmp_path):
    values = {key: value.detach() * 1 for key, value in UNUSUAL.items() if key not in ("expanded", "inference")}
    save(values, tmp_path)
    target = {
        "transposed": torch.zeros(6, 8).t(),
        "strided": torch.zeros(6, 8)[::2, 1::3],
        "row of a large storage": torch.zeros(3, 8, dtype=torch.int64)[1],
        "conjugate": torch.zeros(6, 8, dtype=torch.complex64).conj(),
        "negative": torch.zeros(6, 8, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.zeros(6, 8)),
        "parameter, transposed": torch.nn.Parameter(torch.zeros(6, 8).t()),
        "channels last": torch.zeros(2, 3, 4, 5, dtype=torch.int16).contiguous(memory_format=torch.channels_last),
        "0-d view": torch.zeros(6, 8)[2, 3],
    }
    strides = {key: tensor.stride() for key, tensor in target.items()}
    load(target, tmp_path, reader)
    for key, value in values.items():
        assert torch.equal(target[key], value) and target[key].stride() == strides[key], key


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64), (torch.int64, torch.uint8)],
    ids=str,
)
def test_dcps_planner_casts_with_our_reader_as_with_dcps_reader(saved, wanted, tmp_path):
    state = {str(n): torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(saved) for n, shape in enumerate(SHAPES)}
    save(state, tmp_path)
    targets = [{key: torch.zeros(value.shape, dtype=wanted) for key, value in state.items()} for _ in READERS]
    for target, reader in zip(targets, READERS):
        load(target, tmp_path, reader)
    for key, value in state.items():
        assert all(same_bits(target[key], value.to(wanted)) for target in targets)


SHAPES = [(), (3,), (4, 5), (0, 2)]


@every_pair
def test_quantized_tensors_come_back(writer, reader, tmp_path):
    state = {"q": quantized(base.abs()), "plain": base}
    save(state, tmp_path, writer)
    target = {"q": quantized(torch.zeros_like(base)), "plain": torch.zeros_like(base)}
    load(target, tmp_path, reader)
    assert torch.equal(target["q"].int_repr(), state["q"].int_repr()) and torch.equal(target["plain"], base)
    assert xc.verify(tmp_path).ok


@every_pair
def test_tensors_of_a_subclass_come_back_if_the_subclass_is_a_safe_global(writer, reader, tmp_path):
    saved = base.clone().as_subclass(Labelled)
    save({"t": saved}, tmp_path, writer)
    with torch.serialization.safe_globals([Labelled]):
        target = {"t": torch.zeros_like(base).as_subclass(Labelled)}
        load(target, tmp_path, reader)
        assert type(target["t"]) is Labelled and torch.equal(target["t"], saved)
    with pytest.raises(CheckpointException) as caught:
        load({"t": torch.zeros_like(base)}, tmp_path, reader)
    assert "Labelled" in str(cause(caught))
    assert reader == "stock" or isinstance(cause(caught), xc.UnsafeObjectError)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("planner", [xc.SPMDSavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_refused_by_name_and_the_old_checkpoint_stays(layout, planner, tmp_path):
    save({"t": base}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        save({"m": {"ok": base, "s": getattr(torch.eye(3), layout)()}}, tmp_path, planner=planner())
    assert isinstance(cause(caught), xc.CheckpointError)
    assert all(part in str(cause(caught)) for part in ("sparse", "cannot be saved", "to_dense"))
    assert "'m.s'" in str(cause(caught))
    target = {"t": torch.zeros_like(base)}
    load(target, tmp_path)
    assert torch.equal(target["t"], base)


def test_dcp_to_torch_save_opens_our_checkpoint(tmp_path):
    host = random_bits((24, 10), torch.bfloat16)
    state = {"m": {"t": put(host, mesh((4, 2)), ("a", "b")), "l": [base, 3]}, "step": 7, "empty": torch.zeros(0, 2)}
    xc.save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    plain = torch.load(tmp_path / "c.pt", weights_only=True)
    assert same_bits(plain["m"]["t"], host) and torch.equal(plain["m"]["l"][0], base) and plain["m"]["l"][1] == 3
    assert plain["step"] == 7 and plain["empty"].shape == (0, 2)


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False, "thread_count": 3}], ids=str)
def test_checkpoints_of_the_stock_writer_with_threads_are_read(options, tmp_path):
    state = {str(n): random_bits((n, 50), torch.float32, n) for n in range(1, 12)}
    dcp.save({"m": state, "words": "abc"}, storage_writer=dcp.FileSystemWriter(tmp_path, **options))
    assert len(list(tmp_path.glob("*.distcp"))) >= 3
    for planner in (xc.SPMDLoadPlanner(), None):
        target = {"m": zeros(state), "words": ""}
        load(target, tmp_path, planner=planner)
        assert all(map(same_bits, target["m"].values(), state.values())) and target["words"] == "abc"
    assert xc.verify(tmp_path).ok


class Masked(io.RawIOBase):
    """A stream that changes every byte of another stream."""

    def __init__(self, inner):
        super().__init__()
        self._inner = inner

    def writable(self):
        return True

    readable = writable

    def write(self, data):
        self._inner.write(bytes(np.frombuffer(data, dtype=np.uint8) ^ 0x5A))
        return len(memoryview(data))

    def readinto(self, into):
        data = self._inner.read(len(into))
        into[: len(data)] = bytes(np.frombuffer(data, dtype=np.uint8) ^ 0x5A)
        return len(data)


class Masking(StreamTransformExtension):
    """A stand-in for encryption."""

    registry_name = staticmethod(lambda: "test.masking")
    from_descriptor = staticmethod(lambda version: Masking())

    def get_descriptor(self):
        return "test.masking/1"

    def transform_to(self, output):
        return Masked(output)

    transform_from = transform_to


@pytest.fixture
def masked(tmp_path):
    """A checkpoint that stock DCP wrote through an extension, and its tensors."""
    state = {"a": random_bits((300, 7), torch.float32), "b": torch.tensor(3)}
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Masking()])
    dcp.save({"m": state, "words": "abc"}, storage_writer=writer)
    assert b"data.pkl" not in next(tmp_path.glob("*.distcp")).read_bytes()
    return tmp_path, state


def test_items_written_through_a_dcp_extension_are_read(masked, monkeypatch):
    path, state = masked
    made = ExtensionRegistry.__init__
    monkeypatch.setattr(ExtensionRegistry, "__init__", lambda self: (made(self), self.register(Masking))[0])
    for planner in (xc.SPMDLoadPlanner(), None):
        target = {"m": zeros(state), "words": ""}
        load(target, path, planner=planner)
        assert all(map(same_bits, target["m"].values(), state.values())) and target["words"] == "abc"


def test_a_missing_dcp_extension_is_named_with_the_key_and_is_no_damage(masked):
    path, state = masked
    with pytest.raises(xc.CheckpointError, match=r"'m\.[ab]'.*test\.masking/1") as caught:
        xc.load({"m": zeros(state)}, path)
    assert not isinstance(caught.value, xc.CorruptCheckpointError)
    report = xc.verify(path)
    assert report.ok and report.keys == (), report


@pytest.fixture
def group():
    """A process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_pair
def test_a_rank_checkpoint_without_collectives_is_read_and_verified(writer, reader, tmp_path, group):
    state = {"t": random_bits((50, 7), torch.float32)}
    dcp.save({"m": state, "n": 3}, storage_writer=WRITERS[writer](tmp_path), use_collectives=False)
    assert (tmp_path / "__0.metadata").exists() and not (tmp_path / ".metadata").exists()
    target = {"m": zeros(state), "n": 0}
    load(target, tmp_path, reader)
    assert same_bits(target["m"]["t"], state["t"]) and target["n"] == 3
    report = xc.verify(tmp_path)
    assert report.ok and report.bytes_read > state["t"].nbytes
    assert report.checked_by == ("xxh3_64" if writer == "ours" else "crc32")
    (file,) = tmp_path.glob("*.distcp")
    data = file.read_bytes()
    at = data.index(state["t"].numpy().tobytes()) + 11
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert xc.verify(tmp_path).keys == ("m.t",)


def test_our_planners_read_a_rank_checkpoint_without_collectives(tmp_path, group):
    host = random_bits((16, 6), torch.float32)
    state = {"t": put(host, mesh((4, 2)), ("a", "b"))}
    writer = xc.ShardWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=xc.SPMDSavePlanner(), use_collectives=False)
    target = {"t": put(torch.zeros_like(host), mesh((2, 4)), ("b", "a"))}
    xc.load(target, tmp_path)
    assert holds(target["t"], host)


# The manifest.


def test_the_manifest_holds_user_metadata_step_and_software_versions(tmp_path):
    about = {"run": "é ☃ \U0001f600", "losses": [1.5, 2.25e-300, None], "nested": {"": True}, "quote": 'a"b\\\n\x00'}
    state = {"t": put(torch.ones(8, 4), mesh((4, 2)), ("a", "b")), "h": torch.ones(2), "n": 1}
    xc.save(state, tmp_path, step=12, user_metadata=about)
    found = manifest_of(tmp_path)
    assert found.user_metadata == about and found.step == 12
    assert found.software["torch"] == torch.__version__ and {"python", "torch_xla"} <= set(found.software)
    shardings = {index.fqn: item.sharding for index, item in found.stored.items()}
    assert "devices=[4,2]" in shardings["t"] and shardings["h"] == "host" and shardings["n"] is None
    (file,) = tmp_path.glob("manifest-*.json")
    assert file.name == f"manifest-{found.save_id}.json" and file.read_bytes().isascii()
    assert json.loads(file.read_bytes())["user_metadata"] == about
    assert {name: (tmp_path / name).stat().st_size for name in found.files} == found.files


def test_a_writer_copies_the_user_metadata(tmp_path):
    about = {"tokens": 100, "seen": [1]}
    writer = xc.ShardWriter(tmp_path, user_metadata=about)
    about["tokens"] = 200  # as a training loop may do while an async save runs
    about["seen"].append(2)
    xc.save({"t": torch.ones(2)}, storage_writer=writer)
    assert manifest_of(tmp_path).user_metadata == {"tokens": 100, "seen": [1]}


def test_step_and_user_metadata_default_to_none(tmp_path):
    xc.save({"t": torch.ones(2)}, tmp_path)
    found = manifest_of(tmp_path)
    assert found.step is None and found.user_metadata is None


def test_a_checkpoint_of_the_stock_writer_has_no_manifest(tmp_path):
    save({"t": torch.ones(2)}, tmp_path, "stock")
    assert manifest_of(tmp_path) is None


KEYS = [
    "é.λ ☃",
    "\U0001f600",
    "q\"uo'te",
    "new\nline\r\t",
    "\x00null",
    "back\\slash",
    "\ud800 alone",
    "\udfff",
    "",
    " ",
]


def test_keys_with_unusual_characters_come_back(tmp_path):
    state = {key: torch.full((3,), float(n)) for n, key in enumerate(KEYS)}
    about = dict(zip(KEYS, range(len(KEYS))))
    xc.save({**state, "object \ud800": ("a\udc00",), "nested": {"\ud800": base}}, tmp_path, user_metadata=about)
    assert manifest_of(tmp_path).user_metadata == about
    assert set(manifest_of(tmp_path).metadata.state_dict_metadata) == {*KEYS, "object \ud800", "nested.\ud800"}
    for reader in READERS:
        target = zeros(state)
        load(target, tmp_path, reader)
        assert all(map(same_bits, target.values(), state.values())), reader
    target = {"object \ud800": None, "nested": {"\ud800": torch.zeros_like(base)}}
    xc.load(target, tmp_path)
    assert target["object \ud800"] == ("a\udc00",) and torch.equal(target["nested"]["\ud800"], base)
    assert xc.verify(tmp_path).ok


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(), max_size=5), min_size=1, max_size=5, unique=True))
def test_random_keys_come_back(keys):
    state = {key: torch.full((2,), float(n)) for n, key in enumerate(keys)}
    with tempfile.TemporaryDirectory() as folder:
        xc.save(state, folder, sync=False)
        target = zeros(state)
        xc.load(target, folder)
    assert all(map(same_bits, target.values(), state.values()))


class Secret:
    """An object that only a pickle can hold."""


class Recording(dcp.DefaultSavePlanner):
    """A planner that records data of its own in the metadata."""

    def __init__(self, record):
        super().__init__()
        self._record = record

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self._record)


RECORDS = {
    "none": None,
    "paths": {"t": ("t", 0)},
    "floats": {"t": (1.5,)},
    "a set": {"t", "u"},
    "a string": "pickled",
    "numbers": {1: ("t",)},
    "flags": {"t": (True,)},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_planner_data_comes_back_unchanged(record, tmp_path, caplog):
    save({"t": base}, tmp_path, planner=Recording(record))
    for reader in READERS.values():
        found = reader(tmp_path).read_metadata().planner_data
        assert found == record and repr(found) == repr(record)
    target = {"t": torch.zeros_like(base)}
    xc.load(target, tmp_path)
    assert torch.equal(target["t"], base) and xc.verify(tmp_path).ok
    assert [record for record in caplog.records if record.name.startswith("torch_xla_ckpt")] == []


def test_planner_data_that_could_run_code_is_left_out_with_a_warning(tmp_path, caplog):
    save({"t": base}, tmp_path, planner=Recording(Secret()))
    target = {"t": torch.zeros_like(base)}
    xc.load(target, tmp_path)
    assert torch.equal(target["t"], base)
    assert "the planner data in .metadata is ignored" in caplog.text and "Secret" in caplog.text
    assert xc.verify(tmp_path).ok


@pytest.fixture
def plan_cache():
    """Clear DCP's plan cache, which belongs to the process."""
    names = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    yield
    for name in names:
        getattr(SavePlanner, name).clear()


def test_a_cached_dcp_plan_is_refused_and_leaves_all_files_as_they_were(tmp_path, plan_cache):
    def planner():
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    save({"t": base}, tmp_path / "a", planner=planner())
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    for folder in ("a", "b", "a"):
        with pytest.raises(CheckpointException) as caught:
            save({"t": base + 1}, tmp_path / folder, planner=planner())
        assert isinstance(cause(caught), xc.CheckpointError)
        assert "enable_plan_caching=False" in str(cause(caught))
        assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
        assert list((tmp_path / "b").glob("*metadata*")) == []
    save({"t": base + 2}, tmp_path / "a")
    target = {"t": torch.zeros_like(base)}
    load(target, tmp_path / "a")
    assert torch.equal(target["t"], base + 2)


# Options.


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value] if levels % 2 else {"a": value}
    return value


@pytest.mark.parametrize("levels", [399, 400])
def test_user_metadata_may_be_nested_400_levels_deep(tmp_path, levels):
    xc.save({"t": torch.ones(2)}, tmp_path, user_metadata=nested(levels))
    assert manifest_of(tmp_path).user_metadata == nested(levels)
    with pytest.raises(ValueError, match="user_metadata is nested more than 400 levels deep"):
        xc.save({"t": torch.ones(2)}, tmp_path, user_metadata=nested(levels + 400))


WRONG = {
    "NaN": ({"user_metadata": {"loss": math.nan}}, ValueError),
    "infinity": ({"user_metadata": [math.inf]}, ValueError),
    "no JSON": ({"user_metadata": {"shape": {1, 2}}}, TypeError),
    "a tensor": ({"user_metadata": torch.ones(1)}, TypeError),
    "tuples as keys": ({"user_metadata": {(1, 2): 3}}, TypeError),
    "too deep to be read": ({"user_metadata": nested(401)}, ValueError),
    "too deep to be written": ({"user_metadata": nested(5000)}, ValueError),
    "step is a string": ({"step": "x"}, TypeError),
    "step is a fraction": ({"step": 1.5}, TypeError),
    "no budget": ({"memory_budget": 0}, ValueError),
    "negative budget": ({"memory_budget": -1}, ValueError),
    "no threads": ({"threads": 0}, ValueError),
}


@pytest.mark.parametrize(("options", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_fails_when_the_writer_or_reader_is_made(options, error, tmp_path):
    with pytest.raises(error):
        xc.ShardWriter(tmp_path / "c", **options)
    if not {"step", "user_metadata"} & set(options):
        with pytest.raises(error):
            xc.ShardReader(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", [np.int64(12), np.uint8(12), torch.tensor(12), 12], ids=lambda step: str(type(step)))
def test_a_step_may_have_any_integer_type(step, tmp_path):
    xc.save({"t": torch.ones(2)}, tmp_path, step=step)
    assert manifest_of(tmp_path).step == 12


def test_save_returns_the_metadata_that_stock_dcp_reads(tmp_path):
    state = {"t": put(torch.ones(8, 4), mesh((4, 2)), ("a", "b")), "n": 1}
    metadata = xc.save(state, tmp_path)
    read = dcp.FileSystemReader(tmp_path).read_metadata()
    assert isinstance(metadata, Metadata) and metadata.state_dict_metadata == read.state_dict_metadata
    assert metadata.storage_data == read.storage_data and len(metadata.storage_data) == 9
    assert metadata.storage_meta.save_id == read.storage_meta.save_id == manifest_of(tmp_path).save_id
    for place in metadata.storage_data.values():
        assert place.offset + place.length <= (tmp_path / place.relative_path).stat().st_size


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path):
    writer, reader = xc.ShardWriter(tmp_path / "elsewhere"), xc.ShardReader(tmp_path / "elsewhere")
    for n in range(3):
        dcp.save({"t": torch.full((n + 2,), float(n))}, checkpoint_id=tmp_path / str(n), storage_writer=writer)
    save_ids = set()
    for n in (2, 0, 1, 1):
        target = {"t": torch.zeros(n + 2)}
        dcp.load(target, checkpoint_id=tmp_path / str(n), storage_reader=reader)
        assert torch.equal(target["t"], torch.full((n + 2,), float(n)))
        assert reader.stats.bytes_needed == 4 * (n + 2), "bytes of the last load only"
        save_ids.add(reader.manifest.save_id)
        assert len(list((tmp_path / str(n)).iterdir())) == 3 and xc.verify(tmp_path / str(n)).ok
    assert len(save_ids) == 3 and not (tmp_path / "elsewhere").exists()


def test_a_writer_saves_again_after_a_save_that_failed(tmp_path):
    writer = xc.ShardWriter(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save({"s": torch.eye(3).to_sparse()}, storage_writer=writer)
    dcp.save({"t": base}, storage_writer=writer)
    target = {"t": torch.zeros_like(base)}
    load(target, tmp_path)
    assert torch.equal(target["t"], base) and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("url", ["", "memory://storage/pickled"], ids=["local", "url"])
def test_a_writer_and_a_reader_can_be_sent_to_another_process(url, tmp_path):
    path = url or tmp_path
    writer, reader = xc.ShardWriter(path, step=3, user_metadata={"a": 1}), xc.ShardReader(path)
    for _ in range(2):  # before they are used, and after
        writer, reader = pickle.loads(pickle.dumps(writer)), pickle.loads(pickle.dumps(reader))
        dcp.save({"t": base}, storage_writer=writer)
        target = {"t": torch.zeros_like(base)}
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["t"], base) and reader.manifest.step == 3
