"""``cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"`` for released megatron-core.

While a model's labelled forward runs, its output layer's ``forward`` returns :class:`DeferredLogits`, and
``compute_language_model_loss`` turns that into the loss.  No code of Megatron is copied: five functions are wrapped,
and each does what it did before unless the two flags ask for the fused loss.

    LanguageModule.__init__                     refuses models whose loss path is not known
    GPTModel / MambaModel / HybridModel
        .__init__                               refuses what the fused loss cannot do
        ._postprocess (Hybrid, Mamba: forward)  marks the output layer while a labelled forward runs
    ColumnParallelLinear.forward                defers where the layer is marked
    LanguageModule.compute_language_model_loss  fuses what was deferred
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from loongforge.megatron import support
from loongforge.megatron.arguments import allow_linear, linear_enabled
from loongforge.megatron.deferred import DeferredLogits, HeadCall, Usage
from loongforge.megatron.patches import Patches
from loongforge.megatron.versions import check_supported, megatron_version

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
    report: HookReport
    patches: Patches


_installed: _Installed | None = None


def install() -> HookReport:
    """Make the two flags work; call it before the model and its configuration are built.

    Calling it again changes nothing.  Raises ``ImportError`` without megatron-core and ``RuntimeError`` for a version
    of it that was not tested.
    """
    global _installed
    if _installed is None:
        version = megatron_version()
        check_supported(version)
        patches = Patches()
        models = _model_classes()
        allow_linear(patches)
        for model in models:
            method = "_postprocess" if "_postprocess" in vars(model) else "forward"
            patches.set(model, "__init__", _checked_init(model.__init__))
            patches.set(model, method, _labelled_forward(vars(model)[method]))
        _wrap_shared_classes(patches, models)
        _installed = _Installed(HookReport(version, tuple(model.__name__ for model in models)), patches)
        logger.info("hooked: %s", _installed.report)
    return _installed.report


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


def _wrap_shared_classes(patches: Patches, models: tuple[Any, ...]) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    original_init = LanguageModule.__init__

    @functools.wraps(original_init)
    def init(model, *args, **kwargs):
        original_init(model, *args, **kwargs)
        if linear_enabled(model.config):
            support.check_model_class(model, models)

    patches.set(LanguageModule, "__init__", init)
    patches.set(LanguageModule, "compute_language_model_loss", _loss(LanguageModule.compute_language_model_loss))
    patches.set(ColumnParallelLinear, "forward", _deferring_forward(ColumnParallelLinear.forward))


def _checked_init(original: Callable) -> Callable:
    """Refuse at construction what the output layer cannot do."""

    @functools.wraps(original)
    def init(model, *args, **kwargs):
        original(model, *args, **kwargs)
        if linear_enabled(model.config) and getattr(model, "output_layer", None) is not None:
            support.check_output_layer(model)

    return init


def _labelled_forward(original: Callable) -> Callable:
    """Mark the output layer while a forward with labels runs."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(model, *args, **kwargs):
        if not linear_enabled(model.config) or not model.post_process:
            return original(model, *args, **kwargs)
        if not _only_loss_is_wanted(model, signature.bind(model, *args, **kwargs).arguments):
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
    usages: list[Usage] = []
    layer = model.output_layer
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
        if usages is not None:
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
