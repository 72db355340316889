"""The whole loss: GEMMs by torch on the CPU, FlyDSL's row kernels on the AMD emulator.  No AMD GPU is involved."""

import warnings
from functools import cache

import pytest
import torch

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)

import loongforge  # noqa: E402
from loongforge import LossOptions, dispatch  # noqa: E402
from loongforge.arch import Arch  # noqa: E402
from loongforge.gradients_in_forward import gradient_bytes  # noqa: E402
from loongforge.kernels.flydsl import compile as flydsl_compile  # noqa: E402
from loongforge.kernels.flydsl.variant import TARGETS  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402
from tests.core.implementations import Subject  # noqa: E402
from tests.core.report_cases import CASES  # noqa: E402
from tests.core.test_no_sync import Forbidden  # noqa: E402
from tests.core.worlds import run_world  # noqa: E402
from tests.helpers import (  # noqa: E402
    assert_honest,
    eager,
    loss_and_gradients,
    make_inputs,
    oracle,
    poison_memory,
    relative,
    upstream,
)
from tests.kernels.flydsl_parallel_checks import CHECKS, use  # noqa: E402

results = cache(run_world)
REPORTS = (
    "every_reduction",
    "upstream_gradient_differs_per_token",
    "upstream_gradient_is_expanded_or_strided",
    "vectors_are_strided",
    "classes_masked_by_large_finite_numbers",
    "ragged_vocabulary_under_low_logits",
    "label_out_of_range_is_nan_in_its_row",
    "bias_and_its_gradient",
    "label_smoothing_with_class_weights",
    "logits_near_two_thousand",
)
OPTIONS = {
    "mean": {},
    "none": {"reduction": "none"},
    "smoothing": {"reduction": "none", "label_smoothing": 0.1},
    "z_loss_and_softcap": {"reduction": "sum", "z_loss_weight": 0.01, "softcap": 3.0},
    "kept": {"reduction": "none", "logits_budget_mb": "all"},
}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_linear_cross_entropy(arch, dtype, monkeypatch):
    poison_memory(monkeypatch)
    kernels = use(monkeypatch, EmulatedFlyDSLRowKernels(arch))
    inputs = make_inputs(11, 16, 101, dtype)
    options = LossOptions(reduction="none")
    ours = loss_and_gradients(lambda *t: loongforge.linear_cross_entropy(*t, reduction="none"), inputs.leaves())
    truth = loss_and_gradients(oracle(options), inputs.leaves(torch.float64))
    assert_honest(ours, loss_and_gradients(eager(options), inputs.leaves()), truth)
    assert len(kernels.launches) == 4, "two chunks, forward and backward"


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(arch, name, monkeypatch):
    use(monkeypatch, EmulatedFlyDSLRowKernels(arch))
    inputs, options = make_inputs(9, 16, 101, torch.float32), OPTIONS[name]
    ours = loss_and_gradients(lambda *t: loongforge.linear_cross_entropy(*t, **options), inputs.leaves())
    truth = loss_and_gradients(oracle(LossOptions(**options)), inputs.leaves(torch.float64))
    assert_honest(ours, loss_and_gradients(eager(LossOptions(**options)), inputs.leaves()), truth)


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_gradients_in_forward_over_chunks_of_tokens(arch, reduction, monkeypatch):
    """ceil(19 / ceil(50 / 8)) = 3 tokens, rounded up to 4: five chunks, of which the last is ragged."""
    kernels = use(monkeypatch, EmulatedFlyDSLRowKernels(arch))
    monkeypatch.setattr("loongforge.budget._MIB", 1)  # small shapes need a budget finer than MiB
    inputs = make_inputs(19, 8, 50, bias=True)
    ours, truth = inputs.leaves(), inputs.leaves(torch.float64)
    budget = gradient_bytes(*ours.tensors[:2], ours.bias)
    loss = loongforge.linear_cross_entropy(
        ours.hidden, ours.weight, ours.target, bias=ours.bias, reduction=reduction, logits_budget_mb=budget
    )
    assert len(kernels.launches) == 2 * 5
    expected = oracle(LossOptions(reduction=reduction))(truth.hidden, truth.weight, truth.target, truth.bias)
    first = torch.autograd.grad(loss * -3.3, ours.tensors, retain_graph=True)
    second = torch.autograd.grad(loss * -3.3, ours.tensors)
    assert relative(loss, expected) < 1e-6 and len(kernels.launches) == 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "saved gradients were changed"
    for grad, true in zip(first, torch.autograd.grad(expected * -3.3, truth.tensors), strict=True):
        assert relative(grad, true) < 1e-6


