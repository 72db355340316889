"""Fused loss for causal language models of Hugging Face transformers.

    from loongforge.integrations.transformers import fuse_loss

    fuse_loss(model)                                       # this model only; unfuse_loss(model) undoes it
    output = model(input_ids, labels=labels)               # output.loss is fused, output.logits is None
    output = model(input_ids, labels=labels, return_logits=True)
    model.generate(...)                                    # without labels nothing changes

No code of a family is copied.  The model's own forward runs as it is.  Its output layer, told of the labels, computes
the loss from the hidden states it gets and hands back logits of width 0, on which the family's scale and softcap are
spent in vain; where the model then asks for the loss of its logits, it gets that one (and adds what it has to add, such
as the loss of a router).  So the loss is computed where the output layer's weight is (gathered) in any case.
Model and output layer change their class to a subclass of the same name, as FSDP2 does; copies and replicas follow.
Where something else needs the logits (:mod:`loongforge.integrations.hooks`), the loss is computed from them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loongforge.cross_entropy import cross_entropy
from loongforge.integrations.families import FAMILIES, Family, transform
from loongforge.integrations.hooks import is_moved_by_accelerate, name_of, rebind_old_forward
from loongforge.integrations.peft import LoraHead, is_lora_layer, logits_users, output_layers
from loongforge.loss import build_options, linear_cross_entropy

if importlib.util.find_spec("transformers") is None:
    raise ImportError("transformers is not installed: pip install 'loongforge[transformers]'")

_OWN = ("reduction", "ignore_index", "softcap", "logit_scale", "vocab_size", "tp_group", "sequence_parallel")
"""Options that follow from the model, its labels or its arguments."""


def fuse_loss(model: nn.Module, *, eval_logits: bool = False, **options: Any) -> nn.Module:
    """Make ``model(..., labels=...)`` compute its loss without logits; returns ``model``, changed in place.

    Args:
        model: a causal language model of transformers of one of the :data:`FAMILIES`, or a PeftModel around one.
        eval_logits: in eval mode return logits beside the loss, for ``compute_metrics`` of ``Trainer``.
        **options: fields of :class:`loongforge.LossOptions` that the model does not determine itself, such as
            ``logits_budget_mb``, ``compact_tokens`` or ``z_loss_weight``.

    The labels are shifted, ``shift_labels`` and ``num_items_in_batch`` are used and -100 is ignored as in transformers'
    own loss.  Two things differ: with no valid token the loss is 0 instead of NaN, and ``output.logits`` is None unless
    ``return_logits=True`` is passed to the call.  A call that returns logits computes its loss from them; so does, with
    a warning, one whose output layer has a hook that sees them.

    Raises:
        NotImplementedError: another family, a forward or a loss that someone replaced, an output layer that is no plain
            (or LoRA) linear layer.
        TypeError, ValueError: unknown options, a configuration that makes no sense.
    """
    causal_lm = _causal_lm(model)
    if isinstance(causal_lm, _FusedModel):
        raise ValueError("fuse_loss was called on this model before: unfuse_loss(model) first")
    taken = sorted(set(options) & set(_OWN))
    if taken:
        raise ValueError(f"{', '.join(taken)} follow from the model and its arguments and cannot be given")
    family = _family_of(causal_lm)
    layers = output_layers(causal_lm.get_output_embeddings())
    for layer in layers:
        _check_head(layer, causal_lm)
    build_options({**options, **transform(family, causal_lm)})
    causal_lm._loongforge = _Settings(eval_logits, options)
    _change_class(causal_lm, _fused_model_class)
    for layer in layers:
        _change_class(layer, _fused_head_class)
    return model


def unfuse_loss(model: nn.Module) -> nn.Module:
    """Undo :func:`fuse_loss`; returns ``model``."""
    causal_lm = _causal_lm(model)
    fused = [module for module in causal_lm.modules() if isinstance(module, (_FusedModel, _FusedHead))]
    for module in fused or [causal_lm]:
        if type(module).__bases__[0] not in (_FusedModel, _FusedHead):
            raise ValueError(f"fuse_loss was not called on this {type(module).__name__}, or it was wrapped since")
    del causal_lm._loongforge
    for module in fused:
        _change_class(module, lambda fused: fused.__bases__[1])
    return model


def _change_class(module: Any, changed: Callable[[Any], type]) -> None:
    module.__class__ = changed(module.__class__)
    rebind_old_forward(module)


@dataclass(frozen=True)
class _Settings:
    eval_logits: bool
    options: dict[str, Any]


@dataclass
class _Request:
    """A labelled forward's loss: whose it is, what it is computed from, and where the output layer puts it."""

    model: Any
    layers: list[Any]
    """Its output layer, or the copies among which PEFT chooses."""
    labels: torch.Tensor
    arguments: dict[str, Any]
    """Those of the forward that are the loss's, by transformers' names."""
    options: dict[str, Any]
    from_logits: bool
    loss: torch.Tensor | None = None
    is_asked_for: bool = False

    def target(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each position's next label, as ``transformers.loss.loss_utils.ForCausalLMLoss`` has it."""
        shifted = self.arguments.get("shift_labels")
        if shifted is None:
            ignored = self.options["ignore_index"]
            shifted = nn.functional.pad(self.labels, (0, 1), value=ignored)[..., 1:]
        if shifted.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels must have one entry for each of the positions {list(hidden.shape[:-1])} that reach the output "
                f"layer, got {list(shifted.shape)}: with logits_to_keep pass no labels, or shift_labels of that shape"
            )
        return shifted.to(hidden.device)

    def normalizer(self, hidden: torch.Tensor) -> torch.Tensor | int | None:
        items = self.arguments.get("num_items_in_batch")
        return items.to(hidden.device) if isinstance(items, torch.Tensor) else items

    def answer(self, hidden: torch.Tensor, weight: torch.Tensor, **tensors: Any) -> torch.Tensor:
        """Compute the loss; returns logits of width 0.

        Both come out of one autograd node, so that backward passes through the output layer's output before it needs
        the weight: there FSDP2 gathers it.
        """
        if self.loss is not None:
            raise NotImplementedError(
                "the output layer was called more than once in a forward with labels (by a hook that wants logits?), "
                "of which the fused loss knows one: call unfuse_loss(model) before"
            )
        target, normalizer = self.target(hidden), self.normalizer(hidden)
        loss = linear_cross_entropy(hidden, weight, target, normalizer=normalizer, **tensors, **self.options)
        split: Any = torch.split_with_sizes_copy
        self.loss, empty = split(loss.reshape(1), [1, 0])
        return empty.reshape(*hidden.shape[:-1], 0)

    def loss_of(self, logits: torch.Tensor, labels: Any = None, vocab_size: Any = None, **arguments: Any) -> Any:
        """In place of the model's ``loss_function``."""
        pairs = [(arguments.get(name), self.arguments.get(name)) for name in _LOSS_ARGUMENTS]
        if not all(a is b or (isinstance(a, (int, float)) and a == b) for a, b in [(labels, self.labels), *pairs]):
            raise RuntimeError("the model changed labels or arguments of the loss on their way: call unfuse_loss")
        self.is_asked_for = True
        if self.from_logits:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg="fuse_loss computes this loss from logits, which takes two graphs")
            options = {name: value for name, value in self.options.items() if name not in _OF_HIDDEN_STATES}
            return cross_entropy(logits, self.target(logits), normalizer=self.normalizer(logits), **options)
        if self.loss is None:
            raise RuntimeError("the model asks for a loss, but its output layer, which computes it, was not called")
        return self.loss.reshape(()) + logits.sum()  # of nothing


_LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels", "ignore_index")
_OF_HIDDEN_STATES = ("softcap", "logit_scale", "logits_budget_mb", "compact_tokens")
"""Options that logits have behind them, or that change no value."""


_CURRENT = threading.local()
"""``request``: that of the labelled forward which runs in this thread."""


def _current() -> _Request | None:
    return getattr(_CURRENT, "request", None)


def _during(request: _Request | None, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    outer = _current()
    _CURRENT.request = request
    try:
        return forward(*args, **kwargs)
    finally:
        _CURRENT.request = outer


class _Fused:
    """A fused class has two bases, one of these and the class that the object had, and is made anew where it loads."""

    def __reduce_ex__(self, protocol: Any) -> tuple:
        state: Any = super().__reduce_ex__(protocol)[2:]
        kind, original = type(self).__bases__
        return (_empty_object, (kind is _FusedModel, original), *state)


class _FusedModel(_Fused):
    """First base of a fused model's class; the second is the class it had."""


class _FusedHead(_Fused):
    """First base of a fused output layer's class; the second is the class it had."""


def _empty_object(is_model: bool, original: Any) -> Any:
    cls: Any = (_fused_model_class if is_model else _fused_head_class)(original)
    return cls.__new__(cls)


@functools.cache
def _fused_model_class(original: Any) -> type:
    own_loss = original.loss_function.fget

    @functools.wraps(original.forward)
    def forward(self, *args, return_logits: bool | None = None, **kwargs):
        if kwargs.get("labels") is None and len(args) > 1:
            kwargs, args = _by_name(original, args, kwargs), ()
        settings = self.__dict__.get("_loongforge")
        if kwargs.get("labels") is None or settings is None:
            if _current() is None:
                return original.forward(self, *args, **kwargs)
            return _during(None, original.forward, self, *args, **kwargs)  # called by a hook of a labelled one
        if return_logits is None:
            return_logits = settings.eval_logits and not self.training
        _check_loss(self, own_loss(self))
        request = _request(self, FAMILIES[original.__name__], settings.options, kwargs, return_logits)
        return_dict = kwargs.pop("return_dict", None)
        output = _during(request, original.forward, self, *args, **kwargs, return_dict=True)
        if not request.is_asked_for:
            raise RuntimeError(f"{original.__name__}.forward was replaced: it did not ask for the loss of its logits")
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        if not wants_dict:  # whose places stay what they are
            return tuple(None if name == "logits" and not return_logits else output[name] for name in output)
        return output if return_logits else type(output)(**{**output, "logits": None})

    def loss_function(self):
        """transformers' own, except inside a fused forward."""
        request = _current()
        return own_loss(self) if request is None or request.model is not self else request.loss_of

    loss = property(loss_function, original.loss_function.fset)
    return _subclass(_FusedModel, original, forward=forward, loss_function=loss)


def _request(model: Any, family: Family, options: dict, kwargs: dict, return_logits: bool) -> _Request:
    """What a forward with these arguments asks for."""
    head = model.get_output_embeddings()
    layers = output_layers(head)
    if not all(isinstance(layer, _FusedHead) for layer in layers):
        raise NotImplementedError(
            f"the output layer was replaced by a {type(head).__name__} after fuse_loss: call unfuse_loss and then "
            "fuse_loss once more"
        )
    user = next(logits_users(head), None)
    if user is not None and not return_logits and not torch.compiler.is_compiling():
        warnings.warn(
            f"this loss is computed from logits and not fused, since {user} acts on the output layer: remove it to "
            "have the loss fused",
            stacklevel=3,
        )
    arguments = {name: kwargs[name] for name in _LOSS_ARGUMENTS if name in kwargs}
    options = {**options, **transform(family, model), "ignore_index": arguments.get("ignore_index", -100)}
    return _Request(model, layers, kwargs["labels"], arguments, options, return_logits or user is not None)


@functools.cache
def _fused_head_class(original: Any) -> type:
    @functools.wraps(original.forward)
    def forward(self, hidden, *args, **kwargs):
        request = _current()
        if request is None or request.from_logits or not any(layer is self for layer in request.layers):
            return original.forward(self, hidden, *args, **kwargs)
        if args or any(value is not None for value in kwargs.values()):
            names = ", ".join(kwargs) or f"{len(args)} by place"
            raise NotImplementedError(
                f"the output layer was called with more than its hidden states ({names}), such as PEFT's "
                "adapter_names, which the fused loss does not know: call unfuse_loss(model) before, or leave them out"
            )
        if is_lora_layer(self):
            return LoraHead(self).answer(request, hidden)
        return request.answer(hidden, self.weight, bias=self.bias)

    return _subclass(_FusedHead, original, forward=forward)


def _subclass(first: type, original: Any, **members: Any) -> type:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (first, original), {**names, **members})


