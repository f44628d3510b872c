"""Data loaders whose state appears late go on with the batch that would have come."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_xla_ckpt as xc


class Lines(IterableDataset):
    """Shuffles by its own generator, and has a state from the first sample on."""

    def __init__(self, n=48):
        self.n = n
        self.position = 0
        self.generator = None

    def __iter__(self):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        while self.position < self.n:
            self.position += 1
            yield torch.rand(2, generator=self.generator) + self.position
        self.position = 0

    def state_dict(self):
        if self.generator is None:
            return {}
        return {"position": self.position, "random": {"generator": self.generator.get_state()}}

    def load_state_dict(self, state):
        if state:
            self.position = state["position"]
            self.generator = torch.Generator()
            self.generator.set_state(state["random"]["generator"])


def some(iterator, n):
    return [next(iterator) for _ in range(n)]


def load(call, target, path):
    if call == "dcp":
        dcp.load(target, checkpoint_id=path, planner=xc.SPMDLoadPlanner())
    else:
        xc.load(target, path)


@pytest.mark.parametrize("call", ["dcp", "xc"])
def test_a_dataset_behind_torchs_data_loader(tmp_path, call):
    dataset = Lines()
    batches = iter(DataLoader(dataset, batch_size=4))
    some(batches, 3)
    xc.save({"data": dataset}, tmp_path)
    expected = some(batches, 4)

    late = Lines()
    assert late.state_dict() == {}
    load(call, {"data": late}, tmp_path)
    assert all(map(torch.equal, some(iter(DataLoader(late, batch_size=4)), 4), expected))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("call", ["dcp", "xc"])
@pytest.mark.parametrize("kind", ["iterable", "shuffled"])
def test_a_stateful_data_loader_with_workers(tmp_path, kind, workers, call):
    def loader():
        dataset = Lines() if kind == "iterable" else list(range(96))
        return StatefulDataLoader(dataset, batch_size=4, num_workers=workers, shuffle=kind == "shuffled")

    torch.manual_seed(1)
    first = loader()
    batches = iter(first)
    some(batches, 5)
    xc.save({"loader": first}, tmp_path)
    expected = some(batches, 6)

    torch.manual_seed(2)
    second = loader()
    load(call, {"loader": second}, tmp_path)
    assert all(map(torch.equal, some(iter(second), 6), expected))
