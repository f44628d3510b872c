"""What ``restore`` and ``restore_latest`` take by keyword: options, state, modules, optimizers. What they refuse."""

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import holds, mesh
from support.training import on_host

pytestmark = pytest.mark.filterwarnings("ignore")


def network(head=8):
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, head))


def trained(module, optimizer, steps=2):
    for _ in range(steps):
        module(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def run(tmp_path):
    """A manager whose run has one step, saved under other names than "model" and "optimizer"."""
    torch.manual_seed(0)
    net, critic = network(), network(4)
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    critic_optim = torch.optim.SGD(critic.parameters(), lr=0.02, momentum=0.9)
    trained(net, optim)
    trained(critic, critic_optim)
    state = {
        "net": net.state_dict(),
        "optim": optim.state_dict(),
        "critic": critic.state_dict(),
        "critic_optim": critic_optim.state_dict(),
        "progress": {"tokens": 17},
        "tokens": 17,
    }
    with xc.CheckpointManager(tmp_path, chkpt_on_preemption=False) as manager:
        manager.save(3, state, force=True)
        manager.expected = on_host({"net": net.state_dict(), "critic": critic.state_dict()})
        manager.momentum = [critic_optim.state[p]["momentum_buffer"].clone() for p in critic.parameters()]
        yield manager


IMMUTABLE = [0, 1.5, True, None, "text", b"bytes", (1, 2), frozenset(), torch.float32]


@pytest.mark.parametrize("value", IMMUTABLE, ids=repr)
@pytest.mark.parametrize("method", ["restore", "restore_latest"])
def test_value_that_would_be_lost_is_refused_with_the_right_call(run, method, value):
    arguments = (3,) if method == "restore" else ()
    with pytest.raises(TypeError) as raised:
        getattr(run, method)(*arguments, tokens=value)
    text = str(raised.value)
    assert "'tokens'" in text and f"manager.{method}(state)" in text and "Nothing was changed" in text
    assert "progress={'tokens': " in text
    assert ("what restore_latest returns" in text) == (method == "restore_latest")


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("mising", "warn", "missing"),
        ("placment", None, "placement"),
        ("optim_izer", None, "optimizer"),
        ("shapes", "keep", "shape"),
        ("unexpectd", "warn", "unexpected"),
    ],
)
def test_misspelt_option_is_refused_and_the_right_one_is_named(run, name, value, meant):
    with pytest.raises(TypeError, match=rf"no option '{name}'.*Did you mean {meant}=\?"):
        run.restore_latest(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("path", "elsewhere", "initial_path="),
        ("no_dist", True, "torch_xla_ckpt.restore"),
        ("process_group", None, "CheckpointManager"),
        ("progress", True, "torch_xla_ckpt.restore"),
    ],
)
def test_option_of_another_function_is_refused_with_the_right_call(run, name, value, instead):
    with pytest.raises(TypeError, match=f"no option '{name}'.*Instead, .*{instead}"):
        run.restore_latest(**{name: value})


def test_impossible_values_and_doubled_keys_are_refused(run):
    with pytest.raises(ValueError, match="missing='often'"):
        run.restore_latest({"tokens": 0}, missing="often")
    with pytest.raises(TypeError, match="'progress' twice"):
        run.restore_latest({"progress": {"tokens": 0}}, progress={"tokens": 0})
    with pytest.raises(TypeError, match="takes a dict as its state, not a Sequential"):
        run.restore_latest(network())


def test_dicts_and_values_in_a_dict_are_restored(run):
    progress, state = {"tokens": 0}, {"tokens": 0}
    assert run.restore_latest(state, progress=progress) == 3
    assert progress == state == {"tokens": 17}
    progress["tokens"] = 0
    run.restore(3, progress=progress)
    assert progress == {"tokens": 17}


def test_modules_and_optimizers_under_any_name_are_restored_sharded(run):
    with torch.device("meta"):
        net, critic = network(), network(4)
    optim = torch.optim.AdamW(net.parameters())
    critic_optim = torch.optim.SGD(critic.parameters(), lr=0.5, momentum=0.1)
    step = run.restore_latest(
        net=net,
        optim=optim,
        critic=critic,
        critic_optim=critic_optim,
        sharding={"0.weight": ("a", "b")},
        mesh=mesh((2, 4)),
    )
    assert step == 3
    for key, module in (("net", net), ("critic", critic)):
        for name, parameter in module.state_dict().items():
            assert parameter.device.type == "xla" and holds(parameter, run.expected[f"{key}.{name}"]), name
    assert optim.param_groups[0]["lr"] == 0.01 and critic_optim.param_groups[0]["lr"] == 0.02
    for parameter, state in [*optim.state.items(), *critic_optim.state.items()]:
        for name, value in state.items():
            if name != "step":
                assert value.device == parameter.device and value.shape == parameter.shape, name
    for parameter, expected in zip(critic.parameters(), run.momentum):
        assert holds(critic_optim.state[parameter]["momentum_buffer"], expected)


def test_policies_of_load_are_taken(run, caplog):
    net = network(head=3)
    fresh = net[2].weight.clone()
    assert run.restore_latest(net=net, shape="keep", exclude="net.0.bias") == 3
    assert torch.equal(net[2].weight, fresh) and torch.equal(net[0].weight, run.expected["net.0.weight"])
    assert "net.0.bias" in run.report.not_requested
    with pytest.raises(xc.MismatchError):
        run.restore_latest(net=network(head=3))
    state = {"net": {"0.weight": torch.zeros(16, 16)}, "other": torch.ones(2)}
    run.restore(3, state, missing="keep", unexpected="ignore", only=["net.0.weight", "other"])
    assert torch.equal(state["net"]["0.weight"], run.expected["net.0.weight"]) and state["other"].eq(1).all()
    half = {"renamed": torch.zeros(16, 16, dtype=torch.float16)}
    run.restore(3, half, only="renamed", rename={"net.0.weight": "renamed"})
    assert torch.equal(half["renamed"], run.expected["net.0.weight"].half())
    with pytest.raises(xc.MismatchError):
        run.restore(3, half, only="renamed", rename={"net.0.weight": "renamed"}, dtype="error")


def test_initial_model_takes_modules_under_any_name(run, tmp_path):
    net = network()
    options = {"chkpt_on_preemption": False, "initial_path": tmp_path, "initial": "model"}
    with xc.CheckpointManager(tmp_path / "new", **options) as manager:
        progress = {"tokens": 0}
        assert manager.restore_latest(net=net, progress=progress) is None
        assert torch.equal(net[0].weight, run.expected["net.0.weight"]) and progress == {"tokens": 0}
        with pytest.raises(xc.CheckpointError, match='initial="model" needs the model'):
            manager.restore_latest(progress=progress)
