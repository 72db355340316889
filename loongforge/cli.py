"""`loongforge COMMAND`: the only place that reads the command line."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import loongforge
from loongforge.errors import UsageError
from loongforge.train import config_io
from loongforge.train.errors import TrainError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where doctor finds a problem, 2 after an explained error."""
    parser = argparse.ArgumentParser(prog="loongforge", description="The fused output layer of language models.")
    parser.add_argument("--version", action="version", version=f"loongforge {loongforge.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_preprocess(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_memory(commands)
    options = vars(parser.parse_args(arguments))
    run = options.pop("run")
    del options["command"]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # At import and at build megatron-core tells of every optional package that is not there.
    for module in (r"megatron\.core", r"loongforge\.megatron\.cpu"):  # the second calls on behalf of the first
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    # Notices to developers about megatron-core's use of torch.
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        return run(options) or 0
    except (TrainError, UsageError) as error:
        print(f"loongforge: error: {error}", file=sys.stderr, flush=True)
        return 2


def _add_train(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a GPT with megatron-core",
        usage="loongforge train --config FILE [--dry-run | --compare-unfused STEPS] [flags that override keys]",
        description="Train a GPT with megatron-core.  A flag overrides the key of the same name in the config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file; see configs/")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="check the config and print the plan, train nothing")
    mode.add_argument(
        "--compare-unfused",
        type=int,
        metavar="STEPS",
        help="train STEPS steps with the fused and with the plain output layer, side by side, and measure both",
    )
    config_io.add_flags(parser)
    parser.set_defaults(run=_train)


def _train(options: dict) -> None:
    dry_run, compare_steps = options.pop("dry_run"), options.pop("compare_unfused")
    config = config_io.load_config(options.pop("config"), options)
    if dry_run:
        from loongforge.train.dry_run import dry_run as describe

        print(describe(config))
    elif compare_steps is not None:
        from loongforge.train.compare import compare_with_unfused

        compare_with_unfused(config, compare_steps)
    else:
        from loongforge.train.loop import train

        train(config)


def _add_preprocess(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "preprocess",
        help="turn text into Megatron token files",
        description="Write PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json.  A .jsonl file holds one document per "
        'line under "text"; any other file is text, cut into documents at blank lines.',
        allow_abbrev=False,
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="text files, UTF-8")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="where the token files go")
    parser.add_argument("--tokenizer", default="bpe", help="bytes, bpe (trained on the input), or a tokenizer file")
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens of a BPE that is trained (default 8192)")
    parser.set_defaults(run=_preprocess)


def _preprocess(options: dict) -> None:
    from loongforge.train.preprocess import preprocess

    prefix = options["output_prefix"]
    counts = preprocess(options["input"], prefix, options["tokenizer"], options["vocab_size"])
    print(
        f"{counts.documents:,} documents, {counts.characters:,} characters -> {counts.tokens:,} tokens, "
        f"vocabulary {counts.vocab_size}: {prefix}.bin, {prefix}.idx, {prefix}.tokenizer.json"
    )


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed and chosen, and test it on this machine",
        description="Versions, devices, the implementation chosen and why, the Megatron hook, LCE_* variables, and a "
        "short test of correctness on every device.  Exit status 1 where something is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: dict) -> int:
    from loongforge.doctor import describe, examine

    report = examine()
    print(json.dumps(report, indent=2) if options["json"] else describe(report))
    return 0 if report["healthy"] else 1


def _add_plan(commands: argparse._SubParsersAction) -> None:
    from loongforge.planning.command import add_arguments

    parser = commands.add_parser(
        "plan",
        help="predict memory and time of one output layer, and recommend a budget",
        description="Memory of the logits unfused and fused, chunk widths, memory and time over budgets, and the "
        "LCE_LOGITS_BUDGET_MB that fits free memory.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.set_defaults(run=_plan)


def _plan(options: dict) -> None:
    from loongforge.planning.command import run

    print(run(argparse.Namespace(**options)))


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from loongforge.bench.run import add_arguments

    parser = commands.add_parser(
        "bench",
        help="compare the loss with every installed peer on this machine",
        description="Time, memory and errors of loongforge at several budgets and of every peer that can be imported, "
        "each checked before it is timed.  The table comes last.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.set_defaults(run=_bench)


def _bench(options: dict) -> None:
    from loongforge.bench.run import run

    run(argparse.Namespace(**options))


def _add_memory(commands: argparse._SubParsersAction) -> None:
    from loongforge.bench.memory import add_arguments

    parser = commands.add_parser(
        "memory",
        help="draw the memory of one loss over time, unfused beside fused",
        description="Record every allocation of forward and backward of one output layer, unfused and fused.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.set_defaults(run=_memory)


def _memory(options: dict) -> None:
    from loongforge.bench.memory import run

    print(run(argparse.Namespace(**options)))


if __name__ == "__main__":  # saving a checkpoint starts a helper process that imports this module
    sys.exit(main())
