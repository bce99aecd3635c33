from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost_rag.decode import Delta, Finish, decode
from kvboost_rag.errors import ModelOutputError
from kvboost_rag.sampling import Sampling

PROMPT = np.array([1, 40, 50, 60, 70, 50, 60], dtype=np.int64)
PROMPT.flags.writeable = False
EOS = 2


def make_tokenizer():
    raw = Tokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<pad>", "<s>", "</s>"])
    raw.train_from_iterator(["one two three, and the other: naïve 中文 😀 words\n"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


TOKENIZER = make_tokenizer()
VOCAB = len(TOKENIZER)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


class Script:
    """Logits that lead to given tokens; counts the steps."""

    def __init__(self, ids):
        self.ids = list(ids)
        self.steps = []

    def logits(self):
        logits = torch.zeros(VOCAB)
        logits[self.ids[len(self.steps)]] = 1.0
        return logits

    def __call__(self, token_id):
        self.steps.append(token_id)
        return self.logits()


def collect(generator):
    deltas = []
    while True:
        try:
            deltas.append(next(generator))
        except StopIteration as end:
            finish = end.value
            assert "".join(delta.text for delta in deltas) == finish.text
            assert tuple(i for delta in deltas for i in delta.token_ids) == finish.token_ids
            return deltas, finish


def play(ids, config=None, **sampling):
    script = Script(ids)
    generator = decode(
        script.logits(),
        script,
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(**sampling),
        generation_config=config or GenerationConfig(eos_token_id=EOS),
    )
    return (*collect(generator), script)


def start(model, sampling, config, prompt=PROMPT):
    ids = []

    # Without a cache, because its name in the model's forward is not the same in all releases of transformers.
    @torch.inference_mode()
    def run(new):
        ids.extend(new)
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]

    return decode(
        run(prompt.tolist()),
        lambda token_id: run([token_id]),
        prompt_ids=prompt,
        tokenizer=TOKENIZER,
        sampling=sampling,
        generation_config=config,
    )


def reference(model, config, max_new_tokens, seed=0):
    ids = torch.tensor(PROMPT.copy()).unsqueeze(0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, max_new_tokens=max_new_tokens
        )
    new = out[0, ids.shape[1] :].tolist()
    return new[:-1] if new[-1] == EOS else new


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
        {"suppress_tokens": [30, 31], "bad_words_ids": [[32]]},
        {"forced_eos_token_id": EOS},
    ],
    ids=lambda extra: "-".join(extra) or "plain",
)
def test_greedy_is_generate(model, extra):
    config = GenerationConfig(do_sample=False, eos_token_id=EOS, pad_token_id=0, **extra)
    _, finish = collect(start(model, Sampling(max_tokens=40), config))
    expected = reference(model, config, 40)
    assert list(finish.token_ids) == expected
    assert len(expected) > 4
    assert finish.text == TOKENIZER.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_sampling_is_generate_with_the_same_seed(model, seed):
    config = GenerationConfig(
        do_sample=True, eos_token_id=EOS, pad_token_id=0, temperature=0.9, top_p=0.95, repetition_penalty=1.1
    )
    _, finish = collect(start(model, Sampling(max_tokens=30, seed=seed), config))
    assert list(finish.token_ids) == reference(model, config, 30, seed)


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model):
    config = GenerationConfig(eos_token_id=EOS)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    answers = []
    for global_seed, seed in ((1, 7), (2, 7), (3, 8), (3, None), (3, None)):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        answers.append(collect(start(model, Sampling(max_tokens=24, temperature=1.5, seed=seed), config))[1].token_ids)
        assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
    assert answers[0] == answers[1]
    assert len(set(answers)) == 4


def test_each_token_is_yielded_before_the_next_step():
    script = Script(encode("one two three"))
    generator = decode(
        script.logits(),
        script,
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(max_tokens=3),
        generation_config=GenerationConfig(),
    )
    assert inspect.isgenerator(generator)
    for count in range(3):
        assert next(generator).token_ids == (script.ids[count],)
        assert script.steps == script.ids[:count]


