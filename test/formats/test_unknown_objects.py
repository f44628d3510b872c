"""Files of torch.save with objects of unknown types: the rest is read, a warning names them, and no code runs."""

import argparse
import collections
import enum
import functools
import io
import logging
import random
import struct
import zipfile

import fsspec
import pytest
import torch

import torch_xla_ckpt as xc
from support.command_line import call
from support.exported import written
from torch_xla_ckpt.inspecting import convert

WEIGHTS = {"layer.weight": torch.rand(64, 48), "layer.bias": torch.rand(48).to(torch.bfloat16)}
RAN = []


class Config:
    """A class that a reader does not know. Each way to make one of them is recorded."""

    def __init__(self, lr=0.1):
        RAN.append("__init__")
        self.lr, self.table = lr, torch.rand(3)

    def __setstate__(self, state):
        RAN.append("__setstate__")
        vars(self).update(state)

    def __call__(self, *_):
        RAN.append("__call__")


class Listed(list):
    pass


class Keyed(dict):
    pass


class Colour(enum.Enum):
    RED = 1


def made(*_):
    RAN.append("a function")
    return 1


class Reduced:
    def __reduce__(self):
        return made, (torch.rand(3),), {"state": 1}, iter([1, 2]), iter([("a", 3)])


def unknown_values():
    nested = Config()
    nested.self = nested  # contains itself
    return {
        "object": Config(),
        "cycle": nested,
        "list": Listed([torch.rand(2), 1]),
        "enum": Colour.RED,
        "function": made,
        "class": Config,
        "reduced": Reduced(),
        "namespace": argparse.Namespace(lr=1, model=Config()),
        "partial": functools.partial(made, 1),
        "default": collections.defaultdict(Config, {"a": 1}),
        "in a tuple": (1, Config(), torch.rand(2)),
        "in a set": {Colour.RED, 1},
        "in a plain list": [1, [2, Config()]],
    }


def checkpoint(unknown):
    """What Lightning writes: weights, loops, optimizers and hyperparameters."""
    return {
        "epoch": 3,
        "state_dict": collections.OrderedDict(WEIGHTS),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]}],
        "hyper_parameters": {"lr": 0.1, "bad": unknown, "after": [1, 2]},
        "loops": {"fit": {"n": 1}},
    }


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()
    yield
    assert not RAN, RAN


def saved(value, path):
    torch.save(value, path)
    RAN.clear()
    return path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "stay out" in record.getMessage()]


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("name", unknown_values())
def test_weights_are_read_beside_an_object_of_an_unknown_type(tmp_path, caplog, name, where):
    path = saved(checkpoint(unknown_values()[name]), tmp_path / "last.ckpt")
    if where == "remote":
        path = f"memory://{tmp_path}/last.ckpt"
        fsspec.filesystem("memory").pipe_file(path, (tmp_path / "last.ckpt").read_bytes())
    target = {"state_dict": {key: torch.zeros_like(value) for key, value in WEIGHTS.items()}, "epoch": 0}
    target |= {"hyper_parameters": {}, "optimizer_states": [], "loops": {}}
    report = xc.load(target, path)
    assert all(torch.equal(target["state_dict"][key], value) for key, value in WEIGHTS.items())
    assert target["epoch"] == 3 and target["hyper_parameters"] == {"lr": 0.1, "after": [1, 2]}
    assert target["optimizer_states"][0]["state"][0]["step"] == 7 and target["loops"] == {"fit": {"n": 1}}
    assert not any("bad" in key for key in report.loaded)
    (text,) = set(warnings_of(caplog))
    kind = {"list": "Listed", "enum": "Colour", "function": "made", "reduced": "made", "partial": "functools.partial"}
    kind |= {"namespace": "argparse.Namespace", "in a set": "Colour"}
    assert "last.ckpt" in text and "'hyper_parameters.bad'" in text and kind.get(name, "Config") in text, text
    assert "add_safe_globals" in text and "weights_only=False" in text


