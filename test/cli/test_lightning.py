"""Every question about the checkpoints that Trainers of Lightning write: SPMDStrategy's folders, and single files."""

import pytest

from support.command_line import call
from support.lightning_modules import Net, loader, module, on_host, trainer
from torch_xla_ckpt.integrations.lightning import SPMDStrategy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OPTIONS = {
    "sharded": {},
    "full": {"strategy": SPMDStrategy(state_dict_type="full")},
    "lightning": {"cpu": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a checkpoint of each kind, and its module's state on the host."""
    folder = tmp_path_factory.mktemp("lightning")
    found = {}
    for name, options in OPTIONS.items():
        model, one = module(Net), trainer(folder, **options)
        one.fit(model, loader())
        one.save_checkpoint(str(folder / f"{name}.ckpt"))
        found[name] = folder / f"{name}.ckpt", on_host(model)
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_question_has_an_answer(saved, tmp_path, kind):
    path, state = saved[kind]
    listed = call("ls", path, "--json").json
    keys = {one["key"] for one in listed["keys"]}
    assert {f"state_dict.{name}" for name in state} <= keys
    assert listed["writer"] == ("torch_xla_ckpt" if kind == "sharded" else "lightning")
    for key in keys:
        assert call("show", path, key).status == 0, key
    weight = call("show", path, "state_dict.last.weight[0, :3]", "--json").json
    assert weight["values"] == state["last.weight"][0, :3].tolist()
    assert call("verify", path).status == 0
    assert call("explain", path, "--mesh", "fsdp=8", "--spec", "*.weight=fsdp").status == 0
    assert call("convert", path, tmp_path / "c").status == 0
    assert call("diff", path, tmp_path / "c").status == 0
    assert call("export", path, tmp_path / "hf", "--key", "state_dict").status == 0
    assert call("report", path, "-o", tmp_path / "r.html").status == 0


def test_the_same_module_in_a_folder_and_in_a_file_is_equal(saved):
    (folder, _), (file, _) = saved["sharded"], saved["full"]
    assert call("diff", folder, file, "state_dict.*").status == 0
