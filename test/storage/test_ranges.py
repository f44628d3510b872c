"""A load reads only the bytes that it needs, each once: the arithmetic against brute force, and real loads."""

import itertools
import math
import shutil

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import torch_xla_ckpt as xc
from support.mapped import mapped_at, watch_puts
from support.meshes import holds, mesh, put, random_bits, same_bits, settle
from torch_xla_ckpt.storage import ranges

BLOCK = 4 << 20
FRAME = 4096  # more bytes than an item has in addition to its elements


# The arithmetic.


@st.composite
def regions(draw, extent=9, dims=4):
    """The shape of an array, and a region of it that is not empty."""
    shape = draw(st.lists(st.integers(1, extent), max_size=dims))
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(1, n - offset)) for n, offset in zip(shape, offsets)]
    return tuple(shape), tuple(offsets), tuple(sizes)


def wanted(shape, itemsize, offsets, sizes):
    """For each byte of an array, whether the byte belongs to a region."""
    mask = np.zeros((*shape, itemsize), dtype=bool)
    mask[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))] = True
    return mask.reshape(-1)


def runs(mask, gap):
    """The runs of True. Runs with a gap of at most ``gap`` bytes count as one."""
    found = []
    for position in np.flatnonzero(mask).tolist():
        if found and position - found[-1][1] <= gap:
            found[-1][1] = position + 1
        else:
            found.append([position, position + 1])
    return [tuple(run) for run in found]


@pytest.mark.slow
@settings(max_examples=500)
@given(regions(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 40))
def test_the_ranges_of_a_region_miss_no_byte_and_add_only_gaps(region, itemsize, gap):
    shape, offsets, sizes = region
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranges, "MAX_GAP", gap)
        found = ranges.ranges_of(shape, itemsize, offsets, sizes).tolist()
    assert list(map(tuple, found)) == runs(wanted(shape, itemsize, offsets, sizes), gap)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 200_000), st.data())
def test_rows_of_large_tensors_share_a_range_if_their_gap_is_small(rows, row, data):
    first = data.draw(st.integers(0, row - 1) | st.integers(max(0, row - ranges.MAX_GAP - 9), row - 1))
    size = data.draw(st.integers(1, row - first))
    found = ranges.ranges_of((rows, row), 1, (0, first), (rows, size)).tolist()
    starts = [number * row + first for number in range(rows)]
    together = row - size <= ranges.MAX_GAP
    expected = [(starts[0], starts[-1] + size)] if together else [(start, start + size) for start in starts]
    assert list(map(tuple, found)) == expected


@pytest.mark.parametrize("beyond", [0, 1])
def test_rows_with_a_gap_of_max_gap_bytes_share_a_range(beyond):
    row = ranges.MAX_GAP + 8 + beyond
    assert len(ranges.ranges_of((3, row), 1, (0, 0), (3, 8))) == (3 if beyond else 1)


def test_positions_beyond_four_gigabytes_do_not_overflow():
    row = 3 << 30
    found = ranges.ranges_of((4, row), 4, (1, row - 5), (3, 2)).tolist()
    assert found == [[((n * row) + row - 5) * 4, ((n * row) + row - 3) * 4] for n in (1, 2, 3)]


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda span: (span[0], sum(span))), max_size=9)


