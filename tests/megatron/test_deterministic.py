"""Megatron's own checks while hooked: ``linear`` in ``--deterministic-mode`` passes and nothing else does."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.megatron.launching import environment
from tests.megatron.matrix import UNPACKED

VALIDATE = """
import os, sys, typing, warnings
warnings.filterwarnings("ignore")
typing.override = getattr(typing, "override", lambda function: function)  # Python 3.12 has it
import torch
import loongforge.megatron
from loongforge.megatron import cpu
cpu.apply()
loongforge.megatron.install()
from loongforge.megatron import wrapping
for module, name in wrapping.MEGATRON_FSDP + wrapping.CHECKED:
    print(name, "->", vars(getattr(sys.modules[module], name))["__init__"].__wrapped__.__qualname__)
from megatron.training import arguments, initialize

def attempt(case, impl="linear", algorithm="Ring", **settings):
    os.environ["NCCL_ALGO"] = algorithm
    torch.use_deterministic_algorithms(False)
    args = arguments.parse_args(ignore_unknown_args=True)
    args.cross_entropy_fusion_impl, args.use_flash_attn = impl, False
    vars(args).update(settings)
    validate = getattr(initialize, "validate_args", None) or arguments.validate_args  # 0.17 has it by name there
    try:
        validate(args, {})
    except (AssertionError, NotImplementedError) as error:
        print(f"{case} -> refused:", *str(error).lower().split())
    else:
        print(f"{case} -> passed", args.cross_entropy_loss_fusion, torch.are_deterministic_algorithms_enabled())

attempt("linear")
attempt("native", impl="native")
attempt("algorithm", algorithm="NVLS")
attempt("fsdp", use_megatron_fsdp=True)
attempt("plain fsdp", use_megatron_fsdp=True, deterministic_mode=False)
attempt("native fsdp", "native", use_megatron_fsdp=True, deterministic_mode=False)
loongforge.megatron.uninstall()
attempt("unhooked")
loongforge.megatron.install()
attempt("hooked late")
"""
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 31 --transformer-impl local"
)


@pytest.mark.parametrize("version", UNPACKED)
def test_linear_passes_and_every_other_requirement_stays(version, request):
    if version == "0.18.2" and not request.config.getoption("--full-matrix", False):
        pytest.skip("0.17.1 and 0.19.2 have the two mechanisms; 0.18.2 runs with --full-matrix")
    command = [sys.executable, "-c", VALIDATE, *MODEL.split(" "), "--deterministic-mode", "--cross-entropy-loss-fusion"]
    variables = {**environment(version), "RANK": "0", "WORLD_SIZE": "1"}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    found = dict(line.split(" -> ", 1) for line in result.stdout.splitlines() if " -> " in line)
    assert found["linear"] == found["hooked late"] == "passed True True"
    fusion = "cross_entropy_loss_fusion=false" if version == "0.19.2" else "cross entropy fusion is currently not"
    fsdp = "cross_entropy_fusion_impl='linear' does not support megatron-fsdp"
    refused = {"native": fusion, "unhooked": fusion, "algorithm": "nccl_algo", "fsdp": fsdp, "plain fsdp": fsdp}
    for case, reason in {**refused, "native fsdp": "fsdp_dtensor"}.items():
        assert found[case].startswith("refused: ") and reason in found[case], case
    data_parallel = "DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel"
    for name in (*data_parallel, "MegatronFSDP"):
        assert found[name] == f"{name}.__init__"


def test_a_checkout_without_the_function_can_be_imported(tmp_path, monkeypatch):
    """``megatron.training`` is no part of megatron-core's package: people change it."""
    import loongforge.megatron
    from loongforge.megatron import validation

    (tmp_path / "changed_arguments.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(validation, "REFUSING", {"changed_arguments": "validate_args"})
    loongforge.megatron.install()
    try:
        assert importlib.import_module("changed_arguments").VALUE == 1
    finally:
        loongforge.megatron.uninstall()
        sys.modules.pop("changed_arguments", None)