def _by_name(original: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under their names, since ``labels`` may be among them."""
    names = list(inspect.signature(original.forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _causal_lm(model: Any) -> Any:
    """``model`` itself, or what a PeftModel holds."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _family_of(model: Any) -> Family:
    cls = type(model)
    name = cls.__name__
    if name not in FAMILIES or not cls.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"fuse_loss does not know {cls.__module__}.{name}: it takes transformers' own {', '.join(FAMILIES)}, "
            "before DDP, fully_shard or torch.compile wraps them; otherwise use loongforge.linear_cross_entropy on "
            "hidden states and output layer"
        )
    _check_own_forward(name, model)
    function = inspect.unwrap(cls.forward)
    if function.__module__ != cls.__module__:
        raise NotImplementedError(
            f"{name}.forward was replaced by {function.__module__}: undo that, two fused losses cannot share a model"
        )
    _check_loss(model, model.loss_function)
    return FAMILIES[name]


def _check_loss(model: Any, loss: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if loss is not ForCausalLMLoss:
        raise NotImplementedError(
            f"{type(model).__name__} computes its loss with {name_of(loss)}, which is not transformers' own "
            "ForCausalLMLoss"
        )


def _check_own_forward(name: str, module: nn.Module) -> None:
    """A forward that was put on the object itself (Liger's patches, accelerate's hooks) hides that of its class."""
    replaced = vars(module).get("forward")
    if replaced is not None and not is_moved_by_accelerate(module):
        raise NotImplementedError(
            f"{name}.forward of this object was replaced by {name_of(replaced)}: call fuse_loss before whatever "
            "replaces it, or undo that"
        )


def _check_head(head: nn.Module, model: Any) -> None:
    if isinstance(head, _FusedHead):
        raise ValueError(
            "the output layer is shared with a model that fuse_loss was called on: unfuse_loss(that) first"
        )
    _check_own_forward(f"the output layer's {type(head).__name__}", head)
    if is_lora_layer(head):
        head = LoraHead(head).base_layer
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise NotImplementedError(
            "the output layer must be a plain torch.nn.Linear (or PEFT's LoRA around one), got "
            f"{type(head).__module__}.{type(head).__name__}: replace a quantised or wrapped output layer by a linear "
            "one"
        )
    if head.out_features != model.config.vocab_size:
        raise ValueError(
            f"the output layer has {head.out_features} rows and the configuration a vocab_size of "
            f"{model.config.vocab_size}: resize both with model.resize_token_embeddings"
        )
