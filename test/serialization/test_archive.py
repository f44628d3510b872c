"""The archive parser refuses every file that another parser could read differently."""

import io
import logging
import struct
import threading
import zipfile
import zlib

import numpy as np
import pytest
import torch

import torch_xla_ckpt as xc
from support.objects import HARMLESS, Colour, Config, Point
from torch_xla_ckpt.serialization import MAX_DEPTH
from torch_xla_ckpt.serialization.archive import Archive, ArchiveError
from torch_xla_ckpt.serialization.objects import decode, encode


def saved(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def zipped(members, prepended=0, comment=b""):
    """A hand-made zip file. Its directory has offsets as if ``prepended`` bytes came before the file."""
    out = directory = b""
    for name, content in members:
        fields = (0, 0x21, zlib.crc32(content), len(content), len(content), len(name), 0)
        directory += struct.pack("<4sHHHH", b"PK\1\2", 20, 20, 0, 0) + struct.pack("<HHIIIHH", *fields)
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(out) + prepended) + name
        out += struct.pack("<4sHHH", b"PK\3\4", 20, 0, 0) + struct.pack("<HHIIIHH", *fields) + name + content
    end = (0, 0, len(members), len(members), len(directory), len(out) + prepended, len(comment))
    return out + directory + struct.pack("<4sHHHHIIH", b"PK\5\6", *end) + comment


ONE = b"\x80\x02K\x01."
TWO = b"\x80\x02K\x02."


def members(pickled=ONE, folder=b"archive"):
    named = {b"data.pkl": pickled, b"byteorder": b"little", b"version": b"3\n"}
    return [(folder + b"/" + name, content) for name, content in named.items()]


def test_a_hand_made_archive_loads():
    assert decode("key", io.BytesIO(zipped(members())), (), False) == 1


def with_field(data, mark, offset, form, value):
    data = bytearray(data)
    struct.pack_into(form, data, data.index(mark) + offset, value)
    return bytes(data)


WHOLE = zipped(members())
AMBIGUOUS = {
    "another archive before it, as Python reads it": zipped(members(TWO)) + WHOLE,
    "another archive before it, as torch reads it": zipped(members(TWO)) + zipped(members(), len(zipped(members(TWO)))),
    "bytes before it": b"x" + WHOLE,
    "bytes behind it": WHOLE + b"x",
    "a comment": zipped(members(), comment=b"x"),
    "an end in the comment": zipped(members(), comment=WHOLE[-22:]),
    "a name twice": zipped([*members(), (b"archive/data.pkl", TWO)]),
    "a name in capitals": zipped([*members(), (b"archive/DATA.PKL", TWO)]),
    "two folders": zipped([*members(), *members(TWO, b"other")]),
    "another version": zipped([*members()[:2], (b"archive/version", b"4\n")]),
    "no version": zipped(members()[:2]),
    "compressed": with_field(WHOLE, b"PK\1\2", 10, "<H", 8),
    "compressed in its header alone": with_field(WHOLE, b"PK\3\4", 8, "<H", 8),
    "encrypted": with_field(WHOLE, b"PK\1\2", 8, "<H", 1),
    "another size in the header": with_field(WHOLE, b"PK\3\4", 22, "<I", 4),
    "another name in the header": WHOLE.replace(b"archive/data.pkl", b"archive/data.pkx", 1),
    "a 64-bit size out of nowhere": with_field(WHOLE, b"PK\1\2", 24, "<I", 0xFFFFFFFF),
    "a part of several": with_field(WHOLE, b"PK\5\6", 4, "<H", 1),
    "more members than listed": with_field(with_field(WHOLE, b"PK\5\6", 8, "<H", 2), b"PK\5\6", 10, "<H", 2),
    "a gap": WHOLE[: WHOLE.index(b"PK\1\2")] + b"gap" + WHOLE[WHOLE.index(b"PK\1\2") :],
}


@pytest.mark.parametrize("how", AMBIGUOUS)
def test_an_ambiguous_archive_is_refused(how):
    with pytest.raises(xc.CheckpointError, match="cannot read 'key'"):
        decode("key", io.BytesIO(AMBIGUOUS[how]), (), False)


def test_an_archive_of_more_than_4_gigabytes_is_read(tmp_path):
    """Beyond 4 GiB torch writes sizes and offsets of 64 bits. The file is sparse."""
    with open(tmp_path / "huge", "w+b") as file:
        with torch.serialization.skip_data():
            torch.save([torch.empty(5 << 30, dtype=torch.uint8), torch.empty(3)], file)
        file.flush()
        data = np.memmap(file.name, np.uint8, "r")
        archive = Archive(memoryview(data))
        assert len(archive["data/0"]) == 5 << 30 and len(archive["data/1"]) == 12
        with pytest.raises(ArchiveError):
            Archive(memoryview(data)[1:])


