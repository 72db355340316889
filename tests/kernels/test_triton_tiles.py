"""The tile kernels, plain Triton and Gluon, against float64 truth: on a Hopper GPU or without one.

Without a GPU these tests skip in an ordinary run and ``test_triton_interpreter.py`` runs them in a process of their
own, the Gluon kernels' Python on the machine of ``gluon_machine.py``.  The interpreter computes bfloat16 products of
tensor descriptors wrongly, so float16 stands for both there.
"""

import itertools

import pytest
import torch

from loongforge import LossOptions, linear_cross_entropy
from loongforge.kernels.interface import Chunk, RowStats
from loongforge.kernels.reference import reference_loss
from loongforge.plan import KEPT_MULTIPLE
from tests.helpers import poison_memory, worst
from tests.kernels import gluon_machine
from tests.kernels.triton_cases import DEVICE, IDENTITY, INTERPRETED, SOFTCAP, assert_close, x_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(
    not (HOPPER or INTERPRETED), reason="no Hopper GPU; test_triton_interpreter.py runs this file under the interpreter"
)
DTYPES = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
OPTIONS = (
    {},
    {"logit_scale": -0.5},
    {"softcap": 3.0, "logit_scale": 0.5},
    {"label_smoothing": 0.1, "z_loss_weight": 1e-2, "softcap": 3.0},
)


@pytest.fixture(params=("triton", "gluon"))
def tiles(request, monkeypatch):
    """The tile kernels, put in the place where dispatch chooses, and a record of their calls; memory starts as NaN."""
    from loongforge import call
    from loongforge.kernels import gluon_ring, gluon_tiles, triton_rows, triton_tiles

    if request.param == "gluon":
        if not HOPPER:
            gluon_machine.install(monkeypatch, gluon_ring, gluon_tiles, triton_rows, triton_tiles)
        kernels = gluon_tiles.GluonTileKernels()
    else:
        kernels = triton_tiles.TritonTileKernels()
    kernels.calls = []
    poison_memory(monkeypatch)

    def recorded(name):
        original = getattr(kernels, name)

        def run(*arguments):
            kernels.calls.append(name)
            return original(*arguments)

        return run

    kernels.accumulate, kernels.gradient = recorded("accumulate"), recorded("gradient")
    monkeypatch.setattr(
        call, "tile_kernels", lambda impl, hidden, weight: kernels if kernels.supports(hidden, weight) else None
    )
    return kernels


def make(num_tokens, hidden_size, num_classes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(num_classes, hidden_size, generator=generator) / 2).to(dtype)
    bias = torch.randn(num_classes, generator=generator).to(dtype)
    target = torch.randint(0, num_classes, (num_tokens,), generator=generator)
    target[::5] = -100
    upstream = torch.randn(num_tokens, generator=generator)
    return [tensor.to(DEVICE) for tensor in (hidden, weight, bias, target, upstream)]


def relative_error(actual, expected):
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def run(inputs, with_bias=True, class_weight=None, impl="generic", **options):
    """Loss and gradients of ours, and their relative errors against the oracle."""
    *tensors, target, upstream = inputs
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    truth = [tensor.double().requires_grad_() for tensor in tensors]
    used = 3 if with_bias else 2
    loss = linear_cross_entropy(
        ours[0], ours[1], target, bias=ours[2] if with_bias else None, class_weight=class_weight,
        reduction="none", impl=impl, **options,
    )  # fmt: skip
    options.pop("logits_budget_mb", None)
    expected = reference_loss(
        truth[0], truth[1], target, LossOptions(reduction="none", **options),
        bias=truth[2] if with_bias else None, class_weight=class_weight,
    )  # fmt: skip
    grads = torch.autograd.grad(loss, ours[:used], upstream)
    correct = torch.autograd.grad(expected, truth[:used], upstream.double())
    pairs = [(loss, expected), *zip(grads, correct, strict=True)]
    return loss, grads, [relative_error(actual, exact) for actual, exact in pairs]


def error_of_rounded_logits(inputs, scale):
    """Of the loss, were logits stored in the operands' dtype."""
    hidden, weight, bias, target, _ = (tensor.double() for tensor in inputs)
    logits = hidden @ weight.t() + bias
    losses = (
        torch.nn.functional.cross_entropy(scale * x, target.long(), reduction="none")
        for x in (logits.to(inputs[0].dtype).double(), logits)
    )
    return relative_error(*losses)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_of_unrounded_logits_and_gradients(tiles, monkeypatch, options, dtype):
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "264")
    inputs = make(37, 24, 611, dtype)
    class_weight = torch.rand(611, device=DEVICE) + 0.5
    for with_bias, weights in itertools.product((True, False), (None, class_weight)):
        _, _, (loss_error, *grad_errors) = run(inputs, with_bias, weights, **options)
        assert loss_error < 1e-6, "logits were rounded, or worse"
        assert worst(grad_errors) < (1e-3 if dtype == torch.float16 else 6e-3), grad_errors
    assert tiles.calls.count("accumulate") == 4 and tiles.calls.count("gradient") == 12


