"""Tiny models of several families and a tokenizer for them, built in code."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<bos>")
WINDOW = 64

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # Large enough that attention matters: with the usual 0.02 a wrong position would hardly show.
    "initializer_range": 0.25,
    "pad_token_id": 257,
    "bos_token_id": 258,
    "eos_token_id": 257,
}

# Where the head dimension is always the hidden size over the heads.
PLAIN_HEADS = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"hidden_size": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama3-scaled": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "phi3": lambda: Phi3Config(**SHAPE, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "gemma": lambda: GemmaConfig(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 7}, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
    "olmo3": lambda: Olmo3Config(**SHAPE, sliding_window=WINDOW),
    "linear": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "dynamic": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "longrope": lambda: Phi3Config(
        **PLAIN_HEADS, sliding_window=None, rope_parameters=LONGROPE, original_max_position_embeddings=512
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "olmoe": lambda: OlmoeConfig(**PLAIN_HEADS, num_experts=4, num_experts_per_tok=2),
    "granite": lambda: GraniteConfig(**SHAPE, attention_multiplier=0.2, residual_multiplier=0.5),
    "starcoder2": lambda: Starcoder2Config(**SHAPE, sliding_window=None),
    "stablelm": lambda: StableLmConfig(**PLAIN_HEADS, partial_rotary_factor=0.5),
    "phi": lambda: PhiConfig(**PLAIN_HEADS, partial_rotary_factor=0.5),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE, rotary_pct=0.25),
    "glm": lambda: GlmConfig(**SHAPE),
    "glm4": lambda: Glm4Config(**SHAPE),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=1.0),
    "cohere2": lambda: Cohere2Config(**SHAPE, logit_scale=1.0, sliding_window=WINDOW),
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 1, 0]),
    "gpt-oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=YARN
    ),
}
# In older releases of transformers its layers take no arguments beyond their own, and the engine refuses the model.
_SINCE = {"stablelm": "5.8.0"}
FAMILIES = tuple(family for family in CONFIGS if Version(transformers.__version__) >= Version(_SINCE.get(family, "5")))
# One of each kind of rotation and window, for what does not depend on the family beyond these.
CORE = ("llama", "yarn", "qwen3", "mistral-sliding", "gemma3", "glm4", "smollm3", "gpt-neox")


@cache
def tiny_model(family: str, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """A random model of a family, float32, in eval mode."""
    torch.manual_seed(seed)
    options = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), **options)
    return model.eval().requires_grad_(False)


@cache
def wide_model() -> PreTrainedModel:
    """A random Llama whose context window holds the generic texts, each byte of which is a token here."""
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 4096
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@cache
def tiny_tokenizer(template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: 256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer
