from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, WatermarkingConfig
from transformers.generation import logits_process as lp

from kvboost_rag.decode import build_processors, eos_ids
from kvboost_rag.sampling import Sampling, as_stops

PROMPT = np.array([1, 5, 6, 7, 5, 6, 9], dtype=np.int64)
EOS = (2,)
VOCAB = 60


def build(sampling, **config):
    return build_processors(sampling, GenerationConfig(**config), prompt_ids=PROMPT, eos=EOS, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.6,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", -1),
        ("max_tokens", None),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 70),
        ("temperature", 1e-30),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("seed", 1.5),
        ("seed", True),
        ("seed", 2**64),
        ("stop", "word"),
        ("stop", ["word"]),
        ("stop", ("a", "")),
        ("stop", (3,)),
        ("ignore_eos", 1),
    ],
)
def test_bad_values_are_refused_by_name_with_a_remedy(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*(pass|remove)"):
        Sampling(**{field: value})


def test_good_values_are_kept():
    given = Sampling(
        max_tokens=0,
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(0),
        min_p=0,
        repetition_penalty=1.1,
        seed=-3,
        stop=("a", "\n\n"),
        ignore_eos=True,
    )
    assert dataclasses.replace(given) == given
    assert hash(Sampling()) == hash(Sampling())


def test_as_stops():
    assert as_stops(None) == ()
    assert as_stops("ab") == ("ab",)
    assert as_stops(["b", "a", "b"]) == ("b", "a")
    with pytest.raises(ValueError, match="remove"):
        as_stops(["a", ""])


@pytest.mark.parametrize(
    "sampling, config, expected",
    [
        (Sampling(), {}, False),
        (Sampling(), {"do_sample": False}, False),
        (Sampling(), {"do_sample": True}, True),
        (Sampling(), {"do_sample": True, "temperature": 0.0}, False),
        (Sampling(temperature=0.5), {"do_sample": False}, True),
        (Sampling(temperature=0), {"do_sample": True}, False),
        (Sampling(temperature=0, top_p=0.5, top_k=3, min_p=0.1), {}, False),
        (Sampling(top_p=0.5), {"do_sample": True}, True),
        (Sampling(top_p=1.0, top_k=0, min_p=0.0), {}, False),
    ],
)
def test_who_decides_whether_to_sample(sampling, config, expected):
    processors, do_sample = build(sampling, **config)
    assert do_sample is expected
    assert bool(processors) is expected


@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_choice_that_would_be_ignored_is_refused(given):
    with pytest.raises(ValueError, match=r"would be ignored.*set temperature"):
        build(Sampling(**given), do_sample=False)


def test_the_caller_wins_over_the_generation_config():
    config = {"do_sample": True, "temperature": 0.3, "top_k": 9, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 1.3}
    processors, _ = build(Sampling(temperature=0.9, top_k=0, top_p=1, min_p=0, repetition_penalty=1), **config)
    assert [type(p) for p in processors] == [lp.TemperatureLogitsWarper]
    assert processors[0].temperature == 0.9
    processors, _ = build(Sampling(), **config)
    assert [type(p) for p in processors] == [
        lp.RepetitionPenaltyLogitsProcessor,
        lp.TemperatureLogitsWarper,
        lp.TopKLogitsWarper,
        lp.TopPLogitsWarper,
        lp.MinPLogitsWarper,
    ]


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("token_healing", True),
        ("max_time", 1.0),
        ("constraints", [object()]),
        ("force_words_ids", [[4]]),
    ],
)
def test_what_can_not_be_done_is_refused(name, value):
    config = GenerationConfig()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"{name}.*set model\.generation_config\.{name} = None"):
        build_processors(Sampling(), config, prompt_ids=PROMPT, eos=EOS, vocab_size=VOCAB)


def test_remove_invalid_values_is_not_applied_and_logged(caplog):
    with caplog.at_level(logging.WARNING, "kvboost_rag"):
        processors, _ = build(Sampling(), remove_invalid_values=True)
    assert not processors
    assert "remove_invalid_values" in caplog.text


def test_minimum_lengths_need_an_end_of_sequence_token():
    config = GenerationConfig(min_new_tokens=3, min_length=20, exponential_decay_length_penalty=(2, 1.5))
    processors, _ = build_processors(Sampling(), config, prompt_ids=PROMPT, eos=(), vocab_size=VOCAB)
    assert not processors


def test_eos_ids_joins_config_and_tokenizer():
    from tokenizers import Tokenizer, models

    raw = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with_eos = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    without = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert eos_ids(GenerationConfig(eos_token_id=[5, 1, 5]), with_eos) == (5, 1)
    assert eos_ids(GenerationConfig(eos_token_id=7), with_eos) == (7, 1)
    assert eos_ids(GenerationConfig(), with_eos) == (1,)
    assert eos_ids(GenerationConfig(eos_token_id=7), without) == (7,)
    assert eos_ids(GenerationConfig(), without) == ()


CONFIGS = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "integers": {"temperature": 2.0, "top_k": 5, "no_repeat_ngram_size": 2},
    "nucleus": {"temperature": 0.8, "top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.7, "epsilon_cutoff": 3e-3, "eta_cutoff": 3e-3},
    "top_h": {"top_h": 0.5},
    "repetition": {"repetition_penalty": 1.4, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3},
    "bans": {"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [8, 9], "begin_suppress_tokens": [10, 11]},
    "lengths": {"min_length": 9, "min_new_tokens": 3, "exponential_decay_length_penalty": (2, 1.5)},
    "forced": {"forced_eos_token_id": 2},
    "bias": {"sequence_bias": [[[5], 2.0], [[6, 7], -3.0]], "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "all": {
        "repetition_penalty": 1.2,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "min_new_tokens": 4,
    },
}


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_generate(model, name, do_sample):
    warpers = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
    chosen = {key: value for key, value in CONFIGS[name].items() if do_sample or key not in warpers}
    config = GenerationConfig(do_sample=do_sample, eos_token_id=2, pad_token_id=0, **chosen)
    ids = torch.tensor(PROMPT).unsqueeze(0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            max_new_tokens=6,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    processors, sampled = build_processors(Sampling(max_tokens=6), config, prompt_ids=PROMPT, eos=EOS, vocab_size=VOCAB)
    assert sampled is do_sample
    assert len(theirs.scores) > 1
    for step, (logits, scores) in enumerate(zip(theirs.logits, theirs.scores, strict=True)):
        ours = processors(theirs.sequences[:, : len(PROMPT) + step], logits.clone())
        assert torch.equal(ours, scores)
