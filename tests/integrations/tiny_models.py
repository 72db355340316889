"""Tiny causal language models of transformers, randomly initialised, and a step of each beside its own loss."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers (pip install 'loongforge[transformers]')", allow_module_level=True)

import transformers

from loongforge.integrations.transformers import fuse_loss
from tests.helpers import relative

VOCAB, HIDDEN = 99, 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
DROPOUTS = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout")
LOCAL = {"output_router_logits": True, "num_local_experts": 4}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
EXTRA = {
    **dict.fromkeys(("MixtralForCausalLM", "GptOssForCausalLM", "PhimoeForCausalLM"), LOCAL),
    **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"), SHARED),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), LATENT),
    "Glm4MoeForCausalLM": {**MOE, "first_k_dense_replace": 0, "n_routed_experts": 4},
    "GraniteMoeForCausalLM": {"logits_scaling": 3.0, "output_router_logits": True},
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "CohereForCausalLM": {"logit_scale": 0.4},
    "Cohere2ForCausalLM": {"logit_scale": 0.3},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": {"final_logit_softcapping": 3.0},
}
IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(9) < 3, -100)


def tiny(name="LlamaForCausalLM", dtype=torch.float32, **changes):
    """A model whose logits are large enough for a scale or a softcap to matter."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class(**{**SIZES, **EXTRA.get(name, {}), **changes})
    for dropout in DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    model = cls(config).to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def step(model, **arguments):
    """Output, and the gradients by name."""
    torch.manual_seed(2)  # routers that sample
    model.zero_grad()
    output = model(**{"input_ids": IDS, "labels": LABELS, **arguments})
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, fused, tolerance=2e-6, **arguments):
    theirs, expected = step(model, **arguments)
    ours, gradients = step(fused, **arguments)
    assert ours.logits is None and ours.loss.dtype == theirs.loss.dtype == torch.float32
    assert relative(ours.loss, theirs.loss) < tolerance
    assert gradients.keys() == expected.keys() and len(expected) > 1
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < tolerance, name


def refusal(model, exception, text, **options):
    with pytest.raises(exception, match=text):
        fuse_loss(model, **options)


def with_lora(model, **changes):
    import peft

    config = {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False, **changes}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**config))
