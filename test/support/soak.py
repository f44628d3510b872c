"""Training that is killed again and again, and must go on as if nothing had happened.

    scripts/soak --restarts 600 --seed 7     # longer than the test does it

``Chain`` starts real training processes on meshes that change, kills them at random moments, and compares what they
wrote down about themselves. Every process notes, for each step, a digest of the whole state before and after it, and
the loss. Whatever was saved and comes back must have the digest it had; a step that is taken again on the same mesh
must give the same loss and the same state; the newest committed step is the one that is restored; none is lost that
the policy keeps; and the disk never holds more than the policy allows and one save.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

from support import devices
from support.programs import Program

MESHES = ("8x1", "4x2", "2x4", "1x8")
LATEST, EVERY = 2, 100
TRAINED = (0, 0, 1, 2, 8, 12, 16)  # steps that a process takes before its end draws near
LIMIT = 150  # seconds for a process to end
PATIENCE = datetime.timedelta(seconds=20)  # of a process with another one that was killed


class Chain:
    """One run, killed and restarted.

    Args:
        place: path or URL of the run.
        folder: for what the processes write down.
        seed: of everything that is random here.
        options: keyword arguments of the manager, for object stores.
    """

    def __init__(self, place, folder, seed, options=None):
        from torch_xla_ckpt.manager.steps import Steps
        from torch_xla_ckpt.storage.location import Location

        self.place, self.folder, self.chance, self.options = (
            str(place),
            Path(folder),
            random.Random(seed),
            options or {},
        )
        self.steps = Steps(Location.of(self.place, self.options.get("storage_options")))
        self.log = self.folder / "log.jsonl"
        self.log.touch()
        self.mesh = "4x2"
        self.told = set()  # steps that a process was told are committed
        self.size = 0  # bytes of the largest step
        self.blows = []

    def run(self, restarts):
        for number in range(restarts):
            self.restart(number)
        self.check_steps()
        repeated = self.check_log()
        return {"blows": self.blows, "repeated": repeated, "last": max(self.steps.restorable())}

    def restart(self, number):
        if self.chance.random() < 0.5:
            self.mesh = self.chance.choice(MESHES)
        world = 2 if self.chance.random() < 0.25 and not self.options else 1
        blow = (
            self.chance.choice(["kill", "kill", "kill", "term"]) if world == 1 else self.chance.choice(["kill", "one"])
        )
        newest = max(self.steps.restorable(), default=None)
        processes = [self.start(number, rank, world) for rank in range(world)]
        try:
            began = self.wait_for(number, "restored", processes)
            assert began["step"] == newest, f"restart {number}: step {newest} was there, {began['step']} was restored"
            # Half of the processes get far enough to commit something, however slow the machine is.
            trained = self.chance.choice(TRAINED)
            self.wait_for(number, "trained", processes, trained)
            # Steps, saves and deletions take milliseconds here, so any moment is as good as another.
            time.sleep(self.chance.random() ** 2 * 0.3)
            if blow == "term":
                processes[0].send_signal(signal.SIGTERM)
            elif blow == "one":
                processes[self.chance.randrange(world)].kill()
            else:
                for process in processes:
                    process.kill()
            for process in processes:
                process.wait(LIMIT)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.blows.append(f"{blow}{world}")
        if blow == "term":
            assert processes[0].returncode == 0, self.said(number)
            last = self.events(number)[-1]
            assert last["event"] == "preempted" and last["step"] in self.steps.restorable(), last
        self.check_steps()

    def start(self, number, rank, world):
        arguments = (self.place, str(self.folder), number, self.mesh, rank, world, self.options)
        return Program(train, arguments, self.folder / f"said-{number}-{rank}.txt")

    def said(self, number):
        return "\n".join(file.read_text()[-3000:] for file in self.folder.glob(f"said-{number}-*.txt"))

    def events(self, number=None):
        """What processes wrote down; the last line may be cut off."""
        found = []
        for line in self.log.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if number is None or event["restart"] == number:
                found.append(event)
        return found

    def wait_for(self, number, what, processes, count=1):
        """The event with which there are ``count`` of this kind in a restart; None if none was wanted."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            found = [event for event in self.events(number) if event["event"] == what]
            if len(found) >= count:
                return found[count - 1] if count else None
            assert all(process.poll() is None for process in processes), self.said(number)
            threading.Event().wait(0.02)
        raise AssertionError(f"restart {number} hangs: {self.said(number)}")

    def check_steps(self):
        """None is lost that was committed and that the policy keeps, and the disk is not full of others."""
        there = self.steps.restorable()
        for event in self.events():
            if event["event"] == "committed":
                self.told.add(event["step"])
        self.told |= set(there)
        kept = set(sorted(self.told)[-LATEST:]) | {step for step in self.told if step % EVERY == 0}
        assert kept <= set(there), f"lost: {kept - set(there)}"
        sizes = {step: self.bytes_of(step) for step in self.steps.numbers()}
        if there:
            self.size = max(self.size, *(sizes[step] for step in there))
            others = {step: size for step, size in sizes.items() if step not in kept}
            # One save; on another mesh it has other chunks, and each of them a header.
            assert sum(others.values()) <= 1.3 * self.size, f"{others} is more than one save of {self.size}"

    def bytes_of(self, step):
        folder, total = self.steps.folder(step), 0
        for name in folder.names():
            with contextlib.suppress(FileNotFoundError):
                total += folder.size(name)
        return total

    def check_log(self):
        """What is known of one state agrees, and so do all steps that were taken from it on one mesh."""
        digests, taken, repeated = {}, {}, 0
        for event in self.events():
            if event["event"] == "saved":
                digests[event["step"], event["restart"]] = event["digest"]
        saved = {}
        for event in self.events():
            if event["event"] == "saved":
                saved.setdefault(event["step"], set()).add(event["digest"])
            if event["event"] == "restored" and event["step"] is not None:
                assert event["digest"] in saved[event["step"]], f"restart {event['restart']}: another state came back"
            if event["event"] == "trained":
                key = event["before"], event["mesh"]
                outcome = event["step"], event["loss"], event["after"]
                if key in taken:
                    repeated += 1
                    assert taken[key] == outcome, (
                        f"a step went otherwise when it was taken again: {taken[key]}, {outcome}"
                    )
                taken[key] = outcome
        return repeated


def train(place, folder, restart, mesh_name, rank, world, options):
    """One process: restores what is there, and trains until it is stopped."""
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.spmd as xs

    import torch_xla_ckpt as xc
    from support.meshes import mesh
    from support.training import on_host

    if world > 1:
        rendezvous = Path(folder) / f"rendezvous-{restart}"
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=PATIENCE
        )

    def note(event, **facts):
        if rank == 0:
            with open(Path(folder) / "log.jsonl", "a") as log:
                log.write(json.dumps({"event": event, "restart": restart, **facts}) + "\n")

    on = mesh(tuple(map(int, mesh_name.split("x"))))
    torch.manual_seed(0)
    with torch.device("meta") if restart % 2 else torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))

    def shard(module):
        xs.mark_sharding(module[0].weight, on, ("a", "b"))
        xs.mark_sharding(module[2].weight, on, (None, "b"))

    # Products with powers of two are exact. With other factors, a fused multiply-add changes the last bit of parameters
    # in one of two graphs: the first step after a restore has a graph of its own.
    optim = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=2**-1)
    noise = torch.Generator().manual_seed(1)
    data = {"position": 0, "noise": noise.get_state()}

    def state():
        return {"model": model.state_dict(), "optim": optim.state_dict(), "data": data}

    def digest():
        total = hashlib.sha256()
        for key, value in sorted(on_host(state()).items()):
            total.update(key.encode())
            total.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        return total.hexdigest()

    manager = xc.CheckpointManager(
        place,
        keep=xc.keep.Latest(LATEST) | xc.keep.Every(steps=EVERY),
        when=lambda now: now.step % 3 == 0 or now.step % 7 == 0,
        rng=True,
        timeout=PATIENCE,
        sync=False,
        device_memory_limit=1 << 30 if restart % 3 else 0,
        **options,
    )
    step = (
        manager.restore_latest(model=model, optimizer=optim, sharding=shard, data=data) if manager.all_steps() else None
    )
    if step is None:
        model.to_empty(device="cpu") if restart % 2 else None
        if restart % 2:
            for layer in (model[0], model[2]):
                layer.reset_parameters()
        model.to("xla")
        shard(model)
        torch_xla.sync()
    noise.set_state(data["noise"])
    before = digest()
    note("restored", step=step, digest=before, mesh=mesh_name)
    number = 0 if step is None else step + 1
    while True:
        drawn = torch.rand(8, 16, generator=noise)
        inputs = (torch.arange(8 * 16).reshape(8, 16) + data["position"]).sin() + 0.01 * drawn
        loss = model(inputs.to("xla")).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        torch_xla.sync()
        data["position"] += 8
        data["noise"].copy_(noise.get_state())
        after = digest()
        note("trained", step=number, before=before, after=after, loss=loss.item().hex(), mesh=mesh_name)
        note("saved", step=number, digest=after)  # it may be
        save = manager.save if number % 4 == 0 else manager.save_async
        save(number, state(), metrics={"loss": loss.item()})
        if number % 5 == 0:
            manager.wait()
            for done in manager.all_steps():
                note("committed", step=done)
        if manager.reached_preemption(number):
            manager.close()
            note("preempted", step=number)
            return
        before = after
        number += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    devices.set_up()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes").mkdir()
        start = time.monotonic()
        found = Chain(f"{folder}/run", f"{folder}/notes", options.seed).run(options.restarts)
        print(f"{options.restarts} restarts in {time.monotonic() - start:.0f} s: {found}")


if __name__ == "__main__":
    main()
