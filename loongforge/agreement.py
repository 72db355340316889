"""Ranks of one group that disagree about a call: an error that names them, instead of a hang or wrong sums.

The first call of every group compares what the ranks were given, by one small all-gather that all of them run whatever
they were given; with ``LCE_CHECK_RANKS=1`` every call does.  It reads the result on the host, so it is left out while
a CUDA graph is captured.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from loongforge import checks, env, sharded
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel, all_gather

FREE = ("tp_group", "impl", "logits_budget_mb")
"""Options that may differ between ranks."""
_SAME_CONTENTS = ("token_weight", "class_weight", "normalizer", "teacher.logprobs", "teacher.ids")
"""Tensors that hold the same on all ranks."""
_BYTES = 4096
_compared: WeakSet = WeakSet()
_exchanges = [0]
"""Number of exchanges so far."""


def refusals_travel(function: Callable) -> Callable:
    """Decorator of a public function: what it refuses before :func:`ranks_agree` runs reaches the other ranks too.

    Its group is the argument ``tp_group``, that of the :class:`LossOptions` among its arguments, or that of the mesh
    of hidden states that are a DTensor.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = _exchanges[0]
        try:
            return function(*args, **kwargs)
        except Exception as refused:
            if _exchanges[0] == before:
                _tell(args, kwargs, refused)
            raise

    return wrapper


def _tell(args: tuple, kwargs: Mapping[str, Any], refused: Exception) -> None:
    given = (value for value in itertools.chain(args, kwargs.values()) if isinstance(value, LossOptions))
    group = next((options.tp_group for options in given), kwargs.get("tp_group"))
    hidden: Any = args[0] if args else kwargs.get("hidden")
    if group is None and sharded.is_dtensor(hidden) and hidden.device_mesh.ndim == 1:
        group = hidden.device_mesh.get_group()
    try:
        parallel = VocabParallel.from_group(group, False)
    except (TypeError, ValueError, RuntimeError):
        return  # nobody to tell
    _differences(parallel, None, {}, refused, _every_call())


def _every_call() -> bool:
    try:
        return env.check_ranks()
    except ValueError:  # it may be what was refused
        return False


