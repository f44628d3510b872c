"""restore takes all policies of load, models and optimizers under any name, and refuses what it would lose."""

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, spec_of

ON = mesh((4, 2))


def trained(seed=0, lr=0.5):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def on_meta():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model, optimizer = trained()
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "n": {"step": 7}}, path)
    return path, model, optimizer


# --- what is passed by name


def test_modules_and_optimizers_under_any_name_are_made_and_sharded(tmp_path):
    (net, optim), (other, _) = trained(0), trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 3)
    scheduler.last_epoch = 5
    state = {"net": net, "teacher": other, "optim": optim, "scheduler": scheduler, "n": {"step": 3}}
    xc.save(state, tmp_path)
    (new, new_optim), (teacher, _) = on_meta(), on_meta()
    new_scheduler, n = torch.optim.lr_scheduler.StepLR(new_optim, 3), {}
    xc.restore(
        *[tmp_path],
        net=new,
        teacher=teacher,
        optim=new_optim,
        scheduler=new_scheduler,
        n=n,
        sharding={"*.weight": ("a", "b")},
        mesh=ON,
    )
    assert holds(new[0].weight, net[0].weight.detach()) and holds(teacher[1].weight, other[1].weight.detach())
    assert "devices=[4,2]" in spec_of(new[0].weight) and "devices=[4,2]" in spec_of(teacher[1].weight)
    exp_avg = new_optim.state[new[0].weight]["exp_avg"]
    assert spec_of(exp_avg) == spec_of(new[0].weight) and holds(exp_avg, optim.state[net[0].weight]["exp_avg"])
    assert new_scheduler.last_epoch == 5 and n == {"step": 3}


def test_modules_and_optimizers_in_the_state_are_treated_alike(saved):
    path, net, _optimizer = saved
    new, new_optimizer = on_meta()
    state = {"model": new, "optim": new_optimizer}
    xc.restore(path, state=state)
    assert state["model"] is new and state["optim"] is new_optimizer
    assert holds(new[0].weight, net[0].weight.detach())
    assert new_optimizer.state[new[0].weight]["step"] == 1 and new_optimizer.param_groups[0]["lr"] == 0.5


def test_named_values_that_would_be_lost_and_misspelt_options_are_refused(saved):
    path, _, _ = saved
    with pytest.raises(TypeError, match=r"'step'.*immutable value.*lost.*restore\(\.\.\., state=state\)"):
        xc.restore(path, step=0)
    with pytest.raises(TypeError, match=r"no option 'mising'.*Did you mean missing="):
        xc.restore(path, mising="warn")
    with pytest.raises(TypeError, match=r"'n': passed by name and in state="):
        xc.restore(path, state={"n": {}}, n={})


def test_numbers_in_the_state_come_back_in_the_state(tmp_path):
    xc.save({"step": 7}, tmp_path)
    state = {"step": 0}
    xc.restore(tmp_path, state=state)
    assert state == {"step": 7}


def test_names_that_the_checkpoint_lacks_are_refused_with_those_that_it_has(saved):
    path, _, _ = saved
    new, optimizer = on_meta()
    with pytest.raises(xc.CheckpointError, match=r"no module 'net'. It has: 'model', 'optim', 'n'"):
        xc.restore(path, net=new)
    with pytest.raises(xc.CheckpointError, match=r"no optimizer 'opt'. It has: 'model'"):
        xc.restore(path, opt=optimizer)
    with pytest.raises(xc.CheckpointError, match=r"'model'.* passed twice"):
        xc.restore(path, model=new, state={"model": {}})
    report = xc.restore(path, model=new, opt=optimizer, missing="warn")
    assert not optimizer.state and "model.0.weight" in report.loaded


# --- policies


def test_only_and_exclude_leave_the_rest_as_it_is(saved):
    path, net, _ = saved
    new, optimizer = trained(1, lr=0.25)
    bias = new[0].bias.detach().clone()
    report = xc.restore(path, model=new, optimizer=optimizer, only="model.*", exclude=["*.0.bias"])
    assert torch.equal(new[0].bias, bias) and torch.equal(new[1].bias, net[1].bias)
    assert optimizer.param_groups[0]["lr"] == 0.25 and "model.0.bias" in report.not_requested
    assert set(report.loaded) == {"model.0.weight", "model.1.weight", "model.1.bias"}


def test_excluded_hyperparameters_and_state_of_an_optimizer_stay(saved):
    path, net, old = saved
    new, optimizer = trained(1, lr=0.25)
    own = optimizer.state[new[0].weight]["exp_avg"].clone()
    xc.restore(path, model=new, optimizer=optimizer, exclude=["optim.param_groups.*.lr", "optim.state.0.exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(optimizer.state[new[0].weight]["exp_avg"], own)
    assert torch.equal(optimizer.state[new[1].weight]["exp_avg"], old.state[net[1].weight]["exp_avg"])


def test_state_that_is_incomplete_without_the_excluded_part_is_refused(saved):
    path, _, _ = saved
    new, optimizer = on_meta()
    with pytest.raises(xc.CheckpointError, match="parameter 0 the checkpoint has exp_avg_sq, step, and AdamW needs"):
        xc.restore(path, model=new, optimizer=optimizer, exclude="optim.state.*.exp_avg")
    assert not optimizer.state and {param.device.type for param in new.parameters()} == {"meta"}


def test_renamed_keys_reach_a_model_on_the_meta_device(saved):
    path, net, _ = saved
    with torch.device("meta"):
        new = torch.nn.ModuleDict({"a": torch.nn.Linear(16, 16), "b": torch.nn.Linear(16, 16)})

    def rename(key):
        return key.replace("model.0.", "model.a.").replace("model.1.", "model.b.")

    report = xc.restore(path, model=new, rename=rename)
    assert holds(new["b"].weight, net[1].weight.detach()) and report.renamed["model.a.bias"] == "model.0.bias"


def test_options_with_values_that_there_are_not_are_refused(saved):
    path, _, _ = saved
    with pytest.raises(ValueError, match="shape="):
        xc.restore(path, model=on_meta()[0], shape="cast")


# --- where the checkpoint lies


def test_path_beside_a_reader_of_another_path_is_refused(saved, tmp_path):
    path, _, _ = saved
    reader = xc.ShardReader(path)
    new, _ = on_meta()
    with pytest.raises(ValueError, match="its storage reader has the path"):
        xc.restore(tmp_path, model=new, storage_reader=reader)
    xc.restore(path, model=new, storage_reader=reader)
    assert reader.stats.bytes_read


def test_storage_options_reach_the_filesystem(saved, tmp_path):
    _, net, _ = saved
    xc.save({"model": net.state_dict()}, tmp_path / "inner")
    new, _ = on_meta()
    url = "dir://inner"
    options = {"path": str(tmp_path), "target_protocol": "file"}
    xc.restore(url, model=new, storage_options=options)
    assert holds(new[0].weight, net[0].weight.detach())
