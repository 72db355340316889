"""Run an unmodified Megatron script with the hook in place.

    python -m loongforge.megatron.launch pretrain_gpt.py --cross-entropy-loss-fusion \\
        --cross-entropy-fusion-impl linear ...
    torchrun --nproc-per-node 8 -m loongforge.megatron.launch pretrain_gpt.py ...

A module runs with ``-m NAME`` in place of the script.  The flags of ``FLAGS`` may stand anywhere on the command line;
they are taken off it and set the environment variable beside them.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import torch

from loongforge import dispatch, env
from loongforge.megatron.deferred import counters
from loongforge.megatron.hook import install
from loongforge.options import LossOptions

FLAGS = {
    "--lce-impl": "LCE_IMPL",
    "--lce-logits-budget-mb": "LCE_LOGITS_BUDGET_MB",
    "--lce-fwd-vocab-split-size": "LCE_FWD_VOCAB_SPLIT_SIZE",
    "--lce-bwd-vocab-split-size": "LCE_BWD_VOCAB_SPLIT_SIZE",
}
_USAGE = f"usage: python -m loongforge.megatron.launch (SCRIPT | -m MODULE) [ARGUMENTS] [{' | '.join(FLAGS)} VALUE]"


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate our flags (as environment variables with their texts) from everything else, in order.

    Raises:
        ValueError: a flag without its value, given twice with different values, or unknown.
    """
    variables: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, separator, value = argument.partition("=")
        if not flag.startswith("--lce-"):
            rest.append(argument)
            continue
        if flag not in FLAGS:
            raise ValueError(f"unknown flag {flag}; loongforge's are {', '.join(FLAGS)}")
        if not separator:
            value = next(remaining, "")
        if not value or value.startswith("--"):
            raise ValueError(f"{flag} needs a value")
        if variables.setdefault(FLAGS[flag], value) != value:
            raise ValueError(f"{flag} is given twice: {variables[FLAGS[flag]]} and {value}")
    return variables, rest


def main(arguments: Sequence[str] | None = None) -> None:
    """Install the hook, say what was hooked, and run the script; exits with a message where the hook does not fit."""
    try:
        variables, rest = split_flags(sys.argv[1:] if arguments is None else arguments)
        if not rest or rest[0] == "-m" and len(rest) < 2:
            raise ValueError(_USAGE)
        env.set_variables(variables)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        choice = dispatch.choose(device, LossOptions(), torch.bfloat16)
        report = install()
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        sys.exit(f"loongforge.megatron.launch: {error}")
    _say(f"{report}; implementation {choice}")
    if "linear" not in rest:
        _say(
            "'linear' is not on the command line: unless a configuration file asks for it, the loss stays unfused; "
            "pass --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
        )
    _run(rest)
    _say(f"{counters.fused} fused losses, {counters.materialized} times materialised logits")


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"loongforge: {message}", flush=True)


if __name__ == "__main__":
    main()
