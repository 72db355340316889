"""The causal language models of transformers whose loss is fused, and what each does to its logits before the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Family:
    """What a family does to its logits before the loss."""

    softcap: Callable[[Any], float | None] = lambda model: None
    logit_scale: Callable[[Any], float] = lambda model: 1.0


_PLAIN = Family()
_SOFTCAP = Family(softcap=lambda model: model.config.final_logit_softcapping)
_SCALED = Family(logit_scale=lambda model: model.logit_scale)
_DIVIDED = Family(logit_scale=lambda model: 1.0 / model.config.logits_scaling)
_PLAIN_NAMES = """
Apertus Arcee DeepseekV2 DeepseekV3 Ernie4_5 Exaone4 Gemma Glm Glm4 Glm4Moe GPTNeoX GptOss Helium HunYuanDenseV1
Llama Ministral Ministral3 Mistral Mixtral Nemotron Olmo Olmo2 Olmo3 Olmoe Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe
SeedOss SmolLM3 StableLm Starcoder2
"""
FAMILIES = {
    **{f"{name}ForCausalLM": _PLAIN for name in _PLAIN_NAMES.split()},
    "GPT2LMHeadModel": _PLAIN,
    "Gemma2ForCausalLM": _SOFTCAP,
    "Gemma3ForCausalLM": _SOFTCAP,
    "GraniteForCausalLM": _DIVIDED,
    "GraniteMoeForCausalLM": _DIVIDED,
    "CohereForCausalLM": _SCALED,
    "Cohere2ForCausalLM": _SCALED,
}


def transform(family: Family, model: nn.Module) -> dict[str, Any]:
    """``softcap`` and ``logit_scale`` of the loss; ``ValueError`` where the configuration has none."""
    try:
        return {"softcap": family.softcap(model), "logit_scale": float(family.logit_scale(model))}
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"the configuration of this {type(model).__name__} gives no scale of its logits: {error}"
        ) from error