def test_the_first_token_is_seen_even_if_its_text_is_not():
    ids = encode("😁")
    assert len(ids) > 1
    deltas, finish, _ = play([*ids, EOS])
    assert deltas[0] == Delta("", (ids[0],))
    assert finish == Finish("stop", None, tuple(ids), "😁")


def test_end_of_sequence_as_first_token():
    deltas, finish, script = play([EOS])
    assert deltas == [Delta("", ())]
    assert finish == Finish("stop", None, (), "")
    assert script.steps == []


def test_max_tokens_zero_yields_nothing():
    deltas, finish, script = play(encode("one"), max_tokens=0)
    assert deltas == []
    assert finish == Finish("length", None, (), "")
    assert script.steps == []


def test_length_ends_without_a_step_too_many():
    ids = encode("one two three, and the other")
    _, finish, script = play(ids, max_tokens=4)
    assert finish == Finish("length", None, tuple(ids[:4]), TOKENIZER.decode(ids[:4]))
    assert script.steps == ids[:3]


def test_length_shows_what_was_held_back():
    ids = encode("😁")[:2]
    deltas, finish, _ = play([*ids, EOS], max_tokens=2)
    assert finish == Finish("length", None, tuple(ids), TOKENIZER.decode(ids))
    assert deltas[-1] == Delta("\ufffd", ())
    _, finish, _ = play(encode("one EN"), max_tokens=len(encode("one EN")), stop=("END",))
    assert finish.text == "one EN"


@pytest.mark.parametrize("ids", [EOS, [60, EOS]], ids=["int", "list"])
def test_end_of_sequence_ids_of_the_config(ids):
    words = encode("one two")
    _, finish, script = play([*words, EOS], GenerationConfig(eos_token_id=ids))
    assert finish == Finish("stop", None, tuple(words), "one two")
    assert script.steps == words


def test_end_of_sequence_id_of_the_tokenizer_and_another():
    words = encode("one two")
    assert play([*words, EOS], GenerationConfig())[1].reason == "stop"
    assert play([*words[:1], 1], GenerationConfig(eos_token_id=[1]))[1].token_ids == tuple(words[:1])


def test_ignore_eos_goes_on():
    words = encode("one two")
    ids = [words[0], EOS, *words[1:]]
    _, finish, _ = play(ids, max_tokens=len(ids), ignore_eos=True)
    assert finish == Finish("length", None, tuple(ids), "one two")


@pytest.mark.parametrize("size", range(1, 9))
def test_stop_strings_across_token_borders(size):
    ids = encode("one two three")
    stop = "one two three"[-5 - size : -5]
    deltas, finish, script = play([*ids, EOS], stop=(stop, "never"))
    expected = "one two three"[: "one two three".index(stop)]
    assert finish.text == expected
    assert (finish.reason, finish.stop) == ("stop", stop)
    assert all(expected.startswith("".join(d.text for d in deltas[: i + 1])) for i in range(len(deltas)))
    # The last token is the first one with which the stop string is complete, and the model does not run on it.
    assert stop in TOKENIZER.decode(finish.token_ids)
    assert stop not in TOKENIZER.decode(finish.token_ids[:-1])
    assert script.steps == list(finish.token_ids[:-1])


def test_stop_strings_of_the_config_count_too():
    ids = [*encode("one two three"), EOS]
    config = GenerationConfig(eos_token_id=EOS, stop_strings=[" three"])
    assert play(ids, config)[1].stop == " three"
    assert play(ids, config, stop=(" two",))[1].text == "one"
    assert play(ids, GenerationConfig(eos_token_id=EOS, stop_strings="two"))[1].text == "one "


