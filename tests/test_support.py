"""The check at load: who is refused, by which name, and what still works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny import FAMILIES, SHAPE, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from kvboost_rag import Document, KVBoostEngine, SpanKind, UnsupportedModelError
from kvboost_rag.chunking import AdaptiveChunker
from kvboost_rag.model import ModelRunner, check_build, check_support
from kvboost_rag.model.steering import Steering

SMALL = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 257, "eos_token_id": 257}
REFUSED = {
    "gpt2": (GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=4, eos_token_id=257), "no rotary"),
    "opt": (OPTConfig(**SMALL, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32), "no rotary"),
    "bloom": (BloomConfig(vocab_size=264, hidden_size=32, n_layer=2, n_head=4, eos_token_id=257), "position_ids"),
    "mamba": (MambaConfig(**SMALL, state_size=4), "position_ids"),
    "mpt": (MptConfig(vocab_size=264, d_model=32, n_layers=2, n_heads=4, eos_token_id=257), "position_ids"),
    "gpt-j": (GPTJConfig(vocab_size=264, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, eos_token_id=257), "rota"),
    "falcon": (FalconConfig(**SMALL, num_attention_heads=4, alibi=False), "prepared cache"),
    "qwen3-next": (
        Qwen3NextConfig(
            **SHAPE, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16, num_experts=0,
        ),
        "linear_attention",
    ),
    "rwkv": (RwkvConfig(**SMALL, attention_hidden_size=32), "position_ids"),
    "mla": (
        DeepseekV3Config(
            **{**SHAPE, "head_dim": 8}, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
            moe_intermediate_size=32,
        ),
        "latent attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_kv_can_not_be_moved_are_refused_by_name(name):
    config, why = REFUSED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=why) as error:
        KVBoostEngine(model, tiny_tokenizer())
    assert type(model).__name__ in str(error.value)
    assert "reuse='off'" in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "mamba"])
def test_refused_models_run_with_reuse_off(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REFUSED[name][0]).eval()
    tokenizer = tiny_tokenizer()
    ids = tokenizer("Once upon a time", return_tensors="pt", add_special_tokens=False).input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8)[0, ids.shape[1] :].tolist()
    engine = KVBoostEngine(model, tokenizer, reuse="off")
    result = engine.generate("Once upon a time", max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(result.token_ids) == expected
    assert result.report.fallback == "reuse is off"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_families_pass(family, dtype):
    model = tiny_model(family) if dtype == torch.float32 else _converted(family, dtype)
    assert isinstance(check_support(model), ModelRunner)


def _converted(family, dtype):
    model = AutoModelForCausalLM.from_config(tiny_model(family).config)
    # Half precision needs weights of the usual size, or rounding alone moves the logits.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype).eval()


@pytest.mark.parametrize("factor", [0.9, 0.98])
def test_a_rotation_that_differs_in_one_layer_is_noticed(factor):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    attention = model.model.layers[2].self_attn
    forward = attention.forward

    def other_rotation(*args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return forward(*args, position_embeddings=(cos, sin * factor), **kwargs)

    attention.forward = other_rotation
    with pytest.raises(UnsupportedModelError, match="keys of layer 2"):
        check_support(model)


def test_values_that_depend_on_the_position_are_noticed():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    attention, held = model.model.layers[3].self_attn, {}

    def seen(module, args, kwargs):
        held["sin"] = kwargs["position_embeddings"][1]

    attention.register_forward_pre_hook(seen, with_kwargs=True)
    attention.v_proj.register_forward_hook(lambda module, args, out: out + held["sin"].repeat(1, 1, 2))
    with pytest.raises(UnsupportedModelError, match="values of layer 3 depend on the position"):
        check_support(model)


def test_builds_that_are_refused_before_any_weight_is_read():
    encoder_decoder = T5Config(vocab_size=264, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        check_build(T5ForConditionalGeneration(encoder_decoder))
    with pytest.raises(UnsupportedModelError, match="by ALiBi"):
        check_build(AutoModelForCausalLM.from_config(FalconConfig(**SMALL, num_attention_heads=4, alibi=True)))


def test_a_model_that_ignores_masks_is_noticed(monkeypatch):
    monkeypatch.setattr(Steering, "_build", lambda self, window: torch.zeros((1, 1, 1, 1)))
    with pytest.raises(UnsupportedModelError):
        check_support(tiny_model("llama"))


def test_hooks_and_attention_are_restored_after_a_failure():
    model = tiny_model("llama")
    runner = check_support(model)
    cache = runner.new_cache(8)
    with pytest.raises(IndexError):
        runner.forward(torch.arange(4), torch.arange(4) + 100, cache, 8)
    assert model.config._attn_implementation == "sdpa"
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert torch.isfinite(runner.plain_logits(torch.arange(4))).all()


def test_nonsense_for_reuse_is_refused():
    with pytest.raises(ValueError, match="'on' or 'off'"):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="maybe")
    with pytest.raises(ValueError, match="no use with reuse='off'"):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="off", cache_dir="x")


@pytest.mark.parametrize(
    "option",
    [
        {"repair": "none"}, {"quality": "safe"}, {"context_documents": ["A text."]}, {"max_memory_bytes": 1},
        {"max_disk_bytes": 1}, {"read_only": True}, {"eviction": "lru"}, {"refill": False}, {"max_prefix_bytes": 0},
        {"chunker": AdaptiveChunker()},
    ],
)  # fmt: skip
def test_what_only_reuse_needs_is_not_ignored_without_it(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: no use with reuse='off'"):
        KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="off", **option)


def test_no_context_documents_are_no_use_of_them():
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="off", context_documents=[]) as engine:
        assert engine.generate("Once upon a time", max_tokens=2, ignore_eos=True).report.tokens(SpanKind.COMPUTED)


def in_autocast(call: Callable[[], object]) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UnsupportedModelError, match=r"autocast is on.*dtype=torch.bfloat16"),
    ):
        call()


def test_autocast_is_refused_wherever_it_begins_and_leaves_nothing_behind():
    document = Document("a", "the zebra drinks from the well " * 3)
    asked = {"documents": [document], "max_tokens": 4, "ignore_eos": True}
    make_engine = partial(KVBoostEngine, tiny_model("llama"), tiny_tokenizer())
    in_autocast(make_engine)
    with make_engine() as engine, make_engine() as untouched:
        in_autocast(lambda: engine.add_documents([document]))
        in_autocast(lambda: engine.generate("Why?", **asked))
        engine.add_documents([document])
        stream = engine.stream("Why?", **asked)
        next(stream)
        in_autocast(lambda: next(stream))
        untouched.add_documents([document])
        assert engine.generate("Why?", **asked).token_ids == untouched.generate("Why?", **asked).token_ids
