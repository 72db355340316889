"""Fused loss for causal language models of Hugging Face transformers.

    from loongforge.integrations.transformers import fuse_loss

    fuse_loss(model)                                       # this model only; unfuse_loss(model) undoes it
    output = model(input_ids, labels=labels)               # output.loss is fused, output.logits is None
    output = model(input_ids, labels=labels, return_logits=True)
    model.generate(...)                                    # without labels nothing changes

No code of a family is copied.  The model's own forward runs as it is, told of no labels; its output layer, which knows
them, computes the loss from the hidden states it gets and hands back logits of width 0, on which the family's scale and
softcap are spent in vain.  So the loss is computed where the output layer's weight is (gathered) in any case.
Model and output layer change their class to a subclass of the same name, as FSDP2 does; copies and replicas follow.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loongforge.integrations.peft import LoraHead, is_lora_layer
from loongforge.loss import build_options, linear_cross_entropy

if importlib.util.find_spec("transformers") is None:
    raise ImportError("transformers is not installed: pip install 'loongforge[transformers]'")

_OWN = ("reduction", "ignore_index", "softcap", "logit_scale", "vocab_size", "tp_group", "sequence_parallel")
"""Options that follow from the model, its labels or its arguments."""


@dataclass(frozen=True)
class Family:
    """What a family does to its logits before the loss."""

    softcap: Callable[[Any], float | None] = lambda model: None
    logit_scale: Callable[[Any], float] = lambda model: 1.0


_PLAIN = Family()
_SOFTCAP = Family(softcap=lambda model: model.config.final_logit_softcapping)
_SCALED = Family(logit_scale=lambda model: model.logit_scale)
FAMILIES = {
    "LlamaForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen3ForCausalLM": _PLAIN,
    "GemmaForCausalLM": _PLAIN,
    "Gemma2ForCausalLM": _SOFTCAP,
    "Gemma3ForCausalLM": _SOFTCAP,
    "GraniteForCausalLM": Family(logit_scale=lambda model: 1.0 / model.config.logits_scaling),
    "CohereForCausalLM": _SCALED,
    "Cohere2ForCausalLM": _SCALED,
}


def fuse_loss(model: nn.Module, **options: Any) -> nn.Module:
    """Make ``model(..., labels=...)`` compute its loss without logits; returns ``model``, changed in place.

    Args:
        model: a causal language model of transformers of one of the :data:`FAMILIES`, or a PeftModel around one.
        **options: fields of :class:`loongforge.LossOptions` that the model does not determine itself, such as
            ``logits_budget_mb``, ``compact_tokens`` or ``z_loss_weight``.

    The labels are shifted, ``shift_labels`` and ``num_items_in_batch`` are used and -100 is ignored as in transformers'
    own loss.  Two things differ: with no valid token the loss is 0 instead of NaN, and ``output.logits`` is None unless
    ``return_logits=True`` is passed to the call.

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
    head = causal_lm.get_output_embeddings()
    _check_head(head, causal_lm)
    build_options({**options, **_transform(family, causal_lm)})
    causal_lm._loongforge = _Settings(family, options)
    model_class: Any = type(causal_lm)
    head_class: Any = type(head)
    causal_lm.__class__ = _fused_model_class(model_class)
    head.__class__ = _fused_head_class(head_class)
    return model


def unfuse_loss(model: nn.Module) -> nn.Module:
    """Undo :func:`fuse_loss`; returns ``model``."""
    causal_lm = _causal_lm(model)
    if type(causal_lm).__mro__[1] is not _FusedModel:
        raise ValueError(f"fuse_loss was not called on this {type(causal_lm).__name__}, or it was wrapped since")
    del causal_lm._loongforge
    causal_lm.__class__ = type(causal_lm).__mro__[2]
    for module in causal_lm.modules():
        if isinstance(module, _FusedHead):
            module.__class__ = type(module).__mro__[2]
    return model


@dataclass(frozen=True)
class _Settings:
    family: Family
    options: dict[str, Any]


@dataclass
class _Request:
    """What a labelled forward asks its output layer for, and what it gets."""

    labels: torch.Tensor
    shift_labels: torch.Tensor | None
    num_items: torch.Tensor | int | None
    options: dict[str, Any]
    return_logits: bool
    loss: torch.Tensor | None = None

    def target(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each position's next label, as ``transformers.loss.loss_utils.ForCausalLMLoss`` has it."""
        shifted = self.shift_labels
        if shifted is None:
            ignored = self.options["ignore_index"]
            shifted = nn.functional.pad(self.labels, (0, 1), value=ignored)[..., 1:]
        if shifted.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels must have one entry for each of the positions {list(hidden.shape[:-1])} that reach the output "
                f"layer, got {list(shifted.shape)}: with logits_to_keep pass no labels, or shift_labels of that shape"
            )
        return shifted.to(hidden.device)

    def answer(self, hidden: torch.Tensor, weight: torch.Tensor, **tensors: Any) -> None:
        num_items = self.num_items
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.to(hidden.device)
        self.loss = linear_cross_entropy(
            hidden, weight, self.target(hidden), normalizer=num_items, **tensors, **self.options
        )