@pytest.mark.parametrize(
    "num_tokens, hidden_size, num_classes", [(1, 8, 1), (129, 72, 257), (2, 64, 1000), (70, 1032, 300)]
)
def test_ragged_shapes(tiles, num_tokens, hidden_size, num_classes):
    """Tensor cores take 16 products at a time and truncate the sum, by half of 2**-23 in mean."""
    inputs = make(num_tokens, hidden_size, num_classes, torch.float16)
    inputs[3][:] = num_classes - 1
    _, _, errors = run(inputs, logit_scale=0.7)
    assert tiles.calls == ["accumulate", "gradient"]
    if num_classes > 1:
        bound = 1e-6 + hidden_size / 16 * 2**-24
        assert errors[0] < bound < error_of_rounded_logits(inputs, 0.7) / 10
        assert worst(errors[1:]) < 1e-3


FIRST_CLASS = 1000


class Rows:
    """Part of a head from class :data:`FIRST_CLASS` on, with labels all over it, beyond both ends and negative."""

    def __init__(self, num_tokens, num_classes, plain=True):
        self.hidden, self.weight, bias, _, _ = make(num_tokens, 24, num_classes, torch.float16)
        self.bias = None if plain else bias
        self.transform = IDENTITY if plain else SOFTCAP
        self.class_weight = None if plain else torch.rand(num_classes, device=DEVICE) + 0.5
        self.label = FIRST_CLASS + torch.arange(num_tokens, device=DEVICE) * 37 % num_classes
        for place, label in enumerate((FIRST_CLASS + num_classes, FIRST_CLASS - 1, -100, 3)):
            self.label[place + 2 :: 7] = label

    def logits(self):
        z_TV = self.hidden.double() @ self.weight.double().t()
        return x_of(z_TV if self.bias is None else z_TV + self.bias.double(), self.transform)

    def accumulate(self, tiles, stats, first, start=0, stop=None):
        """Columns ``[start, stop)`` through the tile kernels."""
        part = slice(start, stop)
        bias, class_weight = (None if given is None else given[part] for given in (self.bias, self.class_weight))
        chunk = Chunk(self.label, FIRST_CLASS + start, self.transform, class_weight)
        tiles.accumulate(self.hidden, self.weight[part], bias, chunk, stats, first)

    def garbage(self):
        """Statistics that hold NaN and numbers."""
        full = torch.full((4, len(self.hidden)), torch.nan, device=DEVICE)
        full[:, ::2] = 80.0
        return RowStats(*full[:3], full[3] if self.class_weight is not None else None)

    def check(self, stats):
        x_TV, num_classes = self.logits(), len(self.weight)
        column = self.label - FIRST_CLASS
        here = (column >= 0) & (column < num_classes)
        assert_close(stats.max_T, x_TV.amax(1), 2e-6)
        exponentials_TV = torch.exp(x_TV - stats.max_T.double()[:, None])
        assert_close(stats.sum_exp_T, exponentials_TV.sum(1), 4e-6)
        label_logit = x_TV.gather(1, column.clamp(0, num_classes - 1)[:, None])[:, 0]
        assert_close(stats.label_logit_T, torch.where(here, label_logit, 0.0), 2e-6)
        assert (stats.label_logit_T[~here] == 0).all()
        if self.class_weight is not None:
            weighted_TV = self.class_weight.double() * x_TV
            error_T = (stats.weighted_sum_T.double() - weighted_TV.sum(1)).abs()
            assert (error_T <= 2e-6 * weighted_TV.abs().sum(1)).all()


@pytest.mark.parametrize("plain", (True, False), ids=("plain", "options"))
@pytest.mark.parametrize("num_tokens, num_classes", [(1, 1), (63, 383), (65, 385), (129, 513), (70, 769)])
def test_first_statistics_overwrite_whatever_was_there(tiles, num_tokens, num_classes, plain):
    """Tiles of 256 and 384 columns and of 128 rows that end anywhere, several of them for a program."""
    rows = Rows(num_tokens, num_classes, plain)
    rows.accumulate(tiles, stats := rows.garbage(), first=True)
    rows.check(stats)


@pytest.mark.parametrize("plain", (True, False), ids=("plain", "options"))
def test_two_chunks_are_folded_into_one(tiles, plain):
    rows = Rows(65, 769, plain)
    rows.accumulate(tiles, stats := rows.garbage(), True, 0, 384)
    rows.accumulate(tiles, stats, False, 384, 769)
    rows.check(stats)