def ranks_agree(
    parallel: VocabParallel, options: LossOptions, tensors: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Around the checks of one call: raises ``ValueError`` on every rank where ranks differ or one of them refuses.

    ``tensors`` by name, ``target`` among them, and what else of a call the ranks must share, as plain values or
    dataclasses.  What a rank itself refuses it raises itself.  In a trace nothing is compared:
    the operators of the graph do it when they run.
    """
    return nullcontext() if torch.compiler.is_compiling() else _ranks_agree(parallel, options, tensors)


@contextmanager
def _ranks_agree(parallel: VocabParallel, options: LossOptions, tensors: Mapping[str, Any]) -> Iterator[None]:
    tensors = dict(_fields_apart(tensors))
    try:
        yield
        always = env.check_ranks()
        if parallel.size > 1:
            env.check_labels()  # for it is compared
    except Exception as refused:  # whatever it is, the others wait in the exchange
        _differences(parallel, options, tensors, refused, _every_call())
        raise
    differences = _differences(parallel, options, tensors, None, always)
    if differences:
        raise ValueError("; ".join(differences))


def _differences(
    parallel: VocabParallel,
    options: LossOptions | None,
    tensors: Mapping[str, Any],
    refused: Exception | None,
    always: bool,
) -> list[str]:
    """The first thing that ranks do not share, and refusals; nothing where it is not the time to compare."""
    if parallel.size == 1 or _is_recorded() or not always and parallel.group in _compared:
        return []
    facts: dict[str, Any] = {}
    try:
        if options is not None:
            facts = {"LCE_CHECK_RANKS": always, "LCE_CHECK_LABELS": env.check_labels()}
            facts |= _facts(options, tensors, always)
    except Exception:
        if refused is None:
            raise  # nothing has been exchanged yet, so the others are told
        facts = {}
    _compared.add(parallel.group)
    _exchanges[0] += 1
    refusal = None if refused is None else re.sub("[^ -~\n]", "?", f"{type(refused).__name__}: {refused}"[:1000])
    text = json.dumps([facts, refusal])
    by_rank = [json.loads(text) for text in _exchange(text, parallel)]
    ranks = dist.get_process_group_ranks(parallel.group)
    found = []
    for name in facts if all(others for others, _ in by_rank) else ():  # not where one has got no further than refusing
        values = [others.get(name) for others, _ in by_rank]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"rank {rank} has {value}" for rank, value in zip(ranks, values, strict=True))
            found.append(f"{name} must be equal on all ranks of tp_group, but {listing}")
    refusals = [f"rank {rank}: {problem}" for rank, (_, problem) in zip(ranks, by_rank, strict=True) if problem]
    return found[:1] + [f"other ranks of tp_group refuse this call ({refusal})" for refusal in refusals]


def _is_recorded() -> bool:
    """While a CUDA graph or ``torch.compile`` records, nothing can be read on the host."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        if env.check_ranks():
            checks.refuse_under_graph_capture("LCE_CHECK_RANKS=1", torch.device("cuda"))
        return True
    return torch.compiler.is_compiling()


def _fields_apart(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A teacher's fields have names of their own."""
    for name, value in tensors.items():
        if dataclasses.is_dataclass(value):
            yield from ((f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
        else:
            yield name, value


def _facts(options: LossOptions, tensors: Mapping[str, Any], always: bool) -> dict[str, Any]:
    """What must be equal.  A rank may freeze its own shard where backward runs all the same."""
    facts: dict[str, Any] = {name: _describe(value) for name, value in tensors.items()}
    adapter = tensors.get("adapter")
    low_rank = adapter[0] if isinstance(adapter, tuple) and adapter else None
    # Either makes backward run, whose collectives must run on all ranks.
    needed = [x.requires_grad for x in (tensors.get("hidden"), low_rank) if isinstance(x, torch.Tensor)]
    facts["hidden.requires_grad"] = any(needed) and torch.is_grad_enabled()
    if options.sequence_parallel and options.compact_tokens is False:  # backward gathers hidden, for weight's sake too
        trained = (*map(tensors.get, ("weight", "bias")), *(adapter if isinstance(adapter, tuple) else ()))
        needed += [x.requires_grad for x in trained if isinstance(x, torch.Tensor)]
        facts["hidden, weight, bias or adapter.requires_grad"] = any(needed) and torch.is_grad_enabled()
    # Hidden states are much to read, and each rank's own under sequence parallelism.
    large = ("teacher.hidden",) if always and not options.sequence_parallel else ()
    for name in (*_SAME_CONTENTS, *large):
        facts[f"the checksum of {name}"] = _bit_checksum(tensors.get(name))
    if isinstance(tensors.get("hidden"), torch.Tensor):
        facts["dtype of the matrix products"] = str(checks.compute_dtype(tensors["hidden"]))
    facts |= {name: repr(getattr(options, name))[:100] for name in OPTION_NAMES if name not in FREE}
    facts["the labels' checksum"] = _checksum(tensors["target"])
    return facts


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_describe, value))[:300]
    if isinstance(value, (bool, int, float, str)):
        return repr(value)[:100]
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{'nested' if value.is_nested else list(value.shape)} {value.dtype}"  # a nested tensor's cannot be read


def _checksum(target: Any) -> int | None:
    """Sum of labels times positions, modulo 2**64."""
    if not _is_readable(target) or target.is_floating_point():
        return None
    return _sum_times_positions(target.detach().reshape(-1))


def _bit_checksum(value: Any) -> int | None:
    """The same of the bits of any plain tensor."""
    if not _is_readable(value):
        return None
    return _sum_times_positions(value.detach().contiguous().reshape(-1).view(torch.uint8))


def _is_readable(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not value.is_meta and not value.is_nested
    return is_tensor and value.layout == torch.strided and not sharded.is_released(value)


def _sum_times_positions(value_N: torch.Tensor) -> int:
    """Part by part: 64 bits a byte would be eight times the tensor."""
    total, position = torch.zeros((), dtype=torch.int64, device=value_N.device), 1
    for part_N in value_N.split(1 << 20):
        total += (part_N.long() * torch.arange(position, position + len(part_N), device=value_N.device)).sum()
        position += len(part_N)
    return int(total)


def _exchange(text: str, parallel: VocabParallel) -> list[str]:
    encoded = text.encode()
    assert len(encoded) < _BYTES, f"{len(encoded)} bytes of facts"
    backend = dist.get_backend(parallel.group)  # "cuda:nccl" where the group is for several kinds of devices
    on_gpu = "nccl" in backend and "cpu" not in backend
    mine = torch.tensor(list(encoded.ljust(_BYTES)), dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    everyone = mine.new_empty(parallel.size * _BYTES)
    all_gather(everyone, mine, parallel.group).wait()
    return [bytes(part.tolist()).decode() for part in everyone.cpu().chunk(parallel.size)]