class _FusedModel:
    """First base of a fused model's class; the second is the class it had."""


class _FusedHead:
    """First base of a fused output layer's class; the second is the class it had."""

    _request: _Request | None = None


@functools.cache
def _fused_model_class(original: Any) -> type:
    @functools.wraps(original.forward)
    def forward(self, *args, return_logits: bool = False, return_dict: bool | None = None, **kwargs):
        if kwargs.get("labels") is None and len(args) > 1:
            kwargs, args = _by_name(original, args, kwargs), ()
        labels = kwargs.pop("labels", None)
        if labels is None:
            return original.forward(self, *args, **kwargs, return_dict=return_dict)
        head = self.get_output_embeddings()
        if not isinstance(head, _FusedHead):
            raise NotImplementedError(
                f"the output layer was replaced by a {type(head).__name__} after fuse_loss: call unfuse_loss and then "
                "fuse_loss once more"
            )
        settings = self._loongforge
        options = {**settings.options, **_transform(settings.family, self)}
        options["ignore_index"] = kwargs.pop("ignore_index", -100)
        items = kwargs.pop("num_items_in_batch", None)
        request = _Request(labels, kwargs.pop("shift_labels", None), items, options, return_logits)
        head._request = request
        try:
            output = original.forward(self, *args, **kwargs, return_dict=True)
        finally:
            head._request = None
        if request.loss is None:
            raise RuntimeError(f"{original.__name__}.forward did not call its output layer, which computes the loss")
        logits = output.logits if return_logits else None
        output = type(output)(**{**output, "loss": request.loss, "logits": logits})
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    return _subclass(_FusedModel, original, forward)


@functools.cache
def _fused_head_class(original: Any) -> type:
    @functools.wraps(original.forward)
    def forward(self, hidden, *args, **kwargs):
        request = self._request
        if request is None:
            return original.forward(self, hidden, *args, **kwargs)
        if args or any(value is not None for value in kwargs.values()):
            names = ", ".join(kwargs) or f"{len(args)} by place"
            raise NotImplementedError(
                f"the output layer was called with more than its hidden states ({names}), such as PEFT's "
                "adapter_names, which the fused loss does not know: call unfuse_loss(model) before, or leave them out"
            )
        if is_lora_layer(self):
            LoraHead(self).answer(request, hidden)
        else:
            request.answer(hidden, self.weight, bias=self.bias)
        if request.return_logits:
            return original.forward(self, hidden, *args, **kwargs)
        return hidden.new_empty((*hidden.shape[:-1], 0))

    return _subclass(_FusedHead, original, forward)


def _subclass(first: type, original: Any, forward: Callable) -> type:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (first, original), {**names, "forward": forward})


def _by_name(original: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under their names, since ``labels`` may be among them."""
    names = list(inspect.signature(original.forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _causal_lm(model: Any) -> Any:
    """``model`` itself, or what a PeftModel holds."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _transform(family: Family, model: nn.Module) -> dict[str, Any]:
    try:
        return {"softcap": family.softcap(model), "logit_scale": float(family.logit_scale(model))}
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"the configuration of this {type(model).__name__} gives no scale of its logits: {error}"
        ) from error


def _family_of(model: Any) -> Family:
    cls = type(model)
    name = cls.__name__
    if name not in FAMILIES or not cls.__module__.startswith("transformers.models."):
        raise NotImplementedError(
            f"fuse_loss knows {', '.join(FAMILIES)} of transformers, got {cls.__module__}.{name}: use "
            "loongforge.linear_cross_entropy on its hidden states and output layer"
        )
    _check_own_forward(name, model)
    function = inspect.unwrap(cls.forward)
    if function.__module__ != cls.__module__:
        raise NotImplementedError(
            f"{name}.forward was replaced by {function.__module__}: undo that, two fused losses cannot share a model"
        )
    loss = getattr(model.loss_function, "__name__", repr(model.loss_function))
    if loss != "ForCausalLMLoss":
        raise NotImplementedError(f"{name} computes its loss with {loss}, expected transformers' ForCausalLMLoss")
    return FAMILIES[name]


def _check_own_forward(name: str, module: nn.Module) -> None:
    """A forward that was put on the object itself (Liger's patches, accelerate's hooks) hides that of its class."""
    replaced = vars(module).get("forward")
    if replaced is not None:
        origin = getattr(replaced, "__module__", type(replaced).__name__)
        raise NotImplementedError(
            f"{name}.forward of this object was replaced by {origin}: call fuse_loss before whatever replaces it, or "
            "undo that"
        )


def _check_head(head: nn.Module, model: Any) -> None:
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
