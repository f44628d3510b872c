"""``restore`` checks everything first: it brings an optimizer back, or refuses by name and changes nothing."""

import copy
import itertools

import pytest
import torch

import torch_xla_ckpt as xc

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "RMSprop centered": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda params: torch.optim.Muon(params, lr=0.01)

# Whose state means the same in both. torch's own load_state_dict takes it, and the next step is right.
ALIKE = {frozenset(pair) for pair in itertools.combinations(("Adam", "AdamW", "RAdam"), 2)}
ALIKE_ONE_WAY = {
    ("SGD", "SGD momentum"),  # the saved groups bring their momentum along
    ("SGD momentum", "SGD"),
    ("Adam", "Adam amsgrad"),
    ("Adam amsgrad", "Adam"),
    ("AdamW", "Adam amsgrad"),
    ("Adam amsgrad", "AdamW"),
    ("RAdam", "Adam amsgrad"),
    ("RMSprop", "RMSprop centered"),
    ("RMSprop centered", "RMSprop"),
    ("Adam", "SparseAdam"),
    ("AdamW", "SparseAdam"),
    ("RAdam", "SparseAdam"),
}


class Net(torch.nn.Module):
    """Matrices only, which Muon wants."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.empty(6, 4))
        self.second = torch.nn.Parameter(torch.empty(3, 6))

    def forward(self, x):
        return self.second @ torch.tanh(self.first @ x)


def on_host(seed):
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape))
    return net


def step(net, optimizer, n):
    x = torch.linspace(0, 1 + n, 4)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            for param in net.parameters():
                param.grad = param.grad.to_sparse()
        return loss

    optimizer.step(closure)


def trained(name, path):
    net = on_host(0)
    optimizer = OPTIMIZERS[name](net.parameters())
    for n in range(3):
        step(net, optimizer, n)
    xc.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, path, sync=False)
    return net, optimizer


def hollow(name):
    with torch.device("meta"):
        net = Net()
    return net, OPTIMIZERS[name](net.parameters())


def same(a, b):
    if isinstance(a, torch.Tensor):
        if "meta" in (a.device.type, b.device.type):
            return (a.device, a.shape) == (b.device, b.shape)
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def own_state(net, optimizer):
    tensors = {key: (tensor.device.type, tensor._version) for key, tensor in net.state_dict(keep_vars=True).items()}
    return tensors, copy.deepcopy(optimizer.state_dict()), list(map(id, net.parameters()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The original of every optimizer, with its checkpoint."""
    folder = tmp_path_factory.mktemp("optimizers")
    return {name: (*trained(name, folder / name), folder / name) for name in OPTIMIZERS}


