"""One training process of the demo: a small Llama on a mesh of eight virtual devices.

    export PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 PYTHONPATH=$PWD:$PWD/scripts
    python -m demo_parts.train --mesh 4x2 --run DIR --report FILE --losses FILE --steps 48 --compare-at 24
    python -m demo_parts.train --mesh 2x4 --run DIR --report FILE --losses FILE --steps 48 --from-step 24

The first command trains a run; after a stop or a kill, the same command goes on from the newest step. The second
command waits until that step is committed, goes on from it on another mesh, and saves nothing. Both print one line of
JSON for each event. The report file gets the digests and layouts of the whole state at one step, for the comparison.

``Training`` is the part to copy. ``state`` returns everything that a run needs to go on. ``restore`` loads it on the
mesh of this process, into a model without data and an optimizer without state.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import torch_xla_ckpt as xc
from demo_parts.digests import digests
from demo_parts.waiting import wait_for_commit
from torch_xla_ckpt.device import access_of

BATCH, SEQUENCE = 8, 64  # bytes
CORPUS_BYTES = 4 << 20
WARM_UP = 8  # steps
SAVE_EVERY = 8  # steps


class Training:
    """A model, its optimizer, and everything else that training depends on.

    Args:
        mesh: a mesh with the axes "fsdp" and "tensor".
        steps: the number of steps of the whole run, for the learning rate's schedule.
        empty: True builds the model on the meta device, for ``restore``.
    """

    def __init__(self, mesh: xs.Mesh, steps: int, empty: bool = False):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.mesh = mesh
        self.text = corpus()
        self.model = build_empty() if empty else build_model()
        if empty:
            self.model.train()
        else:
            self.model.train().to(device="xla")
            shard(self.model, mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda step: rate(step, steps))
        self.step = 0
        self.position = 0  # index of the next sample
        xm.set_rng_state(0)

    def train_step(self) -> float:
        """Train on the next batch; return its loss in nats per byte."""
        text = batch(self.text, self.position)
        # The noise uses the host's random generator, and the model's dropout uses the device's. A resumed run follows
        # the uninterrupted run only if both generators are restored.
        noise = torch.rand(text.shape) < 0.02
        inputs = torch.where(noise, torch.randint(256, text.shape), text).to("xla")
        labels = text.to("xla")
        xs.mark_sharding(inputs, self.mesh, ("fsdp", None))
        xs.mark_sharding(labels, self.mesh, ("fsdp", None))

        loss = self.model(input_ids=inputs, labels=labels).loss
        loss.backward()
        self.optim.step()
        self.scheduler.step()
        self.optim.zero_grad()
        torch_xla.sync()
        self.step += 1
        self.position += BATCH
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return everything that a new process needs to go on from here."""
        return {
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(legacy=False),
                "python": random.getstate(),
                "xla": xm.get_rng_state(),
            },
            "data": {"position": self.position},
            "step": self.step,
        }

    def restore(self, manager: xc.CheckpointManager, step: int) -> None:
        """Restore a step that was saved on any mesh."""
        state: dict[str, Any] = {"scheduler": self.scheduler, "rng": {}, "data": {}, "step": None}
        sharding = functools.partial(shard, mesh=self.mesh)
        manager.restore(step, state, model=self.model, optimizer=self.optim, sharding=sharding)
        self.position = state["data"]["position"]
        self.step = state["step"]
        torch.set_rng_state(state["rng"]["torch"])
        np.random.set_state(state["rng"]["numpy"])
        random.setstate(state["rng"]["python"])
        xm.set_rng_state(state["rng"]["xla"])


