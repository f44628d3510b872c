"""Calls of the command line ``xc``, in this process and in others."""

import json
from dataclasses import dataclass

from click.testing import CliRunner
from jsonschema import Draft202012Validator

from support import interpreters
from support.paths import ROOT
from torch_xla_ckpt.cli.program import xc


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.out.splitlines()


SCHEMA = Draft202012Validator(json.loads((ROOT / "docs" / "xc.schema.json").read_text(encoding="utf-8")))


def call(*arguments, **variables):
    """Run a command in this process. Its JSON must be what the documented schema says."""
    result = CliRunner().invoke(xc, [str(one) for one in arguments], env=variables, prog_name="xc")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    answer = Answer(result.exit_code, result.stdout, result.stderr)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in options and answer.out:
        SCHEMA.validate(answer.json)
    return answer


def start(*arguments, **variables):
    """Run a command in a process of its own, with its output in pipes."""
    command = ["-m", "torch_xla_ckpt", *arguments]
    done = interpreters.run(command, env=variables)
    return Answer(done.returncode, done.stdout, done.stderr)