def test_a_stop_string_that_only_the_end_completes():
    ids = encode("😁")[:2]
    _, finish, _ = play([*ids, EOS], stop=("\ufffd",))
    assert finish == Finish("stop", "\ufffd", tuple(ids), "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers(value, sampling):
    good = torch.zeros(VOCAB)
    good[EOS] = -torch.inf  # or the answer might end before the bad ones come
    bad = torch.zeros(VOCAB)
    bad[3] = value
    for first, later in ((bad, bad), (good, bad), (good, torch.full((VOCAB,), -torch.inf))):
        generator = decode(
            first,
            lambda token_id, later=later: later,
            prompt_ids=PROMPT,
            tokenizer=TOKENIZER,
            sampling=Sampling(**sampling),
            generation_config=GenerationConfig(eos_token_id=EOS),
        )
        with pytest.raises(ModelOutputError, match="float32 or bfloat16"):
            collect(generator)


def test_some_banned_logits_are_fine():
    logits = torch.full((VOCAB,), -torch.inf)
    logits[EOS] = 0
    generator = decode(
        logits,
        Script([]),
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(temperature=1.0),
        generation_config=GenerationConfig(),
    )
    assert collect(generator)[1].reason == "stop"


def test_a_config_that_bans_every_token():
    with pytest.raises(ModelOutputError, match="generation config"):
        play(encode("one"), GenerationConfig(suppress_tokens=list(range(VOCAB))))


def test_the_models_logits_are_not_changed():
    logits = torch.arange(VOCAB, dtype=torch.float32)
    kept = logits.clone()
    generator = decode(
        logits,
        lambda token_id: logits,
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(max_tokens=3, repetition_penalty=2.0, temperature=0.5),
        generation_config=GenerationConfig(sequence_bias=[[[5], 3.0]]),
    )
    collect(generator)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type(dtype):
    script = Script([*encode("one"), EOS])
    generator = decode(
        script.logits().to(dtype),
        lambda token_id: script(token_id).to(dtype),
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(),
        generation_config=GenerationConfig(),
    )
    assert collect(generator)[1].text == "one"


def test_scores_are_float32_whatever_the_logits():
    # In bfloat16 the penalised logit would round back to 1, and the first of two equal tokens win.
    logits = torch.zeros(VOCAB, dtype=torch.bfloat16)
    logits[[40, 200]] = 1.0
    assert 40 in PROMPT
    generator = decode(
        logits,
        Script([]),
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(max_tokens=1, repetition_penalty=1.001),
        generation_config=GenerationConfig(),
    )
    assert collect(generator)[1].token_ids == (200,)


@pytest.mark.parametrize(
    "first, prompt, message",
    [
        (torch.zeros(1, VOCAB), PROMPT, "logits have shape"),
        (torch.zeros(0), PROMPT, "logits have shape"),
        (torch.zeros(VOCAB), PROMPT[None], "prompt_ids has shape"),
        (torch.zeros(VOCAB), PROMPT[:0], "prompt_ids has shape"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(first, prompt, message):
    with pytest.raises(ValueError, match=message):
        decode(
            first,
            Script([]),
            prompt_ids=prompt,
            tokenizer=TOKENIZER,
            sampling=Sampling(),
            generation_config=GenerationConfig(),
        )


def test_a_config_that_can_not_be_honoured_is_refused_at_the_call():
    with pytest.raises(ValueError, match="num_beams"):
        play(encode("one"), GenerationConfig(num_beams=3))


def test_closing_stops_the_work(model):
    generator = start(model, Sampling(max_tokens=1000, ignore_eos=True), GenerationConfig(eos_token_id=EOS))
    next(generator)
    generator.close()
    with pytest.raises(StopIteration):
        next(generator)


def test_an_exception_thrown_in_comes_out():
    script = Script(encode("one two three"))
    generator = decode(
        script.logits(),
        script,
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(),
        generation_config=GenerationConfig(),
    )
    next(generator)
    with pytest.raises(KeyboardInterrupt):
        generator.throw(KeyboardInterrupt())
    assert script.steps == []


def test_an_exception_of_the_model_comes_out():
    def fail(token_id):
        raise RuntimeError("out of memory")

    generator = decode(
        torch.zeros(VOCAB),
        fail,
        prompt_ids=PROMPT,
        tokenizer=TOKENIZER,
        sampling=Sampling(),
        generation_config=GenerationConfig(eos_token_id=EOS),
    )
    next(generator)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(generator)


def test_gradient_mode_is_the_consumers_between_tokens(model):
    generator = start(model, Sampling(max_tokens=3, ignore_eos=True), GenerationConfig(eos_token_id=EOS))
    for _ in generator:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