def test_nothing_synchronises_with_the_host(monkeypatch):
    use(monkeypatch, EmulatedFlyDSLRowKernels("gfx942"))
    inputs, class_weight = make_inputs(9, 16, 101).leaves(), torch.ones(101)
    with Forbidden():
        loss = loongforge.linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, label_smoothing=0.1, class_weight=class_weight
        )
        torch.autograd.grad(loss, inputs.tensors)
        loss = loongforge.cross_entropy(inputs.weight * 1.0, inputs.target.new_zeros(101), inplace_backward=True)
        torch.autograd.grad(loss, inputs.weight)


@pytest.mark.parametrize("arch", TARGETS)
def test_cross_entropy_of_existing_logits_in_place(arch, monkeypatch):
    use(monkeypatch, EmulatedFlyDSLRowKernels(arch))
    logits = torch.randn(6, 1003)
    target = torch.tensor([1002, -100, 0, 7, 8, 9])
    leaf = logits.clone().requires_grad_()
    loss = loongforge.cross_entropy(leaf * 1.0, target, reduction="none", inplace_backward=True)
    loss.backward(upstream(6).float())
    truth_leaf = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(truth_leaf, target, reduction="none")
    truth.backward(upstream(6))
    assert relative(loss, truth) < 1e-6 and relative(leaf.grad, truth_leaf.grad) < 1e-6


@pytest.mark.parametrize("arch", TARGETS)
def test_every_token_ignored(arch, monkeypatch):
    use(monkeypatch, EmulatedFlyDSLRowKernels(arch), width=48)
    CASES["every_token_ignored"].run(Subject("flydsl"))


@pytest.mark.parametrize("name", REPORTS)
def test_reported_bugs(name, monkeypatch):
    use(monkeypatch, EmulatedFlyDSLRowKernels("gfx942"), width=48)
    CASES[name].run(Subject("flydsl"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name):
    assert results(2, "tests.kernels.flydsl_parallel_checks")[name] == ""


# -- selection -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gfx942(monkeypatch):
    monkeypatch.setattr(dispatch, "detect", lambda device: Arch("amd", "gfx942"))
    monkeypatch.setattr("loongforge.kernels.amd_flydsl.detect", lambda device: Arch("amd", "gfx942"))
    dispatch._load.cache_clear()
    dispatch._unusable.cache_clear()
    dispatch._warn_once.cache_clear()
    yield
    dispatch._unusable.cache_clear()


def test_flydsl_is_chosen_and_compiled_ahead(on_gfx942):
    before = flydsl_compile.launcher.cache_info().currsize
    flydsl_compile.launcher.cache_clear()
    kernels = dispatch.row_kernels(torch.device("cpu"), LossOptions(), torch.bfloat16)
    assert kernels.name == "flydsl" and flydsl_compile.launcher.cache_info().currsize == 2, before


def test_a_kernel_that_does_not_compile_leaves_auto_with_triton_and_a_warning(on_gfx942, monkeypatch):
    def broken(launch, variant):
        raise ValueError("no such instruction")

    flydsl_compile.launcher.cache_clear()
    monkeypatch.setattr(flydsl_compile, "_compile", broken)
    with pytest.warns(RuntimeWarning, match="kernel for gfx942, bfloat16: no such instruction.*triton"):
        kernels = dispatch.row_kernels(torch.device("cpu"), LossOptions(), torch.bfloat16)
    assert kernels.name == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert dispatch.row_kernels(torch.device("cpu"), LossOptions(), torch.bfloat16).name == "triton"
    with pytest.raises(RuntimeError, match="could not compile the accumulate kernel for gfx942, bfloat16"):
        dispatch.row_kernels(torch.device("cpu"), LossOptions(impl="flydsl"), torch.bfloat16)


def test_auto_covers_the_variant_with_class_weights(on_gfx942, monkeypatch):
    """Where no Triton is either, generic computes the loss."""
    compile_variant = flydsl_compile._compile

    def broken(launch, variant):
        if variant.class_weighted:
            raise ValueError("no such instruction")
        return compile_variant(launch, variant)

    flydsl_compile.launcher.cache_clear()
    monkeypatch.setattr(flydsl_compile, "_compile", broken)
    monkeypatch.setattr(dispatch, "missing_package", lambda name: None if name == "generic" else "it is not installed")
    logits, target, class_weight = torch.randn(5, 7), torch.arange(5), torch.rand(7) + 0.5
    options = {"label_smoothing": 0.1, "class_weight": class_weight}
    expected = torch.nn.functional.cross_entropy(logits, target, class_weight, label_smoothing=0.1)
    for loss_of in (
        lambda: loongforge.cross_entropy(logits, target, **options),
        lambda: loongforge.linear_cross_entropy(logits, torch.eye(7), target, **options),
    ):
        dispatch._warn_once.cache_clear()
        with pytest.warns(RuntimeWarning, match=r"\(uniform, class_weighted\): no such instruction.*generic instead"):
            assert relative(loss_of(), expected) < 1e-6