@pytest.mark.parametrize("checked", [True, False])
def test_archives_with_and_without_crc_load(checked):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checked)
    try:
        assert decode("key", io.BytesIO(saved([1, torch.ones(2)])), (), False)[0] == 1
    finally:
        torch.serialization.set_crc32_options(before)


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def unicode(text):
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def tower(levels):
    """A tuple of 2**levels leaves, in slot 0 of the memo."""
    return b")q\x00" + b"".join(b"0h\x00h\x00\x86q\x00" for _ in range(levels))


def dtype_state(names, offset_of, size):
    fields = b"}" + b"".join(unicode(name) + b"h\x05K" + bytes([offset_of]) + b"\x86s" for name in names)
    named_fields = b"".join(map(unicode, names)) + b"\x86" + fields
    return b"(K\x03X\x01\x00\x00\x00|N" + named_fields + b"K" + bytes([size]) + b"K\x01K\x00tb"


def nested_dtype(levels):
    """A dtype with two overlapping fields, each of which has two such fields, and so on."""
    made = (
        named("numpy", "dtype")
        + unicode("b")
        + b"\x89\x88\x87R(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x05"
    )
    again = named("numpy", "dtype") + unicode("V1") + b"\x89\x88\x87R"
    return made + b"".join(b"0" + again + dtype_state(["a", "b"], 0, 1) + b"q\x05" for _ in range(levels))


MANY = 100_000
BOMBS = {
    "a large key": tower(80) + b"0}h\x00Ns",
    "a deep key": b"})" + b"\x85" * 1_000_000 + b"Ns",
    "a large element of a set": tower(80) + b"0" + named("builtins", "set") + b"]h\x00a\x85R",
    "a large number that is a key again and again": (
        b"}\x8b" + struct.pack("<i", MANY) + b"\x7f" * MANY + b"q\x00Ns(" + b"h\x00N" * MANY + b"u"
    ),
    "a list that is copied again and again": (
        b"](" + b"N" * MANY + b"eq\x000" + named("builtins", "list") + b"q\x010(" + b"h\x01h\x00\x85R" * 2_000 + b"t"
    ),
    "a text that is encoded again and again": (
        unicode("a" * MANY)
        + (b"q\x000" + named("_codecs", "encode") + b"q\x010(")
        + (b"h\x01h\x00" + unicode("latin1") + b"\x86R") * 2_000
        + b"t"
    ),
    "a dtype of 2**60 fields": nested_dtype(60),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_multiplies_its_data_is_refused(name):
    """Without a limit each of these pickles takes minutes or gigabytes, or overflows the stack."""
    with pytest.raises(xc.UnsafeObjectError, match="'key'"):
        decode("key", io.BytesIO(zipped(members(b"\x80\x02" + BOMBS[name] + b"."))), (), False)


@pytest.mark.parametrize("use_stager", [False, True])
def test_a_value_with_2_to_the_100_shared_references_comes_back(use_stager, tmp_path):
    value = ()
    for _ in range(100):
        value = (value, value)
    if use_stager:
        with xc.SPMDStager() as stager:
            xc.async_save({"o": value}, tmp_path, stager=stager).result()
    else:
        xc.save({"o": value}, tmp_path)
    for target in ({"o": None}, {"o": (torch.zeros(1), 1)}, {"o": ((1, 2), torch.zeros(1))}):
        xc.load(target, tmp_path)
        loaded = target["o"]
        for _ in range(100):
            assert loaded[0] is loaded[1]
            loaded = loaded[0]
        assert loaded == ()


def nested(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def down(value):
    levels = 0
    while value != 1 if isinstance(value, int) else True:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        levels += 1
    return levels


def called_deep(levels, work):
    return work() if not levels else called_deep(levels - 1, work)


@pytest.mark.parametrize("use_stager", [False, True])
@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: [v], lambda v: ({"k": v},)], ids=["tuple", "list", "both"])
def test_objects_nested_max_depth_levels_deep_come_back(wrap, use_stager, tmp_path):
    depth = MAX_DEPTH // 2 if wrap(1) == ({"k": 1},) else MAX_DEPTH
    value = nested(depth, wrap)

    def save():
        if use_stager:
            with xc.SPMDStager() as stager:
                xc.async_save({"a": value, "t": torch.ones(1)}, tmp_path, stager=stager, sync=False).result()
        else:
            xc.save({"a": value, "t": torch.ones(1)}, tmp_path, sync=False)

    called_deep(200, save)
    for old in (0, value):
        target = {"a": old, "t": torch.zeros(1)}
        xc.load(target, tmp_path)
        assert down(target["a"]) == down(value)


