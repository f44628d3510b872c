"""Objects that come back without being allowed, and types of a caller's own, which have to be."""

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
import uuid

import numpy as np
import torch


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    width: int
    name: str


Point = collections.namedtuple("Point", "x y")

HARMLESS = [
    *(None, True, 5, -(2**70), 2.5, float("inf"), 1j, "text", "", b"bytes", bytearray(b"xy")),
    *((), (1, (2, "x")), [1, [2]], {"a": {1: 2}}, {1, 2}, frozenset({3}), range(3), slice(1, 5, 2)),
    *(np.float32(1.5), np.int64(7), np.bool_(True), np.str_("s"), np.datetime64("2026-01-02"), np.complex64(1j)),
    *(np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.array([None, 1], dtype=object), np.empty((0, 3))),
    np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    *(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.dtype("float16")),
    *(datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.time(3)),
    *(datetime.timedelta(days=1), datetime.timezone(datetime.timedelta(hours=2), "x")),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1, 2, 3], 3), collections.deque()),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(int)),
    *(pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:/x")),
    *(uuid.UUID(int=5), decimal.Decimal("1.10"), random.Random(0).getstate(), torch.float16, torch.Size([1, 2])),
    torch.device("cpu"),
]