@settings(max_examples=300)
@given(spans, st.integers(0, 9))
def test_merged_ranges_hold_every_byte_exactly_once(spans, gap):
    mask = np.zeros(90, dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    assert ranges.merged(iter(spans), gap) == runs(mask, gap)


@settings(max_examples=300)
@given(spans, st.integers(1, 25))
def test_blocks_of_names_exactly_the_touched_blocks(spans, block):
    touched = {position // block for start, stop in spans for position in range(start, stop)}
    assert ranges.blocks_of(iter(spans), block) == sorted(touched)


# Loading.


class Requests:
    """Records the byte ranges that are requested from memory:// folders, which are read like object stores."""

    def __init__(self, patched):
        self.seen = []
        real = MemoryFileSystem.cat_ranges

        def cat_ranges(filesystem, paths, starts, ends, **options):
            self.seen += zip(paths, starts, ends)
            return real(filesystem, paths, starts, ends, **options)

        patched.setattr(MemoryFileSystem, "cat_ranges", cat_ranges)

    @property
    def nbytes(self):
        return sum(stop - start for _, start, stop in self.seen)

    @property
    def twice(self):
        """Pairs of requested ranges that overlap."""
        pairs = itertools.pairwise(sorted(self.seen))
        return [(a, b) for a, b in pairs if a[0] == b[0] and b[1] < a[2]]


@pytest.fixture
def requests(monkeypatch):
    return Requests(monkeypatch)


@pytest.fixture
def remote(request):
    """A folder in memory that only this test uses."""
    url = f"memory://ranges/{abs(hash(request.node.nodeid))}"
    yield url
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(url):
        filesystem.rm(url, recursive=True)


# Shape in 32-bit elements, and the mesh and spec of both sides. Each tensor has 8 MiB or more.
RESHARDINGS = {
    "columns out of rows": ((1024, 4096), (8, 1), ("a", None), (8, 1), (None, "a")),
    "rows out of columns": ((1024, 4096), (8, 1), (None, "a"), (8, 1), ("a", None)),
    "partly replicated": ((1024, 4096), (8, 1), ("a", None), (4, 2), ("a", None)),
    "partly replicated, by columns": ((1024, 4096), (4, 2), ("a", "b"), (4, 2), (None, "b")),
    "fully replicated": ((1024, 2048), (4, 2), ("a", "b"), (4, 2), (None, None)),
    "grid onto grid": ((1024, 4096), (4, 2), ("a", "b"), (2, 4), ("a", "b")),
    "uneven": ((1001, 3001), (8, 1), ("a", None), (8, 1), (None, "a")),
    "as it was": ((1024, 4096), (8, 1), ("a", None), (8, 1), ("a", None)),
}


@pytest.mark.parametrize("verify", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", RESHARDINGS)
def test_resharding_requests_every_byte_once_and_few_others(case, verify, requests, remote):
    """No two requests overlap, and the report counts all of them."""
    shape, *sides = RESHARDINGS[case]
    host = random_bits(shape, torch.int32)
    xc.save({"t": put(host, mesh(sides[0]), sides[1])}, remote)
    requests.seen.clear()
    target = {"t": put(torch.zeros_like(host), mesh(sides[2]), sides[3])}
    report = xc.load(target, remote, verify=verify)
    assert holds(target["t"], host)
    assert report.bytes_needed >= host.nbytes and requests.twice == []
    assert report.bytes_read == requests.nbytes
    assert host.nbytes <= report.bytes_read <= 1.05 * host.nbytes


@pytest.mark.parametrize("case", RESHARDINGS)
def test_resharding_from_a_disk_reads_few_unneeded_bytes(case, tmp_path):
    shape, *sides = RESHARDINGS[case]
    host = random_bits(shape, torch.int32)
    xc.save({"t": put(host, mesh(sides[0]), sides[1])}, tmp_path, sync=False)
    target = {"t": put(torch.zeros_like(host), mesh(sides[2]), sides[3])}
    report = xc.load(target, tmp_path)
    assert holds(target["t"], host)
    assert host.nbytes <= report.bytes_read <= 1.05 * host.nbytes
    assert report.bytes_read <= sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert report.bytes_needed == host.nbytes, "replicas in one process need a byte once"


def test_replicas_in_one_process_share_their_reads(remote, requests):
    host = random_bits((1024, 1024), torch.int32)
    xc.save({"t": host}, remote)
    counts = {}
    for name, spec in {"tiled": ("a", "b"), "two replicas": ("a", None), "eight": (None, None)}.items():
        requests.seen.clear()
        xc.load({"t": put(torch.zeros_like(host), mesh((4, 2)), spec)}, remote)
        assert requests.twice == []
        counts[name] = requests.nbytes
    assert len(set(counts.values())) == 1, counts


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 40 tensors of 512 KiB and an object, 20 MiB in all, and its tensors."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    hosts = {f"{n:02}": random_bits((128, 1024), torch.int32, n) for n in range(40)}
    xc.save({"model": hosts, "words": "word " * 100_000}, path, sync=False)
    return path, hosts


@pytest.mark.parametrize("keys", [["07"], ["00", "39"], ["10", "11", "12"], []], ids=str)
def test_keys_outside_of_the_target_are_not_read(large, keys):
    path, hosts = large
    target = {"model": {key: torch.zeros_like(hosts[key]) for key in keys}}
    report = xc.load(target, path, unexpected="ignore")
    assert all(same_bits(tensor, hosts[key]) for key, tensor in target["model"].items())
    needed = sum(hosts[key].nbytes for key in keys)
    assert report.bytes_needed == needed <= report.bytes_read <= needed + len(keys) * FRAME


def test_loading_an_object_reads_no_tensor(large):
    path, _ = large
    target = {"words": ""}
    report = xc.load(target, path)
    assert target["words"] == "word " * 100_000
    assert 500_000 <= report.bytes_needed <= report.bytes_read <= 500_000 + FRAME


class Part(dcp.DefaultLoadPlanner):
    """DCP's planner, changed to load only a region of a tensor, which begins at ``offsets``."""

    def __init__(self, offsets):
        super().__init__()
        self.offsets = torch.Size(offsets)

    def create_local_plan(self):
        ((key, part),) = self.state_dict.items()
        chunks = [ChunkStorageMetadata(self.offsets, part.shape)]
        return LoadPlan(create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], chunks))

    def lookup_tensor(self, index):
        assert index == MetadataIndex(index.fqn, self.offsets)
        return self.state_dict[index.fqn]


def load_part(path, host, offsets, sizes, **options):
    """Load a region, and return the number of bytes read."""
    reader = xc.ShardReader(path, **options)
    part = torch.zeros(sizes, dtype=host.dtype)
    dcp.load({"t": part}, storage_reader=reader, planner=Part(offsets))
    assert same_bits(part, host[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))])
    assert reader.stats.bytes_needed == part.nbytes
    return reader.stats.bytes_read


