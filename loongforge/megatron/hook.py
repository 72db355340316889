"""``cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"`` for released megatron-core.

While a model's labelled forward runs, its output layer's ``forward`` returns :class:`DeferredLogits`, and
``compute_language_model_loss`` turns that into the loss.  No code of Megatron is copied: these functions are wrapped,
and each does what it did before unless the two flags ask for the fused loss.

    LanguageModule.__init__                     refuses models whose loss path is not known
    GPTModel / MambaModel / HybridModel
        .__init__                               refuses what the fused loss cannot do
        ._postprocess (Hybrid, Mamba: forward)  marks the output layer while a labelled forward runs
    ColumnParallelLinear.forward                defers where the layer is marked
    LanguageModule.compute_language_model_loss  fuses what was deferred
    the data-parallel wrappers' __init__        refuses what came after the model was built (see wrapping.py)

Branches of Megatron with a ``linear`` of their own call the output layer for its loss: there that method is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loongforge.megatron import support
from loongforge.megatron.arguments import IMPL, allow_linear, linear_enabled
from loongforge.megatron.deferred import DeferredLogits, HeadCall, Usage, head_loss
from loongforge.megatron.patches import Patches
from loongforge.megatron.validation import hook_validation
from loongforge.megatron.versions import check_supported, megatron_version
from loongforge.megatron.wrapping import guard_wrappers

logger = logging.getLogger(__name__)

_MARK = "_loongforge_labelled_forward"
_NEEDS_LOGITS = ("inference_context", "inference_params", "output_processor")


@dataclass(frozen=True)
class HookReport:
    """What :func:`install` hooked."""

    megatron_version: str
    models: tuple[str, ...]

    def __str__(self) -> str:
        return f"fused linear cross-entropy in {', '.join(self.models)} of megatron-core {self.megatron_version}"


@dataclass(frozen=True)
class _Installed:
    version: str
    patches: Patches
    models: list[type]

    @property
    def report(self) -> HookReport:
        return HookReport(self.version, tuple(model.__name__ for model in self.models))


_installed: _Installed | None = None


def install(models: Sequence[type] = ()) -> HookReport:
    """Make the two flags work; call it before the model and its configuration are built.

    ``models`` are further subclasses of ``LanguageModule`` whose ``forward`` (or ``_postprocess``) calls
    ``self.output_layer`` and then ``self.compute_language_model_loss``, as GPTModel's does.  Calling it again changes
    nothing else.  Raises ``ImportError`` without megatron-core, ``RuntimeError`` for a version of it that was not
    tested, and ``TypeError`` for something in ``models`` that is no such class.
    """
    global _installed
    if _installed is None:
        version = megatron_version()
        check_supported(version)
        installed = _Installed(version, Patches(), [])
        allow_linear(installed.patches)
        hook_validation(installed.patches)
        _wrap_shared_classes(installed)
        guard_wrappers(installed.patches)
        for model in _model_classes():
            _wrap_model(installed, model)
        _installed = installed
        logger.info("hooked: %s", _installed.report)
    for model in models:
        if model not in _installed.models:
            _wrap_model(_installed, model)
            logger.info("hooked: %s", model.__name__)
    return _installed.report


def enable(config: Any) -> HookReport:
    """Install the hook and set the two settings on ``config``, before the model is built of it.

    For code that builds its models itself: a ``TransformerConfig``, or what carries its fields, such as a model
    provider of Megatron-Bridge (``enable(cfg.model)``) or a configuration of NeMo.
    """
    for name in ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"):
        if not hasattr(config, name):
            raise TypeError(f"{type(config).__name__} has no {name}: expected a TransformerConfig or a model provider")
    report = install()
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, IMPL
    return report


def uninstall() -> None:
    """Put megatron-core back as it was; ``RuntimeError`` where something else was patched on top."""
    global _installed
    if _installed is not None:
        _installed.patches.undo()
        _installed = None


def is_installed() -> bool:
    """Whether the hook is in place."""
    return _installed is not None


def _model_classes() -> tuple[Any, ...]:
    from megatron.core.models.gpt.gpt_model import GPTModel

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # up to 0.17
        from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    return GPTModel, HybridModel


def _wrap_model(installed: _Installed, model: Any) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if not isinstance(model, type) or not issubclass(model, LanguageModule):
        raise TypeError(f"models must be subclasses of megatron-core's LanguageModule, got {model!r}")
    method = "_postprocess" if "_postprocess" in vars(model) else "forward"
    if method not in vars(model):
        raise TypeError(
            f"{model.__name__} has neither a forward nor a _postprocess of its own: name the class that has"
        )
    installed.patches.set(model, "__init__", _checked_init(installed, getattr(model, "__init__")))  # noqa: B009
    installed.patches.set(model, method, _labelled_forward(vars(model)[method]))
    installed.models.append(model)


def _wrap_overrides(installed: _Installed, model: type) -> None:
    """A subclass of a hooked class that has a ``forward`` or ``_postprocess`` of its own must not train unfused."""
    for cls in itertools.takewhile(lambda cls: cls not in installed.models, model.__mro__):
        for name in ("forward", "_postprocess"):
            if name in vars(cls) and not hasattr(vars(cls)[name], _MARK):
                installed.patches.set(cls, name, _labelled_forward(vars(cls)[name]))


def _wrap_shared_classes(installed: _Installed) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    patches, original_init = installed.patches, LanguageModule.__init__

    @functools.wraps(original_init)
    def init(model, *args, **kwargs):
        original_init(model, *args, **kwargs)
        if linear_enabled(model.config):
            support.check_model_class(model, tuple(installed.models))

    patches.set(LanguageModule, "__init__", init)
    patches.set(LanguageModule, "compute_language_model_loss", _loss(LanguageModule.compute_language_model_loss))
    patches.set(ColumnParallelLinear, "forward", _deferring_forward(ColumnParallelLinear.forward))
    own = support.own_linear_layer()
    if own is not None:
        patches.set(own, "_compute_linear_and_cross_entropy_loss", _loss_of_own_layer)


def _checked_init(installed: _Installed, original: Callable) -> Callable:
    """Refuse at construction what the output layer cannot do."""

    @functools.wraps(original)
    def init(model, *args, **kwargs):
        original(model, *args, **kwargs)
        if linear_enabled(model.config) and getattr(model, "output_layer", None) is not None:
            support.check_output_layer(model)
            _wrap_overrides(installed, type(model))

    return init


def _labelled_forward(original: Callable) -> Callable:
    """Mark the output layer while a forward with labels runs."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(model, *args, **kwargs):
        if not isinstance(model, LanguageModule):  # a mixin's method serves other classes too
            return original(model, *args, **kwargs)
        if not linear_enabled(model.config) or not model.post_process:
            return original(model, *args, **kwargs)
        if not _only_loss_is_wanted(model, {**signature.bind(model, *args, **kwargs).arguments, **kwargs}):
            return original(model, *args, **kwargs)
        support.check_output_layer(model)  # again: a wrapper may have come after the model was built
        with _marked(model) as usages:
            result = original(model, *args, **kwargs)
        for usage in usages:
            if not usage.reached:
                raise RuntimeError(
                    f"{type(model).__name__} got {usage.description} from its output layer and neither computed a "
                    "loss of it through compute_language_model_loss nor used it as a differentiable tensor: the "
                    "fused loss cannot serve this model, set cross_entropy_loss_fusion=False"
                )
        return result

    setattr(forward, _MARK, True)
    return forward