def test_a_state_dict_of_max_depth_levels_comes_back_and_a_deeper_one_is_refused(tmp_path):
    state = nested(MAX_DEPTH, lambda value: {"k": value})
    called_deep(300, lambda: xc.save(state, tmp_path, sync=False))
    target = nested(MAX_DEPTH, lambda value: {"k": value})
    xc.load(target, tmp_path)
    assert down(target) == MAX_DEPTH
    with pytest.raises(xc.CheckpointError, match=rf"more than {MAX_DEPTH} levels deep at 'outer\.k"):
        xc.save({"outer": nested(MAX_DEPTH, lambda value: {"k": value})}, tmp_path, sync=False)
    with pytest.raises(xc.CheckpointError, match=r"cannot save 'a': the containers in this tuple"):
        xc.save({"a": nested(100_000, lambda value: (value,))}, tmp_path, sync=False)


@pytest.mark.parametrize("use_stager", [False, True])
def test_a_state_dict_that_contains_itself_is_refused_with_its_key(use_stager, tmp_path):
    cyclic = {"t": torch.ones(1)}
    cyclic["again"] = [torch.ones(1), cyclic]
    with pytest.raises(xc.CheckpointError, match=r"contains itself at 'model\.again\.1'"):
        if use_stager:
            with xc.SPMDStager() as stager:
                xc.async_save({"model": cyclic}, tmp_path, stager=stager, sync=False).result()
        else:
            xc.save({"model": cyclic}, tmp_path, sync=False)


def test_a_list_that_contains_itself_comes_back(tmp_path):
    cyclic = [1]
    cyclic.append(cyclic)
    xc.save({"a": cyclic}, tmp_path, sync=False)
    for old in (0, cyclic):
        target = {"a": old}
        xc.load(target, tmp_path)
        assert target["a"][1] is target["a"] and target["a"][0] == 1


class Thing:
    def state_dict(self):
        return {}


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("use_stager", [False, True])
def test_a_save_warns_once_of_objects_that_a_load_will_refuse(use_stager, tmp_path, caplog):
    state = {
        **{"plain": {"a": [1], "b": np.float32(1)}, "t": torch.ones(2)},
        **{"thing": Thing(), "deep": {"x": ([Thing()], 1)}, "generator": torch.Generator()},
    }
    with caplog.at_level(logging.WARNING):
        if use_stager:
            with xc.SPMDStager() as stager:
                xc.async_save(state, tmp_path, stager=stager, sync=False).result()
        else:
            xc.save(state, tmp_path, sync=False)
    (said,) = (record.getMessage() for record in caplog.records if "refuse" in record.getMessage())
    name = f"{Thing.__module__}.Thing"
    for part in (f"'thing' ({name})", f"'deep.x' ({name})", "'generator' (torch._C.Generator)", "allow_types"):
        assert part in said
    assert "'plain" not in said and "'t'" not in said


def test_a_save_warns_of_tensors_of_a_subclass(tmp_path, caplog):
    xc.save({"t": torch.ones(2).as_subclass(Sub)}, tmp_path, sync=False)
    warned = "Sub" in caplog.text
    try:
        xc.load({"t": torch.zeros(2)}, tmp_path)
    except xc.UnsafeObjectError:
        assert warned
    else:
        assert not warned


def test_needed_types_of_an_item_are_the_types_that_a_load_refuses():
    for value in HARMLESS:
        assert not encode("key", value, torch.Tensor.cpu).needs
    for value in (Colour.RED, Config(1, "x"), [Point(1, 2), {"a": Colour.RED}], np.add, threading.Event):
        item = encode("key", value, torch.Tensor.cpu)
        with pytest.raises(xc.UnsafeObjectError) as caught:
            decode("key", item, (), False)
        assert item.needs == set(caught.value.types)


def test_zipfile_reads_the_same_members():
    data = saved({"a": torch.arange(3), "b": "x"})
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        ours = Archive(memoryview(data))
        assert {f"archive/{name}": bytes(ours[name]) for name in ours.members} == {
            name: other.read(name) for name in other.namelist()
        }
