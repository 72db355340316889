"""Run an unmodified Megatron script with the hook in place.

    python -m loongforge.megatron.launch pretrain_gpt.py --cross-entropy-loss-fusion \\
        --cross-entropy-fusion-impl linear ...
    torchrun --nproc-per-node 8 -m loongforge.megatron.launch pretrain_gpt.py ...

A module runs with ``-m NAME`` in place of the script.  The flags of ``FLAGS`` may stand anywhere on the command line;
they are taken off it and set the environment variable beside them.  ``--lce-impl megatron`` hooks nothing: the branches
of Megatron that bring a ``linear`` of their own then run it, on the GPUs that it is written for.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import torch

from loongforge import env
from loongforge.megatron import support
from loongforge.megatron.deferred import counters
from loongforge.megatron.start import install_and_say, say

FLAGS = {
    "--lce-impl": "LCE_IMPL",
    "--lce-logits-budget-mb": "LCE_LOGITS_BUDGET_MB",
    "--lce-fwd-vocab-split-size": "LCE_FWD_VOCAB_SPLIT_SIZE",
    "--lce-bwd-vocab-split-size": "LCE_BWD_VOCAB_SPLIT_SIZE",
}
MEGATRONS_OWN = "megatron"
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
        hooked = variables.get("LCE_IMPL") != MEGATRONS_OWN
        if hooked:
            env.set_variables(variables)
            install_and_say()
        else:
            check_megatrons_own()
            say("nothing is hooked: Megatron's own linear cross-entropy runs")
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        sys.exit(f"loongforge.megatron.launch: {error}")
    if "linear" not in rest:
        say(
            "'linear' is not on the command line: unless a configuration file asks for it, the loss stays unfused; "
            "pass --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
        )
    _run(rest)
    if hooked:
        say(f"{counters.fused} fused losses, {counters.materialized} times materialised logits")


def check_megatrons_own() -> None:
    """Raise ``RuntimeError`` unless Megatron brings a ``linear`` of its own and the GPU is one that it runs on."""
    if support.own_linear_layer() is None:
        raise RuntimeError(f"--lce-impl {MEGATRONS_OWN}: this Megatron has no linear cross-entropy of its own")
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    if major != 10:
        here = "there is no CUDA device" if major is None else f"this GPU is of compute capability {major}.x"
        raise RuntimeError(f"--lce-impl {MEGATRONS_OWN}: Megatron's own runs on compute capability 10.x; {here}")


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