@pytest.fixture(scope="module")
def chunk(tmp_path_factory):
    """A checkpoint of one host tensor, a single chunk of 24 MiB in rows of 12 KiB, and the tensor."""
    path = tmp_path_factory.mktemp("chunk") / "checkpoint"
    host = random_bits((2048, 3072), torch.int32)
    xc.save({"t": host}, path, sync=False)
    return path, host


@pytest.mark.parametrize(("first", "count"), [(0, 1), (100, 3), (1000, 20), (2047, 1), (0, 2048)])
def test_loading_a_few_rows_of_a_large_chunk_reads_only_their_blocks(chunk, first, count):
    path, host = chunk
    reader = xc.ShardReader(path)
    ((stored),) = reader.read_metadata().storage_data.values()
    begin, end = (stored.data + n * 3072 * 4 for n in (first, first + count))
    item = -(-stored.length // 64) * 64
    blocks = sum(min(BLOCK, item - n * BLOCK) for n in range(begin // BLOCK, -(-end // BLOCK)))
    assert load_part(path, host, (first, 0), (count, 3072)) == blocks
    assert load_part(path, host, (first, 0), (count, 3072), verify=False) == count * 3072 * 4


def test_loading_a_row_across_two_blocks_reads_both(chunk):
    path, host = chunk
    ((stored),) = xc.ShardReader(path).read_metadata().storage_data.values()
    row = (BLOCK - stored.data) // (3072 * 4)  # the row that crosses the end of the first block
    assert load_part(path, host, (row, 0), (1, 3072)) == 2 * BLOCK
    assert load_part(path, host, (row - 1, 0), (1, 3072)) == load_part(path, host, (row + 1, 0), (1, 3072)) == BLOCK


def test_columns_of_long_rows_are_read_without_the_bytes_between_them(tmp_path):
    host = random_bits((20, 60_000), torch.int32)  # rows of 240 kB
    xc.save({"t": host}, tmp_path, sync=False)
    assert load_part(tmp_path, host, (3, 500), (15, 1000), verify=False) == 15 * 1000 * 4
    rows = host.nbytes // 20
    near = 60_000 - ranges.MAX_GAP // 4  # the gap between rows is MAX_GAP
    assert load_part(tmp_path, host, (0, 0), (20, near), verify=False) == 19 * rows + near * 4
    assert load_part(tmp_path, host, (0, 0), (20, near - 1), verify=False) == 20 * (near - 1) * 4


@settings(max_examples=40)
@given(st.data())
def test_any_region_is_loaded_exactly_and_reads_few_other_bytes(chunk, data):
    path, host = chunk
    offsets = [data.draw(st.integers(0, n - 1)) for n in host.shape]
    sizes = [data.draw(st.integers(1, min(300, n - offset))) for n, offset in zip(host.shape, offsets)]
    span = ((sizes[0] - 1) * 3072 + sizes[1]) * 4  # the gap between these rows is less than MAX_GAP
    assert load_part(path, host, offsets, sizes, verify=False) == span
    assert span <= load_part(path, host, offsets, sizes) <= span + 2 * BLOCK


# Memory that is passed on as it was read.


@pytest.fixture
def handed(monkeypatch):
    """For each shard that was put on a device, the file in whose memory map the shard lies."""
    return watch_puts(monkeypatch)


def test_a_box_that_equals_a_saved_chunk_is_put_on_its_device_without_a_copy(tmp_path, handed):
    host = random_bits((64, 32768), torch.int32)
    xc.save({"t": put(host, mesh((8,)), ("a", None))}, tmp_path)
    target = put(torch.zeros_like(host), mesh((8,)), ("a", None))
    xc.load({"t": target}, tmp_path)
    assert len(handed) == 8 and all(name.startswith(f"{tmp_path}/__0_") for name in handed), handed
    assert holds(target, host)
    handed.clear()
    xc.load({"t": put(torch.zeros_like(host), mesh((8,)), (None, "a"))}, tmp_path)
    assert handed == [""] * 8 or not any(".distcp" in name for name in handed), "these boxes had to be put together"


@pytest.mark.parametrize("spec", [("a", None), (None, None), None], ids=str)
def test_changing_loaded_tensors_does_not_change_the_checkpoint(tmp_path, spec):
    host = random_bits((64, 32768), torch.int32)
    saved = put(host, mesh((8,)), spec)
    xc.save({"t": saved}, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    target = put(torch.zeros_like(host), mesh((8,)), spec)
    xc.load({"t": target}, tmp_path)
    for n in range(1, 4):
        target.add_(n)
        settle()
    assert holds(target, host + 6)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert xc.verify(tmp_path).ok


def test_loaded_tensors_survive_the_deletion_of_the_checkpoint(tmp_path):
    host = random_bits((64, 32768), torch.int32)
    xc.save({"t": put(host, mesh((8,)), ("a", None))}, tmp_path / "c")
    target = put(torch.zeros_like(host), mesh((8,)), ("a", None))
    xc.load({"t": target}, tmp_path / "c")
    xc.save({"t": put(torch.zeros_like(host), mesh((8,)), ("a", None))}, tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    assert holds(target, host)


class Adopts(dcp.DefaultLoadPlanner):
    """A ``LoadSink`` of another program, which keeps the tensors that it is offered."""

    def __init__(self, takes=True):
        super().__init__()
        self.takes, self.kept, self.committed = takes, {}, []

    def adopt(self, read_item, tensor):
        if self.takes:
            self.kept[read_item.dest_index.fqn] = tensor
        return self.takes

    def buffer_bytes(self, key):
        return 0

    def commit_tensor(self, read_item, tensor):
        self.committed.append((read_item.dest_index.fqn, tensor.data_ptr()))


def test_an_adopted_tensor_lies_in_the_memory_map_and_may_be_changed(tmp_path):
    host = random_bits((3, 100_000), torch.int32)
    xc.save({"t": host}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    before = file.read_bytes()
    planner, target = Adopts(), {"t": torch.zeros_like(host)}
    dcp.load(target, storage_reader=xc.ShardReader(tmp_path), planner=planner)
    kept = planner.kept["t"]
    assert mapped_at(kept.data_ptr()) == str(file) and planner.committed == [("t", kept.data_ptr())]
    assert same_bits(kept, host) and not target["t"].any()
    kept.add_(1)
    assert same_bits(kept, host + 1) and file.read_bytes() == before and xc.verify(tmp_path).ok
    again = {"t": torch.zeros_like(host)}
    xc.load(again, tmp_path)
    assert same_bits(again["t"], host)


def test_a_planner_that_declines_a_tensor_gets_its_buffer_filled(tmp_path):
    host = random_bits((3, 100_000), torch.int32)
    xc.save({"t": host}, tmp_path)
    planner, target = Adopts(takes=False), {"t": torch.zeros_like(host)}
    dcp.load(target, storage_reader=xc.ShardReader(tmp_path), planner=planner)
    assert same_bits(target["t"], host) and planner.committed == [("t", target["t"].data_ptr())]


def test_damage_is_found_before_a_planner_adopts_memory(tmp_path):
    host = random_bits((3, 100_000), torch.int32)
    xc.save({"t": host}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    with open(file, "r+b") as opened:
        opened.seek(math.prod(host.shape) * 2)
        opened.write(b"\0damaged")
    planner = Adopts()
    with pytest.raises(BaseException) as caught:
        dcp.load({"t": torch.zeros_like(host)}, storage_reader=xc.ShardReader(tmp_path), planner=planner)
    assert isinstance(caught.value.failures[0][0], xc.CorruptCheckpointError) and planner.kept == {}


class Takes:
    """An ``ElementSink`` that copies what it is given."""

    def __init__(self):
        self.taken = {}

    def take(self, read_item, elements):
        assert elements.shape == tuple(read_item.lengths)
        self.taken[read_item.dest_index.fqn] = elements.tobytes()

    def buffer_bytes(self, key):
        return 0


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_a_sink_of_elements_gets_the_bits_of_every_region(tmp_path, writer):
    dtypes = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128]
    state = {str(dtype): random_bits((5, 7), dtype) for dtype in dtypes}
    state |= {"0-d": torch.tensor(7), "empty": torch.empty(0, 3), "conj": random_bits((4,), torch.complex64).conj()}
    xc.save(state, tmp_path) if writer == "ours" else dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    reader = xc.ShardReader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    regions = {key: value[1:4, 2:6] if value.ndim == 2 and len(value) == 5 else value for key, value in state.items()}
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(key, (0,) * value.ndim),
            torch.Size((0,) * value.ndim),
            MetadataIndex(key, (0,) * value.ndim),
            torch.Size((1, 2) if value.shape == (3, 4) else (0,) * value.ndim),
            value.shape,
        )
        for key, value in regions.items()
    ]
    sink = Takes()
    reader.read_elements(items, sink)
    for key, value in regions.items():
        plain = value.resolve_conj().contiguous().reshape(-1)
        assert sink.taken[key] == (plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""), key


def test_a_sink_of_elements_never_gets_damaged_ones(tmp_path):
    xc.save({"t": random_bits((3, 100_000), torch.int32)}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    raw = bytearray(file.read_bytes())
    raw[600_000] ^= 1
    file.write_bytes(raw)
    reader = xc.ShardReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=False)
    zero = torch.Size((0, 0))
    item = ReadItem(
        LoadItemType.TENSOR, MetadataIndex("t", zero), zero, MetadataIndex("t", zero), zero, torch.Size((3, 100_000))
    )
    sink = Takes()
    with pytest.raises(xc.CorruptCheckpointError):
        reader.read_elements([item], sink)
    assert not sink.taken
