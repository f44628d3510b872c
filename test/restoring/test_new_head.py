"""A checkpoint of one model starts another with a new head: what does not fit is kept, initialized, and named."""

import logging

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, spec_of

ON = mesh((4, 2))
SPECS = {"body.weight": ("a", "b"), "head.weight": ("a", "b")}
WIDTH, OLD, NEW = 16, 8, 24


class Classifier(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def on_meta(classes=NEW):
    with torch.device("meta"):
        return Classifier(classes)


def step(model, optimizer):
    device = next(model.parameters()).device
    loss = model(torch.ones(4, WIDTH, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    path = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    model = Classifier(OLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optimizer)
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)
    return path, model, optimizer


@pytest.fixture
def without_xla(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)


HEAD = {"model.head.weight", "model.head.bias"}
HEAD_STATE = {f"optim.state.{n}.{part}" for n in (2, 3) for part in ("step", "exp_avg", "exp_avg_sq")}


def test_another_shape_is_an_error_unless_the_caller_says_keep(pretrained):
    path, _, _ = pretrained
    model = on_meta()
    with pytest.raises(xc.MismatchError, match=r'(?s)model\.head\.weight.*shape="keep"'):
        xc.restore(path, model=model)
    assert {param.device.type for param in model.parameters()} == {"meta"}


def test_head_in_host_memory_keeps_its_values(pretrained, without_xla):
    path, old, _ = pretrained
    model = Classifier(NEW)
    head = model.head.weight.detach().clone()
    report = xc.restore(path, model=model, shape="keep")
    assert set(report.kept) == HEAD and torch.equal(model.head.weight, head)
    assert torch.equal(model.body.weight, old.body.weight)


def test_head_on_the_meta_device_is_initialized_and_sharded(pretrained, caplog):
    path, old, _ = pretrained
    torch.manual_seed(7)
    expected = torch.nn.Linear(WIDTH, NEW)
    torch.manual_seed(7)
    model = on_meta()
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt"):
        report = xc.restore(path, model=model, shape="keep", sharding=SPECS, mesh=ON)
    assert set(report.kept) == HEAD
    assert holds(model.head.weight, expected.weight.detach()) and holds(model.head.bias, expected.bias.detach())
    assert holds(model.body.weight, old.body.weight.detach())
    assert "devices=[4,2]" in spec_of(model.head.weight) and "devices=[4,2]" in spec_of(model.body.weight)
    assert any("initialized" in one.getMessage() and "model.head.bias" in one.getMessage() for one in caplog.records)


def test_optimizer_state_of_a_new_head_starts_fresh_and_the_rest_is_loaded(pretrained, without_xla, caplog):
    path, old, old_optimizer = pretrained
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt"):
        report = xc.restore(path, model=model, optimizer=optimizer, shape="keep")
    assert set(report.kept) == HEAD | HEAD_STATE
    assert any("optim.state.2.exp_avg" in one.getMessage() for one in caplog.records)
    assert model.head.weight not in optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(optimizer.state[model.body.weight]["exp_avg"], old_optimizer.state[old.body.weight]["exp_avg"])
    step(model, optimizer)
    assert optimizer.state[model.head.weight]["step"] == 1 and optimizer.state[model.body.weight]["step"] == 2


def test_optimizer_keeps_the_state_that_it_has_for_a_head_that_keeps_its_values(pretrained):
    path, _, _ = pretrained
    model = Classifier(NEW)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    before = optimizer.state[model.head.weight]["exp_avg"].clone()
    xc.restore(path, model=model, optimizer=optimizer, shape="keep", sharding=SPECS, mesh=ON)
    state = optimizer.state[model.head.weight]
    assert state["step"] == 3 and holds(state["exp_avg"], before)
    assert spec_of(state["exp_avg"]) == spec_of(model.head.weight) != ""
    assert optimizer.state[model.body.weight]["step"] == 1


def test_state_that_exists_from_the_start_is_made_for_a_new_head(tmp_path, without_xla):
    old = Classifier(OLD)
    old_optimizer = torch.optim.Adagrad(old.parameters(), initial_accumulator_value=0.25)
    step(old, old_optimizer)
    xc.save({"model": old.state_dict(), "optim": old_optimizer.state_dict()}, tmp_path)
    model = on_meta()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.25)
    xc.restore(tmp_path, model=model, optimizer=optimizer, shape="keep")
    assert torch.equal(optimizer.state[model.head.weight]["sum"], torch.full((NEW, WIDTH), 0.25))
    step(model, optimizer)


def test_optimizer_alone_keeps_what_has_another_shape(pretrained):
    path, _, _ = pretrained
    model = Classifier(NEW)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(xc.CheckpointError, match=r"exp_avg of shape \(8, 16\)"):
        xc.restore(path, optimizer=optimizer)
    report = xc.restore(path, optimizer=optimizer, shape="keep")
    assert set(report.kept) == HEAD_STATE and model.head.weight not in optimizer.state
    assert optimizer.state[model.body.weight]["step"] == 1


def test_values_are_kept_if_initializing_touches_other_parameters(tmp_path, without_xla):
    """Initializing the weight of a layer must not overwrite a bias that the model has."""
    xc.save({"model": {"weight": torch.zeros(3, 2)}}, tmp_path)
    model = torch.nn.Linear(2, 4)
    bias = model.bias.detach().clone()
    model.weight = torch.nn.Parameter(torch.empty(4, 2, device="meta"))
    report = xc.restore(tmp_path, model=model, shape="keep", missing="keep")
    assert report.kept == ("model.weight",) and report.missing == ("model.bias",)
    assert torch.equal(model.bias, bias) and model.weight.abs().max() > 0


def test_key_that_the_checkpoint_lacks_is_initialized_on_the_meta_device(pretrained, without_xla):
    path, _, _ = pretrained
    model = on_meta(OLD)
    with torch.device("meta"):
        model.extra = torch.nn.Linear(2, 2)
    report = xc.restore(path, model=model, missing="warn")
    assert set(report.missing) == {"model.extra.weight", "model.extra.bias"}
    assert model.extra.weight.abs().max() > 0 and model.extra.weight.device.type == "cpu"


def test_random_numbers_are_the_same_after_a_head_was_initialized(pretrained, without_xla):
    path, _, _ = pretrained
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    xc.restore(path, model=on_meta(), shape="keep")
    assert torch.equal(torch.rand(3), expected)


def test_parameter_that_nothing_initializes_is_named_and_nothing_is_changed(tmp_path, without_xla):
    class Bare(torch.nn.Module):
        def __init__(self, n):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(n))

    xc.save({"model": Bare(3).state_dict()}, tmp_path)
    with torch.device("meta"):
        model = Bare(4)
    with pytest.raises(xc.CheckpointError, match=r"no values for model\.b:.*reset_parameters\(\)"):
        xc.restore(tmp_path, model=model, shape="keep")
    assert {param.device.type for param in model.parameters()} == {"meta"}


def test_initializer_that_fails_is_named_and_nothing_is_changed(pretrained, without_xla):
    path, _, _ = pretrained
    model = on_meta()

    def reset_parameters():
        raise OSError("no disk")

    model.head.reset_parameters = reset_parameters
    with pytest.raises(
        xc.CheckpointError, match=r"reset_parameters\(\) could not initialize model\.head\.weight.*no disk"
    ):
        xc.restore(path, model=model, shape="keep")
    assert {param.device.type for param in model.parameters()} == {"meta"}