def test_stand_ins_in_place_of_a_class_keep_tensors_of_known_types(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    state = {
        "weights": WEIGHTS,
        "keys": {Colour.RED: {"a": torch.ones(2)}, "known": torch.ones(3)},
        "list": [torch.ones(1), Config(), {"x": torch.ones(4)}],
        "mapping": Keyed(a=torch.ones(2)),
        "deep": {"a": {"b": [{"c": Config()}, {"d": 1}]}},
    }
    path = saved(state, tmp_path / "file.pt")
    target = {"weights": {}, "keys": {}, "deep": {}}
    xc.load(target, path)
    assert target["weights"].keys() == WEIGHTS.keys() and list(target["keys"]) == ["known"]
    assert target["deep"] == {"a": {"b": [{}, {"d": 1}]}}
    target = {"list": []}
    xc.load(target, path)
    assert target["list"][0].eq(1).all() and target["list"][1] is None and target["list"][2]["x"].eq(1).all()
    (text,) = set(warnings_of(caplog))
    for key in ("keys.<", "'list.1'", "'mapping'", "'deep.a.b.0.c'"):
        assert key in text, text


def test_every_command_answers_and_the_weights_are_exported_and_converted(tmp_path, caplog):
    path = saved(checkpoint(Config()), tmp_path / "last.ckpt")
    listed = call("ls", path, "--json")
    keys = {one["key"] for one in listed.json["keys"]}
    assert {f"state_dict.{key}" for key in WEIGHTS} <= keys and "hyper_parameters.bad" not in keys
    for command in (("verify", path), ("convert", path, tmp_path / "twice"), ("export", path, tmp_path / "hf2")):
        answer = call(*command, *(["--key", "state_dict"] if "export" in command else []))
        assert answer.status == 0 and answer.err.count("stay out") == 1, answer.err
    assert call("show", path, "hyper_parameters.bad").status != 0
    xc.export(path, tmp_path / "hf", key="state_dict")
    assert all(torch.equal(written(tmp_path / "hf")[key], value) for key, value in WEIGHTS.items())
    convert(path, tmp_path / "c")
    found = {"state_dict": {}, "hyper_parameters": {}}
    xc.load(found, tmp_path / "c")
    assert found["hyper_parameters"] == {"lr": 0.1, "after": [1, 2]}
    assert warnings_of(caplog)


def test_registered_types_are_read(tmp_path, caplog):
    path = saved(checkpoint(Colour.RED), tmp_path / "last.ckpt")
    with torch.serialization.safe_globals([Colour]):
        target = {"hyper_parameters": {}}
        xc.load(target, path, allow_types=[Colour])
    assert target["hyper_parameters"]["bad"] is Colour.RED and not warnings_of(caplog)


@pytest.mark.parametrize("value", [Config(), {"model": Config(), "epoch": 3}, [Config()]], ids=["all", "model", "list"])
def test_file_in_which_all_tensors_are_in_objects_is_refused(tmp_path, value):
    path = saved(value, tmp_path / "model.pt")
    with pytest.raises(xc.CheckpointError, match=r"Config|holds a list"):
        xc.load({"a": torch.zeros(2)}, path)


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [print, eval, exec, __import__, open])
def test_file_that_names_a_function_of_an_attack_is_refused_whole(tmp_path, function, capsys):
    path = saved(checkpoint(Attack(function, "print('ran')")), tmp_path / "last.ckpt")
    with pytest.raises(xc.UnsafeObjectError, match=f"could run code.*{function.__name__}"):
        xc.load({"state_dict": {}}, path)
    assert "ran" not in capsys.readouterr().out