@pytest.mark.parametrize("plain", (True, False), ids=("product", "bias"))
def test_columns_past_the_end_are_less_than_logits_of_minus_infinity(tiles, plain):
    """The loads give zeros there; a row of nothing but -inf has the sum 0, and later logits are all that it holds."""
    rows = Rows(65, 385 + 300, plain)
    rows.class_weight, rows.transform = None, IDENTITY  # its weighted sum would be -inf, the cap of -inf is finite
    if plain:
        rows.hidden[:, 0], rows.weight[:385, 0] = 1.0, -torch.inf
    else:
        rows.bias[:385] = -torch.inf
    rows.accumulate(tiles, stats := rows.garbage(), True, 0, 385)
    assert (stats.max_T == -torch.inf).all() and (stats.sum_exp_T == 0).all()
    rows.accumulate(tiles, stats, False, 385, None)
    rows.check(stats)


@pytest.mark.parametrize("largest", (3.0, 21845.0))
def test_logits_far_from_zero_keep_their_digits(tiles, largest):
    """The logits are exact, so their sum of exponentials below the maximum is known to the last digit."""
    num_tokens, num_classes = 65, 385
    hidden, weight = torch.zeros(num_tokens, 8), torch.zeros(num_classes, 8)
    hidden[:, 0], weight[:, 0] = 1.0, largest
    hidden[:, 1], weight[:, 1] = torch.arange(num_tokens) % 4 + 1, torch.arange(num_classes) % 129 / -64
    hidden, weight = hidden.to(DEVICE, torch.float16), weight.to(DEVICE, torch.float16)
    rows = Rows(num_tokens, num_classes)
    rows.hidden, rows.weight = hidden, weight
    rows.accumulate(tiles, stats := rows.garbage(), first=True)
    x_TV = rows.logits()
    assert torch.equal(stats.max_T.double(), x_TV.amax(1))
    assert_close(stats.sum_exp_T, torch.exp(x_TV - x_TV.amax(1, keepdim=True)).sum(1), 1e-6)


def test_logits_up_to_the_ends_of_float32(tiles):
    """Exact ones again: beyond 2 ** 30 whatever is not the maximum counts for nothing, equal ones are counted."""
    rows = Rows(70, 1200)
    rows.hidden.zero_(), rows.weight.zero_()
    token, column = torch.arange(70, device=DEVICE), torch.arange(1200, device=DEVICE)
    rows.hidden[:, :16] = (2.0 ** (token % 36 - 20) * (-1) ** token)[:, None]
    rows.weight[:, :16] = (column * 7 % 65 - 32)[:, None]
    for part, number in ((slice(0, 384), -60000), (slice(384, 500), 60000), (slice(1100, None), 40000)):
        rows.weight[part, :16] = number
    rows.accumulate(tiles, stats := rows.garbage(), first=True)
    x_TV = rows.logits()
    assert x_TV.abs().amax() > 2**30 > x_TV.abs().amax(1).amin()
    assert torch.equal(stats.max_T.double(), x_TV.amax(1))
    assert_close(stats.sum_exp_T, torch.exp(x_TV - x_TV.amax(1, keepdim=True)).sum(1), 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", (slice(0, 256), slice(0, 384), slice(512, 800), slice(768, 800)), ids=str)
def test_classes_masked_by_large_finite_numbers(tiles, dtype, masked):
    """As padded vocabularies are: whole tiles of them, in whatever dtype."""
    hidden, weight, bias, target, upstream = make(37, 24, 800, dtype)
    scale = 1.0 if dtype == torch.bfloat16 else 2.0**17
    hidden, bias = hidden / scale, bias / scale
    bias[masked] = torch.finfo(dtype).min
    target = torch.where(bias[target.clamp_min(0)] == torch.finfo(dtype).min, -100, target)
    assert (target >= 0).sum() > 5
    _, grads, errors = run([hidden, weight, bias, target, upstream / scale], logit_scale=scale)
    assert errors[0] < 1e-5 and worst(errors[1:]) < 2e-2
    assert (grads[1][masked] == 0).all()


def test_kept_logits_stay_with_the_row_kernels(tiles, monkeypatch):
    """A kept chunk is rounded in both directions; the rest, and a second backward over it, in neither."""
    from loongforge import budget as budgets

    monkeypatch.setattr(budgets, "_MIB", 1)
    hidden, weight, _, target, upstream = make(37, 24, 700, torch.float16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, target, reduction="none", logits_budget_mb=37 * 2 * (KEPT_MULTIPLE + 1), impl="generic"
    )
    assert tiles.calls == ["accumulate"]
    first = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), upstream)
    assert tiles.calls == ["accumulate", "gradient", "gradient"]
    for a, b in zip(first, second, strict=True):
        assert relative_error(a, b) < 1e-3


