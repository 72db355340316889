"""Run an unmodified Megatron script with the hook in place.

    python -m loongforge.megatron.launch pretrain_gpt.py --cross-entropy-loss-fusion \\
        --cross-entropy-fusion-impl linear ...
    torchrun --nproc-per-node 8 -m loongforge.megatron.launch pretrain_gpt.py ...

A module runs with ``-m NAME`` in place of the script.  The flags of ``FLAGS`` may stand anywhere on the command line;
they are taken off it and set the environment variable beside them.  ``--lce-impl megatron`` hooks nothing: the branches
of Megatron that bring a ``linear`` of their own then run it, on the GPUs that it is written for.  Modules are searched
where ``python SCRIPT`` would, so that the Megatron that is hooked is the one that the script imports.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import torch

from loongforge import env
from loongforge.megatron import support
from loongforge.megatron.arguments import IMPL
from loongforge.megatron.deferred import counters
from loongforge.megatron.start import install_and_say, say

FLAGS = {
    "--lce-impl": "LCE_IMPL",
    "--lce-logits-budget-mb": "LCE_LOGITS_BUDGET_MB",
    "--lce-fwd-vocab-split-size": "LCE_FWD_VOCAB_SPLIT_SIZE",
    "--lce-bwd-vocab-split-size": "LCE_BWD_VOCAB_SPLIT_SIZE",
}
MEGATRONS_OWN = "megatron"
FUSION_FLAG, IMPL_FLAG = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
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
        if not flag.startswith("--lce"):
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
        _search_modules_as_python_would(rest)
        hooked = variables.get("LCE_IMPL") != MEGATRONS_OWN
        if hooked:
            env.set_variables(variables)
            install_and_say()
        else:
            check_megatrons_own()
            say("nothing is hooked: Megatron's own linear cross-entropy runs")
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        sys.exit(f"loongforge.megatron.launch: {error}")
    missing = missing_flags(rest)
    if missing:
        say(f"the command line has no {missing}: unless the script or a configuration asks for it, nothing is fused")
    try:
        _run(rest)
    finally:  # a training script may end with sys.exit()
        if hooked:
            counts = f"{counters.fused} fused losses, {counters.materialized} times materialised logits"
            say(counts, rank=int(os.environ.get("WORLD_SIZE", "1")) - 1)  # of the last pipeline stage


def missing_flags(command: Sequence[str]) -> str:
    """What the command line lacks of Megatron's two flags, in words; empty where both ask for ``linear``."""
    missing = [] if FUSION_FLAG in command else [FUSION_FLAG]
    text = " ".join(command) + " "
    if f" {IMPL_FLAG} {IMPL} " not in text and f" {IMPL_FLAG}={IMPL} " not in text:
        missing.append(f"{IMPL_FLAG} {IMPL}")
    return " and no ".join(missing)


def check_megatrons_own() -> None:
    """Raise ``RuntimeError`` unless Megatron brings a ``linear`` of its own and the GPU is one that it runs on."""
    if support.own_linear_layer() is None:
        raise RuntimeError(f"--lce-impl {MEGATRONS_OWN}: this Megatron has no linear cross-entropy of its own")
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    if major != 10:
        here = "there is no CUDA device" if major is None else f"this GPU is of compute capability {major}.x"
        raise RuntimeError(f"--lce-impl {MEGATRONS_OWN}: Megatron's own runs on compute capability 10.x; {here}")


def _search_modules_as_python_would(command: Sequence[str]) -> None:
    """Put the script's folder where this module's caller put the current one; ``ValueError`` without a script."""
    if not command or command[0].startswith("-") and (command[0] != "-m" or len(command) < 2):
        raise ValueError(_USAGE)
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        return
    if not os.path.exists(command[0]):
        raise ValueError(f"there is no script {command[0]}; {_USAGE}")
    folder = os.path.dirname(os.path.realpath(command[0]))
    sys.path[:1] = [folder] if sys.path[:1] == [os.getcwd()] else [folder, *sys.path[:1]]


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