def build_model() -> LlamaForCausalLM:
    """Build the model; one token is one byte. The odd width makes some shards smaller than others."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=683,
            num_hidden_layers=2,
            num_attention_heads=8,
            max_position_embeddings=SEQUENCE,
            attention_dropout=0.1,
            use_cache=False,
        )
    )


def build_empty() -> LlamaForCausalLM:
    """Build the same model on the meta device, where it takes no memory."""
    with torch.device("meta"):
        model = build_model()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # no checkpoint has it, and it cannot reset itself
    return model


def shard(model: LlamaForCausalLM, mesh: xs.Mesh) -> None:
    """Shard the matrices over the mesh. The norms are not marked, so the compiler decides on their sharding."""
    for name, parameter in model.named_parameters():
        layer = name.split(".")[-2]
        if layer == "embed_tokens":
            xs.mark_sharding(parameter, mesh, ("fsdp", None))
        elif layer in ("o_proj", "down_proj"):
            xs.mark_sharding(parameter, mesh, ("fsdp", "tensor"))
        elif parameter.dim() == 2:
            xs.mark_sharding(parameter, mesh, ("tensor", "fsdp"))


def corpus() -> torch.Tensor:
    """Return sources of the Python standard library as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:CORPUS_BYTES]
    if len(text) < 100_000:
        raise SystemExit(f"found only {len(text)} bytes of Python sources in {sysconfig.get_paths()['stdlib']}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: torch.Tensor, position: int) -> torch.Tensor:
    """Return the batch of samples at ``position``; the samples depend on the position alone."""
    starts = [(position + n) * 1_000_003 % (len(text) - SEQUENCE) for n in range(BATCH)]
    return torch.stack([text[start : start + SEQUENCE] for start in starts]).long()


def rate(step: int, steps: int) -> float:
    """Return the learning rate's factor: a linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def layouts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the boxes of each tensor by device, read from the live tensors."""
    found = {}
    for key, value in flatten_state_dict(dict(state))[0].items():
        if isinstance(value, torch.Tensor):
            layout = access_of(value).layout(value)
            shards = [
                {"device": shard.device, "offsets": shard.box.offsets, "sizes": shard.box.sizes}
                for shard in layout.shards
            ]
            found[key] = {"shape": layout.shape, "spec": layout.sharding, "shards": shards}
    return found


def emit(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def report(training: Training, path: Path) -> None:
    """Write the digests and layouts of the current state on the devices to a file."""
    state = training.state()
    found = json.dumps({"digests": digests(state), "layouts": layouts(state)})
    temporary = path.with_suffix(".tmp")
    temporary.write_text(found, encoding="utf-8")
    temporary.replace(path)  # in one step, so that a kill leaves no torn file


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", required=True, help="fsdp x tensor, for example 4x2")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--losses", type=Path, required=True, help="file that gets one line for each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compare-at", type=int, help="train and save, and report the state after this step")
    parser.add_argument("--from-step", type=int, help="go on from this step and save nothing")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    xr.use_spmd()
    saves = args.from_step is None
    if not saves:
        wait_for_commit(args.run / str(args.from_step))
    shape = tuple(int(n) for n in args.mesh.split("x"))
    keep = xc.keep.Latest(2) | xc.keep.Every(steps=SAVE_EVERY * 3)
    with xc.CheckpointManager(
        args.run, SAVE_EVERY, keep=keep, chkpt_on_preemption=saves, device_memory_limit=1 << 30
    ) as manager:
        start = manager.latest_step() if saves else args.from_step
        training = Training(xs.Mesh(np.arange(8), shape, ("fsdp", "tensor")), args.steps, empty=start is not None)
        emit("built", parameters=sum(p.numel() for p in training.model.parameters()), corpus=len(training.text))
        if start is not None:
            begun = time.perf_counter()
            training.restore(manager, start)
            emit("restored", seconds=time.perf_counter() - begun, step=training.step)
        if not saves:
            report(training, args.report)
        run(training, manager, args)
        manager.wait()
        if saves:
            emit("history", table=str(manager.history()))


def run(training: Training, manager: xc.CheckpointManager, args: argparse.Namespace) -> None:
    """Train until the end, or until a preemption (SIGTERM)."""
    saved = False
    while training.step < args.steps:
        step, loss = training.step, training.train_step()
        with args.losses.open("a", encoding="utf-8") as losses:
            losses.write(json.dumps({"step": step, "loss": loss}) + "\n")
        emit("step", step=step, loss=loss)
        if args.from_step is not None:
            continue
        if training.step == args.compare_at:
            report(training, args.report)
        begun = time.perf_counter()
        if manager.save_async(training.step, training.state(), metrics={"loss": loss}):
            emit("saving", seconds=time.perf_counter() - begun, step=training.step, first=not saved)
            saved = True
        if manager.reached_preemption(training.step):
            raise SystemExit("SIGTERM has stopped the training. Run it again to go on.")


if __name__ == "__main__":
    main()
