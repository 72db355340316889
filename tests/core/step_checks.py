"""What a step does beside giving the right values: what it keeps, what it repeats, what runs beside what."""

from __future__ import annotations

import itertools
import weakref
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from loongforge import chunks, linear_cross_entropy, parallel
from tests.core.sharding import shard
from tests.core.worlds import registry
from tests.helpers import make_inputs, relative

CHECKS, check = registry()
TOKENS, HIDDEN, VOCAB = 24, 16, 132
KEPT = (0, "all")


def loss_of(world, local, sequence_parallel, **options):
    return linear_cross_entropy(
        local.hidden,
        local.weight,
        local.target,
        tp_group=world.groups["world"][0],
        sequence_parallel=sequence_parallel,
        **options,
    )


@check
def only_the_local_hidden_states_are_saved(world):
    for budget, fp32_grad_hidden in itertools.product(KEPT, (False, True)):
        local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB, torch.bfloat16), sequence_parallel=True)
        options = {"logits_budget_mb": budget, "fp32_grad_hidden": fp32_grad_hidden}
        saved, gathered = [], []

        def pack(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        def gather_tokens(self, hidden, gathered=gathered, original=parallel.VocabParallel.gather_tokens):
            tokens = original(self, hidden)
            gathered.append(weakref.ref(tokens._all_TH))
            return tokens

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(parallel.VocabParallel, "gather_tokens", gather_tokens))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            loss = loss_of(world, local, True, reduction="none", **options)
            assert [alive() for alive in gathered] == [None]
        storages = {tensor.untyped_storage().data_ptr() for tensor in saved}
        assert local.hidden.untyped_storage().data_ptr() in storages
        others = [t for t in saved if t.untyped_storage().data_ptr() != local.weight.untyped_storage().data_ptr()]
        assert max(tensor.numel() for tensor in others) == local.hidden.numel() == TOKENS // world.size * HIDDEN
        with mock.patch.object(parallel.VocabParallel, "gather_tokens", gather_tokens):
            loss.sum().backward()
        assert [alive() for alive in gathered] == [None, None]


class Log:
    """Order of collectives and products: ``start x``, ``wait x``, and products by what they write."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def __call__(self, text: str) -> None:
        self.entries.append(text)

    def collective(self, name, original):
        log = self

        class Work:
            def __init__(self, work):
                self.work = work

            def wait(self):
                log(f"wait {name}")
                self.work.wait()

        def start(result, operand, *group, **named):
            log(f"start {name}")
            return Work(original(result, operand, *group, **named))

        return start

    def product(self, name, original):
        def call(*args, **named):
            self(f"{name} {args[0].shape[0]}")
            return original(*args, **named)

        return call


@contextmanager
def logged():
    log = Log()
    with ExitStack() as stack:
        for owner, name, wrap in (
            (parallel, "all_gather", log.collective),
            (parallel, "reduce_scatter", log.collective),
            (chunks, "project_", log.product),
            (chunks, "product_", log.product),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrap(name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(parallel, "let_begin", lambda device: log("pause")))
        yield log.entries


@check
def what_runs_beside_the_collectives(world):
    """Products over the local tokens beside the gather, the last weight gradient beside the sum of grad_hidden.

    A pause lets each of the two begin.
    """
    here, rest = TOKENS // world.size, TOKENS - TOKENS // world.size
    rows = VOCAB // world.size
    others = [part for part in (world.rank * here, rest - world.rank * here) if part]
    pieces = [f"project_ {here}", "wait all_gather", *(f"project_ {part}" for part in others)]
    for budget in KEPT:
        local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB), sequence_parallel=True)
        with logged() as forward:
            loss = loss_of(world, local, True, logits_budget_mb=budget)
        statistics = ["start all_gather", "wait all_gather"]
        assert forward == ["start all_gather", "pause", *pieces, *statistics], forward
        with logged() as backward:
            loss.backward()
        end = ["start reduce_scatter", "pause", f"product_ {rows}", "wait reduce_scatter"]
        if budget == "all":  # grad_hidden needs no hidden states, so nothing waits for them before it is under way
            end.insert(2, "wait all_gather")
        if parallel._lacks_reduce_scatter(world.groups["world"][0], local.hidden.device):
            end = [entry for entry in end if entry in ("wait all_gather", f"product_ {rows}")]
        pieces_again = [] if budget == "all" else pieces
        assert backward == ["start all_gather", "pause", *pieces_again, f"product_ {TOKENS}", *end], backward


@check
def without_sequence_parallelism_the_sum_of_grad_hidden_begins_before_the_last_product(world):
    local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB), sequence_parallel=False)
    loss = loss_of(world, local, False)
    with logged() as backward, mock.patch.object(parallel.dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        loss.backward()
    assert all_reduce.call_count == 1
    assert backward == [f"project_ {TOKENS}", f"product_ {TOKENS}", "pause", f"product_ {VOCAB // world.size}"], (
        backward
    )


def train(world, sequence_parallel: bool, steps: int, **options) -> list[torch.Tensor]:
    """Losses and final weights of ``steps`` steps of an embedding and an output layer, from one seed."""
    generator = torch.Generator().manual_seed(1)
    embedding = (torch.randn(VOCAB, HIDDEN, generator=generator) / 4).bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / 4).bfloat16()
    rows = weight.chunk(world.size)[world.rank].clone().requires_grad_()
    optimizer = torch.optim.AdamW([embedding, rows], lr=0.1)
    trace = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        hidden = functional.embedding(tokens, embedding)
        if sequence_parallel:
            hidden = hidden.chunk(world.size)[world.rank]
        loss = linear_cross_entropy(
            hidden,
            rows,
            (7 * tokens + 3) % VOCAB,
            tp_group=world.groups["world"][0],
            sequence_parallel=sequence_parallel,
            **options,
        )
        optimizer.zero_grad()
        loss.backward()
        if sequence_parallel:
            dist.all_reduce(embedding.grad)
        optimizer.step()
        trace.append(loss.detach())
    return [*trace, embedding.detach(), rows.detach()]


@check
def twenty_steps_repeat_bit_for_bit(world):
    """Under torch's deterministic mode; losses are also the same on every rank."""
    torch.use_deterministic_algorithms(True)
    try:
        for sequence_parallel, fp32_grad_hidden in ((False, False), (True, False), (True, True)):
            arguments = (world, sequence_parallel, 20)
            first, second = (train(*arguments, fp32_grad_hidden=fp32_grad_hidden) for _ in range(2))
            assert all(map(torch.equal, first, second))
            losses = torch.stack(first[:20])
            assert losses[-1] < losses[0] and losses.unique().numel() == 20
            from_rank_0 = losses.clone()
            dist.broadcast(from_rank_0, 0)
            assert torch.equal(losses, from_rank_0)
    finally:
        torch.use_deterministic_algorithms(False)


@check
def tensor_parallel_agrees_with_one_rank(world):
    """bf16: as close to one rank's run as that is to float64."""
    inputs = make_inputs(257, 64, VOCAB, torch.bfloat16)
    alone = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction="none")
    exact = linear_cross_entropy(inputs.hidden.double(), inputs.weight.double(), inputs.target, reduction="none")
    local = shard(world, "world", inputs, sequence_parallel=False)
    together = loss_of(world, local, False, reduction="none")
    assert relative(together, alone) <= relative(alone, exact) + 1e-6
