"""Saves and loads through DCP, with this package's storage or DCP's own."""

import functools

import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc

WRITERS = {"ours": functools.partial(xc.ShardWriter, sync=False), "stock": dcp.FileSystemWriter}
READERS = {"ours": xc.ShardReader, "stock": dcp.FileSystemReader}


def save(state, path, writer="ours", planner=None):
    dcp.save(state, storage_writer=WRITERS[writer](path), planner=planner)


def load(state, path, reader="ours", planner=None):
    dcp.load(state, storage_reader=READERS[reader](path), planner=planner)


def zeros(state):
    return {key: torch.zeros_like(value) for key, value in state.items()}