def test_inactive_rows_are_zero_and_bad_labels_nan(tiles):
    hidden, weight, _, target, _ = make(37, 24, 300, torch.float16)
    hidden[0] = torch.nan
    target[0], target[3] = -100, 300
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, reduction="none", impl="generic")
    grad_hidden = torch.autograd.grad(loss, hidden, torch.zeros_like(loss))[0]
    assert loss[0] == 0 and (grad_hidden[0] == 0).all()
    assert loss[3].isnan() and grad_hidden[3].isnan().all()
    assert (grad_hidden[4:] == 0).all()


def test_infinite_logits_behave_as_in_torch(tiles):
    hidden, weight, bias, target, upstream = make(20, 24, 300, torch.float16)
    bias[:256] = -torch.inf  # a whole tile
    target[:] = 299
    _, _, errors = run([hidden, weight, bias, target, upstream])
    assert worst(errors) < 1e-3


def test_repeats_bit_for_bit(tiles):
    inputs = make(40, 24, 611, torch.float16)
    (loss, grads, _), (again, grads_again, _) = run(inputs), run(inputs)
    assert torch.equal(loss, again) and all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


@pytest.mark.parametrize(
    "case",
    ["float32", "hidden size of 12", "misaligned weight", "weight of one row", "weight of another dtype", "no tokens"],
)
def test_unsuitable_operands_are_left_to_the_row_kernels(tiles, case):
    hidden, weight, *_ = make(8, 16, 32, torch.float16)
    if case == "float32":
        hidden, weight = hidden.float(), weight.float()
    elif case == "hidden size of 12":
        hidden, weight = hidden[:, :12], weight[:, :12]
    elif case == "misaligned weight":
        weight = torch.zeros(32 * 16 + 1, dtype=torch.float16, device=DEVICE)[1:].view(32, 16)
    elif case == "weight of one row":
        weight = weight[:1].expand_as(weight)
    elif case == "weight of another dtype":
        weight = weight.float()
    else:
        hidden = hidden[:0]
    assert not tiles.supports(hidden, weight)


@pytest.mark.skipif(HOPPER, reason="on a GPU a missing wait may go unnoticed: the machine of gluon_machine.py shows it")
@pytest.mark.parametrize("missing", ("wait for a stage", "wait for a product", "wait for a store"))
def test_the_machine_without_a_gpu_notices_missing_waits(tiles, monkeypatch, missing):
    from loongforge.kernels import gluon_ring, gluon_tiles

    if not isinstance(tiles, gluon_tiles.GluonTileKernels):
        pytest.skip("only the Gluon kernels wait for themselves")
    if missing == "wait for a stage":
        monkeypatch.setattr(gluon_ring.mbarrier, "wait", lambda barrier, phase: None)
    elif missing == "wait for a product":
        monkeypatch.setattr(gluon_ring, "warpgroup_mma_wait", lambda num_outstanding, deps: deps)
    else:
        monkeypatch.setattr(gluon_tiles.tma, "store_wait", lambda pendings: None)
    try:
        _, _, errors = run(make(70, 520, 300, torch.float16))
    except AssertionError:
        return  # the machine itself objected
    assert not worst(errors) < 1e-3


def test_strided_vectors_are_read_with_their_strides(tiles):
    """Labels, bias, class weights and the upstream gradient as columns of wider tensors give the same bits."""
    hidden, weight, bias, target, upstream = make(37, 24, 300, torch.float16)
    class_weight = torch.rand(300, device=DEVICE) + 0.5
    vectors = [bias, target, class_weight, upstream]

    def loss_and_gradients(bias, target, class_weight, upstream):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        options = {"class_weight": class_weight, "label_smoothing": 0.1, "reduction": "none", "impl": "generic"}
        loss = linear_cross_entropy(*leaves, target, bias=bias, **options)
        return loss, *torch.autograd.grad(loss, leaves, upstream)

    expected = loss_and_gradients(*vectors)
    for place, vector in enumerate(vectors):
        column = torch.stack([vector, vector.flip(0), vector], 1)[:, 2]
        assert not column.is_contiguous()
        found = loss_and_gradients(*vectors[:place], column, *vectors[place + 1 :])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), place


def test_a_misaligned_hidden_is_copied(tiles):
    hidden, weight, bias, target, upstream = make(9, 16, 40, torch.float16)
    storage = torch.zeros(9 * 16 + 1, dtype=torch.float16, device=DEVICE)
    shifted = storage[1:].view(9, 16).copy_(hidden)
    loss = linear_cross_entropy(shifted, weight, target, reduction="none", impl="generic")
    expected = reference_loss(hidden, weight, target, LossOptions(reduction="none"))
    assert tiles.calls == ["accumulate"] and relative_error(loss, expected) < 1e-6