def _only_loss_is_wanted(model: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    from megatron.core.config_logger import has_config_logger_enabled

    if arguments.get("labels") is None or any(arguments.get(name) is not None for name in _NEEDS_LOGITS):
        return False
    if has_config_logger_enabled(model.config):
        _warn_once("config_logger_dir asks for the logits of every step: they are materialised and nothing is fused")
        return False
    return True


@contextlib.contextmanager
def _marked(model: torch.nn.Module) -> Iterator[list[Usage]]:
    layer = model.output_layer
    if hasattr(layer, _MARK):  # an override that calls what it overrides
        yield []
        return
    usages: list[Usage] = []
    setattr(layer, _MARK, usages)
    try:
        yield usages
    finally:
        delattr(layer, _MARK)


def _deferring_forward(original: Callable) -> Callable:
    """``ColumnParallelLinear.forward`` that defers where its layer is marked."""

    @functools.wraps(original)
    def forward(layer, input_, weight=None, runtime_gather_output=None, *args, **kwargs):
        usages = vars(layer).get(_MARK)
        if usages is None:
            return original(layer, input_, weight, runtime_gather_output, *args, **kwargs)
        call = HeadCall(
            layer=layer,
            hidden=input_,
            weight=support.check_weight(layer, weight),
            gather_output=bool(layer.gather_output if runtime_gather_output is None else runtime_gather_output),
            project=lambda: original(layer, input_, weight, runtime_gather_output, *args, **kwargs)[0],
            usages=usages,
        )
        return DeferredLogits(call), None

    return forward


def _loss_of_own_layer(layer, hidden, weight, labels=None, reduction="none", ignore_index=-100):
    """In place of the loss that some branches' output layer computes itself."""
    if reduction != "none" or ignore_index != -100:
        raise NotImplementedError(
            f"the fused output layer takes reduction='none' and ignore_index=-100 from Megatron, got {reduction!r} and "
            f"{ignore_index}"
        )
    call = HeadCall(
        layer=layer,
        hidden=hidden,
        weight=support.check_weight(layer, weight),
        gather_output=False,
        project=lambda: layer(hidden, weight)[0],
    )
    return head_loss(call, labels)


def _loss(original: Callable) -> Callable:
    """``compute_language_model_loss`` that fuses deferred logits and leaves real ones to Megatron's unfused loss."""

    @functools.wraps(original)
    def compute_language_model_loss(model, labels, logits):
        if isinstance(logits, DeferredLogits):
            return logits.loss(labels)
        if not linear_enabled(model.config):
            return original(model, labels, logits)
        usages = getattr(getattr(model, "output_layer", None), _MARK, None)
        if usages is not None and not any(usage.touched for usage in usages):
            raise RuntimeError(
                f"{type(model).__name__}'s loss got real logits that did not come from its output layer's own forward "
                "(replaced by something else?): nothing would be fused; undo that, or set "
                "cross_entropy_loss_fusion=False"
            )
        if usages is None:
            _warn_once("a loss was asked for outside a labelled forward: it is computed from real logits")
        else:
            _warn_once("something changed the output layer's logits before the loss: it is computed from real logits")
        with _unfused(model.config):
            return original(model, labels, logits)

    return compute_language_model_loss


@contextlib.contextmanager
def _unfused(config: Any) -> Iterator[None]:
    config.cross_entropy_loss_fusion = False
    try:
        yield
    finally:
        config.cross_entropy_loss_fusion = True


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
