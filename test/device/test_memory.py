"""Free host memory: the system's report, limits of containers, and the share of virtual devices."""

import pytest

from torch_xla_ckpt.device import memory, xla


def test_virtual_devices_share_three_quarters_of_the_available_host_memory():
    before = memory.available()
    left = xla.memory_left()
    after = memory.available()
    assert left is not None
    low, high = sorted((before, after))
    assert 0.7 * low <= left * 8 <= 0.8 * high


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 1000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "900", "a/b/memory.current": "300"}, 600),
        ("0::/a/b\n", {"a/memory.max": "900", "a/memory.current": "300", "a/memory.stat": "inactive_file 100\n"}, 700),
        ("0::/elsewhere\n", {"memory.max": "900", "memory.current": "300"}, 600),
        ("0::/\n", {"memory.max": "900", "memory.current": "950"}, 0),
        (
            "5:cpu:/x\n4:memory:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "900",
                "memory/a/memory.usage_in_bytes": "400",
                "memory/a/memory.stat": "cache 7\ntotal_inactive_file 100\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5",
            },
            600,
        ),
        ("", {}, 1000 * 1024),
    ],
)
def test_available_memory_is_bounded_by_the_limits_of_all_cgroups(tmp_path, monkeypatch, membership, files, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n")
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "fs")
    assert memory.available() == expected


def test_available_memory_is_none_if_the_system_does_not_report_it(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "nothing here")
    assert memory.available() is None and xla.memory_left() is None
