"""Where host memory comes from: the files in whose memory maps shards lie when they are put on devices."""

from torch_xla import _XLAC


def mapped_at(address):
    """The file that is mapped at an address of this process; "" if there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, name = [*line.split(maxsplit=5), ""][:6]
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address < stop:
                return name.strip()
    return ""


def watch_puts(monkeypatch):
    """A list that grows with each shard that is put on a device: the file in whose memory map the shard lies."""
    seen = []
    real = _XLAC._load_local_shards

    def load_local_shards(tensor, parts, devices):
        seen.extend(mapped_at(part.data_ptr()) for part in parts)
        real(tensor, parts, devices)

    monkeypatch.setattr(_XLAC, "_load_local_shards", load_local_shards)
    return seen
