"""One training process of the demo: a small Llama on a mesh of eight virtual devices.

    export PJRT_DEVICE=CPU CPU_NUM_DEVICES=8
    python scripts/demo_train.py --mesh 4x2 --run DIR --report FILE --losses FILE --steps 48 --compare-at 24
    python scripts/demo_train.py --mesh 2x4 --run DIR --report FILE --losses FILE --steps 48 --from-step 24

The first trains a run, or goes on with it where it was when it was stopped or killed; the second goes on from one of
its steps on another mesh, and saves nothing. Prints one line of JSON per event (progress, losses), and leaves in the
report file what the orchestrator compares: digests and layouts of the whole state at one step. The part worth copying
is ``Training``: ``state`` gathers what a run needs to go on, and ``restore`` puts it back on whatever mesh this process
has, into a model without data and an optimizer that never took a step.
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
from demo_digest import digests
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import torch_xla_ckpt as xc
from torch_xla_ckpt.device import access_of

BATCH, SEQUENCE = 8, 64  # bytes
CORPUS_BYTES = 4 << 20
WARM_UP = 8  # steps
SAVE_EVERY = 8  # steps


class Training:
    """A model, its optimizer and everything else that decides how training goes on.

    Args:
        mesh: with the axes "fsdp" and "tensor".
        steps: length of the whole run, which the learning rate's schedule needs.
        empty: build the model without data, for ``restore``.
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
        self.position = 0  # of the next sample
        xm.set_rng_state(0)

    def train_step(self) -> float:
        """Train on the next batch; returns its loss in nats per byte."""
        text = batch(self.text, self.position)
        # Noise from the host's generator here, dropout from the device's in the model: a resumed run can follow the
        # uninterrupted one only if both generators go on where they were.
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
        """All that a new process needs to go on from here."""
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
        """Go on from a step that was saved on any mesh."""
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
    """19 million parameters; one token is one byte. The odd width makes some shards smaller than others."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1366,
            num_hidden_layers=6,
            num_attention_heads=8,
            max_position_embeddings=SEQUENCE,
            attention_dropout=0.1,
            use_cache=False,
        )
    )


def build_empty() -> LlamaForCausalLM:
    """The same model on the meta device, which takes no memory."""
    with torch.device("meta"):
        model = build_model()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # no checkpoint has it, and it cannot reset itself
    return model


def shard(model: LlamaForCausalLM, mesh: xs.Mesh) -> None:
    """Tile the matrices over the mesh; the compiler decides about what is not marked, the norms."""
    for name, parameter in model.named_parameters():
        layer = name.split(".")[-2]
        if layer == "embed_tokens":
            xs.mark_sharding(parameter, mesh, ("fsdp", None))
        elif layer in ("o_proj", "down_proj"):
            xs.mark_sharding(parameter, mesh, ("fsdp", "tensor"))
        elif parameter.dim() == 2:
            xs.mark_sharding(parameter, mesh, ("tensor", "fsdp"))


def corpus() -> torch.Tensor:
    """Sources of the Python standard library, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:CORPUS_BYTES]
    if len(text) < 100_000:
        raise SystemExit(f"found only {len(text)} bytes of Python sources in {sysconfig.get_paths()['stdlib']}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: torch.Tensor, position: int) -> torch.Tensor:
    """The samples at ``position`` and after: nothing but the position decides what they are."""
    starts = [(position + n) * 1_000_003 % (len(text) - SEQUENCE) for n in range(BATCH)]
    return torch.stack([text[start : start + SEQUENCE] for start in starts]).long()


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def layouts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What each device holds of each tensor, read from the live tensors."""
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
    """Write down the whole state as it lies on the devices now."""
    state = training.state()
    found = json.dumps({"digests": digests(state), "layouts": layouts(state)})
    temporary = path.with_suffix(".tmp")
    temporary.write_text(found, encoding="utf-8")
    temporary.replace(path)  # whole or not at all, should this process be killed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", required=True, help="fsdp x tensor, for example 4x2")
    parser.add_argument("--run", type=Path, required=True, help="where the steps are saved")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--losses", type=Path, required=True, help="a line is added for each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compare-at", type=int, help="save now and then, and report the state after so many steps")
    parser.add_argument("--from-step", type=int, help="go on from this step, and save nothing")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    xr.use_spmd()
    shape = tuple(int(n) for n in args.mesh.split("x"))
    keep = xc.keep.Latest(2) | xc.keep.Every(steps=SAVE_EVERY * 3)
    with xc.CheckpointManager(args.run, SAVE_EVERY, keep=keep, device_memory_limit=1 << 30) as manager:
        start = manager.latest_step() if args.from_step is None else args.from_step
        training = Training(xs.Mesh(np.arange(8), shape, ("fsdp", "tensor")), args.steps, empty=start is not None)
        emit("built", parameters=sum(p.numel() for p in training.model.parameters()), corpus=len(training.text))
        if start is not None:
            begun = time.perf_counter()
            training.restore(manager, start)
            emit("restored", seconds=time.perf_counter() - begun, step=training.step)
        if args.from_step is not None:
            report(training, args.report)
        run(training, manager, args)
        manager.wait()
        if args.from_step is None:
            emit("history", table=str(manager.history()))


def run(training: Training, manager: xc.CheckpointManager, args: argparse.Namespace) -> None:
    """Train until the end, or until the machine is about to be taken away (SIGTERM)."""
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
            emit("saving", seconds=time.perf_counter() - begun, step=training.step)
        if manager.reached_preemption(training.step):
            raise SystemExit("stopped by SIGTERM; run it again to go on")


if __name__ == "__main__":
    main()