@pytest.fixture
def without_xla(monkeypatch):
    """Tensors that are made go to host memory, where a step needs no compiler."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_meta_parameters_and_their_optimizer_come_back_and_step_alike(saved, name, without_xla):
    net, optimizer, path = saved[name]
    new, other = hollow(name)
    xc.restore(path, model=new, optimizer=other)
    assert same(new.state_dict(), net.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())
    twin = copy.deepcopy(net)
    twin_optimizer = OPTIMIZERS[name](twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(twin, twin_optimizer, 9)
    step(new, other, 9)
    assert same(new.state_dict(), twin.state_dict())


@pytest.mark.parametrize("name", ["Adagrad", "SGD momentum", "LBFGS", "Adafactor"])
def test_meta_parameters_come_back_on_devices(saved, name):
    net, optimizer, path = saved[name]
    new, other = hollow(name)
    xc.restore(path, model=new, optimizer=other)
    assert {param.device.type for param in new.parameters()} == {"xla"}
    assert same(new.state_dict(), net.state_dict()) and same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(("name", "into"), [*itertools.permutations(OPTIMIZERS, 2)])
def test_state_of_another_optimizer_is_right_or_refused_and_nothing_is_changed(saved, name, into, without_xla):
    net, optimizer, path = saved[name]
    for new, other in (hollow(into), built(into)):
        before = own_state(new, other)
        random = torch.get_rng_state()
        if frozenset((name, into)) in ALIKE or (name, into) in ALIKE_ONE_WAY:
            xc.restore(path, model=new, optimizer=other)
            assert same(new.state_dict(), net.state_dict())
            assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
            twin = copy.deepcopy(net)
            expected = OPTIMIZERS[into](twin.parameters())
            expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            step(twin, expected, 9)
            step(new, other, 9)
            assert same(new.state_dict(), twin.state_dict())
        else:
            with pytest.raises(xc.CheckpointError, match=rf"'optim' is not this optimizer's.* {type(other).__name__} "):
                xc.restore(path, model=new, optimizer=other)
            assert same(own_state(new, other), before)
        assert torch.equal(torch.get_rng_state(), random)


def built(name):
    net = on_host(1)
    optimizer = OPTIMIZERS[name](net.parameters())
    step(net, optimizer, 0)
    return net, optimizer


def test_state_of_another_shape_is_refused_by_name(tmp_path, without_xla):
    net, optimizer = on_host(0), None
    optimizer = torch.optim.Adam(reversed(list(net.parameters())))
    step(net, optimizer, 0)
    xc.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, tmp_path)
    new, other = hollow("Adam")
    with pytest.raises(xc.CheckpointError, match=r"exp_avg of shape \(3, 6\), and Adam needs .* \(6, 4\)"):
        xc.restore(tmp_path, model=new, optimizer=other)
    assert {param.device.type for param in new.parameters()} == {"meta"}


class Custom(torch.optim.Optimizer):
    """Needs "scale" in its groups, and says so only when state is loaded."""

    def __init__(self, params, scale=2.0):
        super().__init__(params, {"scale": scale})

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group["scale"] * 2

    def step(self, closure=None):
        raise AssertionError("restore must not try it out")


def test_groups_and_state_of_a_custom_optimizer_stay_if_it_refuses(saved, without_xla):
    _, _, path = saved["Adam"]
    net = Net().to_empty(device="meta")
    optimizer = Custom(net.parameters())
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(KeyError, match="scale"):
        xc.restore(path, model=net, optimizer=optimizer)
    assert optimizer.param_groups is groups and optimizer.state is state and set(groups[0]) == {"params", "scale"}
    assert {param.device.type for param in net.parameters()} == {"meta"}


def test_code_that_refuses_its_values_is_told_to_leave_loaded_tensors(saved, tmp_path, without_xla):
    """What restoring.md promises for this case: groups stay, tensors that were loaded in place do not."""
    old, _, path = saved["Adam"]
    net = on_host(1)
    optimizer = Custom(net.parameters(), scale=3.0)
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(KeyError, match="scale") as refused:
        xc.restore(path, model=net, optimizer=optimizer)
    assert same(net.state_dict(), old.state_dict())
    assert optimizer.param_groups is groups and optimizer.state is state and groups[0]["scale"] == 3.0
    told = "Tensors that had been loaded in place by then hold new values"
    if hasattr(refused.value, "add_note"):
        assert told in refused.value.__notes__[0]
    xc.save({"model": net.state_dict()}, tmp_path)
    failing_file(tmp_path)
    with pytest.raises(xc.CorruptCheckpointError, match=told):
        xc.restore(tmp_path, model=net)


def test_a_custom_optimizer_comes_back_without_being_tried_out(tmp_path, without_xla):
    net = on_host(0)
    optimizer = Custom(net.parameters(), scale=3.0)
    optimizer.state[net.first]["average"] = torch.ones(6, 4)
    xc.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, tmp_path)
    new = Net().to_empty(device="meta")
    other = Custom(new.parameters())
    xc.restore(tmp_path, model=new, optimizer=other)
    assert same(other.state_dict(), optimizer.state_dict())


def test_a_lazy_module_is_refused_by_name_and_nothing_is_changed(tmp_path, without_xla):
    first = torch.nn.Linear(2, 3)
    lazy = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(3))
    xc.save({"model": torch.nn.Sequential(first, torch.nn.Linear(3, 3)).state_dict()}, tmp_path)
    before = copy.deepcopy(lazy[0].state_dict())
    for load in (lambda: xc.restore(tmp_path, model=lazy), lambda: xc.load({"model": lazy.state_dict()}, tmp_path)):
        with pytest.raises(xc.CheckpointError, match=r"'model\.1\.weight', 'model\.1\.bias': .* Run one forward pass"):
            load()
        assert same(lazy[0].state_dict(), before)
    lazy(torch.ones(1, 2))
    xc.restore(tmp_path, model=lazy)
    assert torch.equal(lazy[0].weight, first.weight)


def failing_state(path):
    return {"extra": torch.zeros(5)}


def failing_file(path):
    (data,) = path.glob("*.distcp")
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    return {}


@pytest.mark.parametrize("spoil", [failing_state, failing_file])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_whatever_fails_leaves_meta_parameters_on_the_meta_device(tmp_path, spoil, device):
    """Neither a mismatch outside of the model nor a damaged file may leave a model of zeros behind."""
    net = on_host(0)
    xc.save({"model": net.state_dict(), "extra": torch.zeros(3)}, tmp_path)
    state = spoil(tmp_path)
    new = hollow("SGD")[0] if device == "meta" else on_host(1)
    before = None if device == "meta" else copy.deepcopy(new.state_dict())
    held = list(new.parameters())
    sharding = None if device == "meta" else (lambda module: None)
    with pytest.raises(xc.CheckpointError):
        xc.restore(tmp_path, model=new, state=state, sharding=sharding)
    assert all(a is b for a, b in zip(held, new.parameters()))
    assert {param.device.type for param in new.parameters()} == {device}
    assert before is None or same(new.state_dict(), before)
    assert not any(param.grad_fn for param in held) and all(isinstance(one, torch.nn.Parameter) for one in held)