def test_cost_of_a_file_with_many_unknown_names_is_bounded(tmp_path):
    """Each name is looked up once, and no name makes the reader scan the pickle again."""
    names = b"".join(b"cmodule%d\nName\n)\x81}b0" % number for number in range(20_000))
    pickled = archive_of({"w": torch.ones(2)})[1].replace(b"\x80\x02", b"\x80\x02" + names, 1)
    assert rewritten(tmp_path / "many.pt", {"w": torch.ones(2)}, pickled)
    target = {"w": torch.zeros(2)}
    xc.load(target, tmp_path / "many.pt")
    assert target["w"].eq(1).all()


def test_nesting_of_a_file_with_unknown_types_is_bounded(tmp_path):
    pickled = b"\x80\x02}X\x01\0\0\0a" + b"(" + b"]" * 200_000 + b"cmodule\nName\n" + b"a" * 200_000 + b"1" + b"]s."
    deep = b"\x80\x02}X\x01\0\0\0a" + b"]" * 200_000 + b"cmodule\nName\n" + b"a" * 200_000 + b"s."
    for number, one in enumerate((pickled, deep)):
        rewritten(tmp_path / f"{number}.pt", {"w": torch.ones(2)}, one)
        with pytest.raises(xc.CheckpointError):
            xc.load({"w": torch.zeros(2)}, tmp_path / f"{number}.pt")


@pytest.mark.slow
def test_mutated_files_with_unknown_types_are_read_or_refused_and_never_crash(tmp_path):
    chance = random.Random(5)
    bad = list(unknown_values().values())
    pickled = archive_of({"w": torch.ones(2), "bad": bad, "n": [1, {"x": torch.ones(3)}]})[1]
    state = {"w": torch.ones(2), "bad": bad, "n": [1, {"x": torch.ones(3)}]}
    RAN.clear()
    outcomes = set()
    for _ in range(400):
        mutated = bytearray(pickled)
        for _place in range(chance.randrange(1, 4)):
            mutated[chance.randrange(2, len(mutated))] = chance.choice([chance.randrange(256), *b"cRb\x81aeusq)](}t0"])
        rewritten(tmp_path / "m.pt", state, bytes(mutated))
        RAN.clear()
        target = {"w": torch.zeros(2)}
        try:
            xc.load(target, tmp_path / "m.pt")
            outcomes.add("read")
        except xc.CheckpointError:
            outcomes.add("refused")
        assert not RAN
    assert outcomes == {"read", "refused"}


def archive_of(value):
    data = io.BytesIO()
    torch.save(value, data)
    with zipfile.ZipFile(data) as archive:
        return archive.namelist(), archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))


def rewritten(path, value, pickled=None, order=b"little"):
    """Write an archive of torch.save with another pickle or another byte order."""
    data = io.BytesIO()
    torch.save(value, data)
    with zipfile.ZipFile(data) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("data.pkl") and pickled is not None:
                content = pickled
            if info.filename.endswith("byteorder"):
                content = order
            if order == b"big" and "/data/" in info.filename:
                content = struct.pack(f">{len(content) // 4}I", *struct.unpack(f"<{len(content) // 4}I", content))
            new.writestr(info.filename, content)
    return path


def test_the_advice_for_a_big_endian_file_works(tmp_path):
    state = {"w": torch.rand(8), "n": torch.arange(4, dtype=torch.int32)}
    path = rewritten(tmp_path / "model.pt", state, order=b"big")
    with pytest.raises(
        xc.CheckpointError, match=r"model\.pt .*big-endian.*torch\.load\(path, weights_only=True\)"
    ) as error:
        xc.load({"w": torch.zeros(8)}, path)
    assert not isinstance(error.value, xc.UnsafeObjectError) and "weights_only=False" not in str(error.value)
    torch.save(torch.load(path, weights_only=True), tmp_path / "new.pt")
    target = {"w": torch.zeros(8), "n": torch.zeros(4, dtype=torch.int32)}
    xc.load(target, tmp_path / "new.pt")
    assert all(torch.equal(target[key], value) for key, value in state.items())
