"""Folders and files of other formats are checkpoints: xc.load, xc.restore, xc.verify, ShardReader and initial_path."""

import json
import logging
import uuid

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
from safetensors.torch import save_file

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put, random_bits, settle
from torch_xla_ckpt.formats import NAMES

STATE = {
    "layer.weight": random_bits((64, 48), torch.float32, 1),
    "layer.bias": random_bits((48,), torch.bfloat16, 2),
    "odd": random_bits((13, 7), torch.float16, 3),
    "mask": random_bits((5, 3), torch.bool, 4),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 5),
}


def same(target, expected=STATE):
    assert target.keys() == expected.keys()
    for key, value in expected.items():
        assert target[key].dtype == value.dtype and target[key].shape == value.shape
        assert torch.equal(target[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


def zeros(state=STATE):
    return {key: torch.zeros_like(value) for key, value in state.items()}


def single(folder):
    save_file(STATE, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(folder):
    keys = list(STATE)
    parts = {"model-00001-of-00002.safetensors": keys[:3], "model-00002-of-00002.safetensors": keys[3:]}
    for name, part in parts.items():
        save_file({key: STATE[key] for key in part}, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def plain_files(folder):
    for number, (key, value) in enumerate(STATE.items()):
        save_file({key: value}, folder / f"part {number} *.safetensors")


def torch_bin(folder):
    torch.save(STATE, folder / "pytorch_model.bin")


def torch_shards(folder):
    keys = list(STATE)
    parts = {"pytorch_model-00001-of-00002.bin": keys[:3], "pytorch_model-00002-of-00002.bin": keys[3:]}
    for name, part in parts.items():
        torch.save({key: STATE[key] for key in part}, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


FOLDERS = [single, sharded, plain_files, torch_bin, torch_shards]


def in_memory(folder, request):
    """The folder's files in fsspec's memory filesystem; its URL."""
    root = f"/{uuid.uuid4()}"
    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"{root}/{file.name}", file.read_bytes())
    request.addfinalizer(lambda: memory.rm(root, recursive=True))
    return f"memory:/{root}"


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("write", FOLDERS)
def test_folder_is_loaded_bit_by_bit(tmp_path, write, where, request):
    write(tmp_path)
    path = tmp_path if where == "local" else in_memory(tmp_path, request)
    target = zeros()
    report = xc.load(target, path)
    same(target)
    assert set(report.loaded) == set(STATE) and report.bytes_read <= 1.05 * report.bytes_needed
    assert xc.verify(path)


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "epoch=1.ckpt", "*.bin", "ab::cd.safetensors"])
def test_file_is_loaded_bit_by_bit(tmp_path, name, where, request):
    file = tmp_path / name
    save_file(STATE, file) if name.endswith("safetensors") else torch.save(STATE, file)
    path = file if where == "local" else in_memory(tmp_path, request) + f"/{name}"
    target = zeros()
    xc.load(target, path)
    same(target)


def test_every_dtype_of_the_format_is_read(tmp_path):
    state = {str(dtype): random_bits((3, 8), dtype) for dtype in NAMES}
    save_file(state, tmp_path / "model.safetensors")
    target = zeros(state)
    xc.load(target, tmp_path)
    same(target, state)


@pytest.mark.parametrize("write", FOLDERS)
def test_model_goes_straight_onto_a_mesh(tmp_path, write):
    write(tmp_path)
    state = {key: value for key, value in STATE.items() if value.numel()}
    target = {key: put(torch.zeros_like(value), mesh((2, 4)), ("a", "b")[: value.ndim]) for key, value in state.items()}
    report = xc.load(target, tmp_path, exclude="empty")
    assert all(holds(target[key], value) for key, value in state.items())
    assert report.bytes_read <= 1.05 * report.bytes_needed


def test_only_the_bytes_of_the_boxes_are_read(tmp_path):
    """Half of the columns of a tensor, and every other tensor of a file: no byte between them."""
    state = {f"t{n}": torch.randn(100, 40) for n in range(10)}
    save_file(state, tmp_path / "model.safetensors")
    some = {key: torch.zeros(100, 40) for key in list(state)[::2]}
    report = xc.load(some, tmp_path, unexpected="ignore")
    assert report.bytes_read == report.bytes_needed == 5 * 100 * 40 * 4
    same(some, {key: state[key] for key in some})


def test_target_below_a_key_meets_the_names_of_the_file(tmp_path):
    single(tmp_path)
    state = {"model": zeros(), "epoch": 1}
    report = xc.load(state, tmp_path, missing="keep")
    same(state["model"])
    assert report.renamed["model.odd"] == "odd" and report.missing == ("epoch",)


def test_body_of_a_model_meets_the_names_of_the_whole_model(tmp_path):
    save_file({f"model.{key}": value for key, value in STATE.items()}, tmp_path / "model.safetensors")
    target = zeros()
    xc.load(target, tmp_path)
    same(target)


def test_wrapped_model_below_a_key_meets_the_names_of_the_file(tmp_path):
    single(tmp_path)
    state = {"model": {f"_orig_module.{key}": value for key, value in zeros().items()}}
    xc.load(state, tmp_path)
    same({key.removeprefix("_orig_module."): value for key, value in state["model"].items()})


def test_prefix_is_not_guessed_where_some_keys_meet_already(tmp_path):
    """A new layer must not get the values of a layer whose name ends alike."""
    save_file({"norm.weight": torch.ones(4), "body.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    target = {"body.weight": torch.zeros(4), "decoder.norm.weight": torch.zeros(4)}
    report = xc.load(target, tmp_path, missing="keep", unexpected="ignore")
    assert report.missing == ("decoder.norm.weight",) and not target["decoder.norm.weight"].any()


def test_empty_dict_gets_all_tensors(tmp_path):
    single(tmp_path)
    state = {"model": {}}
    report = xc.load(state, tmp_path)
    same(dict(sorted(state["model"].items())), dict(sorted(STATE.items())))
    assert len(report.created) == len(STATE)


def test_policies_and_rename_work_as_for_checkpoints(tmp_path):
    single(tmp_path)
    target = {"layer.weight": torch.zeros(64, 48, dtype=torch.float64), "other": torch.zeros(13, 7).half()}
    with pytest.raises(xc.MismatchError, match="other"):
        xc.load(target, tmp_path)
    with pytest.raises(xc.MismatchError, match="float64"):
        xc.load(target, tmp_path, rename={"odd": "other"}, dtype="error", unexpected="ignore")
    report = xc.load(target, tmp_path, rename={"odd": "other"}, unexpected="ignore")
    assert report.renamed == {"other": "odd"} and list(report.cast) == ["layer.weight"]
    assert "mask" in report.unexpected


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_tied_weights_that_the_file_lacks_are_filled_from_their_twin(tmp_path, device):
    weight = torch.randn(32, 16)
    save_file({"embed.weight": weight}, tmp_path / "model.safetensors")
    with torch.device("meta" if device == "meta" else "cpu"):
        model = Tied()
    if device == "xla":
        model.embed.weight = model.head.weight = torch.nn.Parameter(model.embed.weight.detach().to("xla"))
    report = xc.restore(tmp_path, model=model)
    assert report.renamed == {"head.weight": "embed.weight"} and not report.missing
    settle()
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight.detach().cpu(), weight)


def test_missing_weight_without_a_twin_is_still_an_error(tmp_path):
    save_file({"embed.weight": torch.randn(32, 16)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Tied()
        model.head = torch.nn.Linear(16, 32, bias=False)
    with pytest.raises(xc.MismatchError, match=r"head\.weight"):
        xc.restore(tmp_path, model=model)


def test_restore_makes_a_meta_model_on_a_mesh(tmp_path):
    original = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
    xc.restore(tmp_path, model=model, sharding={"*.weight": ("a", "b")}, mesh=mesh((4, 2)))
    assert all(holds(value, original.state_dict()[key]) for key, value in model.state_dict().items())


def test_plain_dcp_reads_the_file_with_our_reader(tmp_path):
    single(tmp_path)
    target = zeros()
    dcp.load(target, storage_reader=xc.ShardReader(tmp_path), planner=xc.SPMDLoadPlanner())
    same(target)
    target = zeros()
    dcp.load(target, storage_reader=xc.ShardReader(tmp_path))
    same(target)


@pytest.mark.parametrize("write", [sharded, torch_bin])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_run_starts_from_a_model(tmp_path, write, what):
    source = tmp_path / "source"
    source.mkdir()
    if what == "file":
        single(source)
        source = source / "model.safetensors"
    else:
        write(source)
    target = {"model": zeros()}
    with xc.CheckpointManager(tmp_path / "run", initial_path=source) as manager:
        assert manager.restore_latest(target) is None
        same(target["model"])
        manager.save(1, target, force=True)
    again = {"model": zeros()}
    with xc.CheckpointManager(tmp_path / "run", initial_path=source) as manager:
        assert manager.restore_latest(again) == 1


def test_training_state_in_a_torch_file_is_restored(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optim.step()
    saved = {"state_dict": model.state_dict(), "optimizer": optim.state_dict(), "epoch": 3, "names": ["a", "b"]}
    torch.save(saved, tmp_path / "last.ckpt")
    with torch.device("meta"):
        new = torch.nn.Linear(8, 4)
    new_optim = torch.optim.AdamW(new.parameters())
    state = {"epoch": 0, "names": []}
    report = xc.restore(
        tmp_path / "last.ckpt", model=new, optimizer=new_optim, model_key="state_dict", state=state, sharding=None
    )
    assert state == {"epoch": 3, "names": ["a", "b"]} and not report.missing
    assert torch.equal(new.weight.detach().cpu(), model.weight.detach())
    moments = new_optim.state_dict()["state"][0]["exp_avg"].cpu()
    assert torch.equal(moments, optim.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("where", ["local", "remote"])
def test_transposed_and_shared_tensors_of_a_torch_file_come_back(tmp_path, where, request):
    """Of a remote file, only the directory and the pickle are read at first, which is not enough for these tensors."""
    base = torch.arange(24.0).reshape(4, 6)
    conj = torch.randn(3, dtype=torch.cfloat).conj()
    for number, state in enumerate(
        (
            {"t": base.t(), "rows": base[1:3], "same": base, "neg": conj},
            {"same": base, "t": base.t()},
            {"same": base, "pair": (base, base[0])},
            {
                "same": base,
                "sparse": torch.eye(3).to_sparse(),
                "quantized": torch.quantize_per_tensor(base, 0.5, 0, torch.qint8),
            },
        )
    ):
        torch.save(state, tmp_path / f"{number}.pt")
        path = tmp_path if where == "local" else in_memory(tmp_path, request)
        target = {"model": {}}
        xc.load(target, f"{path}/{number}.pt")
        for key, value in state.items():
            found = target["model"][key]
            if isinstance(value, tuple):
                assert all(torch.equal(a, b) for a, b in zip(found, value))
            elif value.is_sparse or value.is_quantized:
                assert torch.equal(
                    found.to_dense() if value.is_sparse else found.dequantize(),
                    value.to_dense() if value.is_sparse else value.dequantize(),
                )
            else:
                assert torch.equal(found, value), (number, key)


def test_writing_to_loaded_tensors_leaves_the_file_alone(tmp_path):
    single(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    state = {"model": {}}
    xc.load(state, tmp_path)
    for value in state["model"].values():
        value.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_files_beside_the_model_are_ignored_and_named(tmp_path, caplog):
    single(tmp_path)
    save_file({"old": torch.zeros(1)}, tmp_path / "model-00001-of-00009.safetensors")
    target = zeros()
    with caplog.at_level(logging.WARNING):
        xc.load(target, tmp_path)
    same(target)
    assert "model-00001-of-00009.safetensors" in caplog.text


def test_checkpoint_beside_safetensors_files_is_the_checkpoint(tmp_path):
    xc.save({"a": torch.ones(3)}, tmp_path)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    target = {"a": torch.zeros(3)}
    xc.load(target, tmp_path)
    assert target["a"].all()


def test_verify_finds_damage_of_a_torch_file(tmp_path):
    torch.save({"a": torch.ones(1000)}, tmp_path / "pytorch_model.bin")
    raw = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    raw[raw.index(bytes(torch.ones(1).numpy())) + 100] ^= 1
    (tmp_path / "pytorch_model.bin").write_bytes(raw)
    report = xc.verify(tmp_path)
    assert not report and report.keys == ("a",) and report.checked_by == "crc32"


def test_verify_names_what_no_checksum_protects(tmp_path):
    single(tmp_path)
    report = xc.verify(tmp_path)
    assert report and set(report.unchecked) == set(STATE) - {"empty"} and "NOT CHECKED" in str(report)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(600)
    assert not xc.verify(tmp_path)


def test_links_of_a_hub_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    single(tmp_path / "blobs")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "model.safetensors")
    target = zeros()
    xc.load(target, tmp_path / "snapshot")
    same(target)


def test_unmarked_xla_tensors_are_loaded(tmp_path):
    single(tmp_path)
    target = {key: value.to(torch_xla.device()) for key, value in zeros().items()}
    xc.load(target, tmp_path)
    assert all(holds(target[key], value) for key, value in STATE.items())
