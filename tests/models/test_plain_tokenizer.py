"""The plain form of a tokenizer does what transformers' own does: encodes, decodes and renders alike, also in another process."""

import pickle

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from moerl.config.derive.scratch_config import CHAT_TEMPLATE
from moerl.models.plain_tokenizer import PlainTokenizer
from moerl.models.transformers_tokenizer import plain_form
from moerl.scratch_model import character_tokenizer

TEXTS = (
    "",
    "a",
    "3+4=7",
    "Hello , world ! It 's n't\n\n  two  spaces",
    "<|im_start|>user\nhi<|im_end|>",
    "naïve 北京 \U0001f600",
    "x" * 300,
)
MESSAGES = (
    [{"role": "user", "content": "7"}],
    [{"role": "system", "content": "Be <brief> & 'exact'."}, {"role": "user", "content": "naïve 北京?"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
)
RICH = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {% generation %}<|{{ message.role }}|>{{ message.content | trim }}{% endgeneration %}
    {{- {'b': message.content, 'a': [1, 2]} | tojson }}{{ message | tojson(indent=2) }}
{% endfor %}{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}
{% if add_generation_prompt %}<|assistant|>{{ strftime_now('%Y') }}{% endif %}"""
REFUSING = "{% if messages[0].role != 'system' %}{{ raise_exception('begin with the system') }}{% endif %}{{ eos_token }}"


def byte_level(**options):
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)


def word_level(**options):
    backend = Tokenizer(models.WordPiece({"<unk>": 0, "hello": 1, ",": 2, "world": 3, "!": 4, "##s": 5, "'": 6}, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="!", **options)


KINDS = {
    "characters": lambda: character_tokenizer(64),
    "bytes": lambda: byte_level(chat_template=RICH),
    "bytes, special tokens split": lambda: byte_level(split_special_tokens=True, chat_template=CHAT_TEMPLATE),
    "bytes, clean up": lambda: byte_level(clean_up_tokenization_spaces=True),
    "words": lambda: word_level(clean_up_tokenization_spaces=True),
    "words as they are": lambda: word_level(clean_up_tokenization_spaces=False, chat_template=[{"name": "default", "template": RICH}]),
}


@pytest.fixture(params=KINDS)
def pair(request):
    theirs = KINDS[request.param]()
    return theirs, pickle.loads(pickle.dumps(PlainTokenizer(plain_form(theirs))))


def test_texts_become_the_same_tokens_and_tokens_the_same_texts(pair):
    theirs, plain = pair
    for text in (*TEXTS, "hello , worlds !", theirs.eos_token, f"a{theirs.eos_token}b"):
        ids = theirs.encode(text, add_special_tokens=False, verbose=False)
        assert plain.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert plain.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert plain.eos_token_id == theirs.eos_token_id


def test_conversations_are_rendered_the_same(pair):
    theirs, plain = pair
    assert bool(plain.chat_template) == bool(theirs.chat_template)
    if theirs.chat_template:
        for messages in MESSAGES:
            for prompts in (True, False):
                expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts)
                assert plain.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompts) == expected


def test_a_template_refuses_in_the_same_words():
    theirs = byte_level(chat_template=REFUSING)
    plain = PlainTokenizer(plain_form(theirs))
    for tokenizer in (theirs, plain):
        with pytest.raises(TemplateError, match="begin with the system"):
            tokenizer.apply_chat_template(MESSAGES[0], tokenize=False, add_generation_prompt=True)
    assert plain.apply_chat_template(MESSAGES[1], tokenize=False, add_generation_prompt=True) == "</s>"


def test_templates_for_other_ends_than_chats_are_none():
    form = plain_form(byte_level(chat_template=[{"name": "rag", "template": RICH}]))
    assert form is not None and form.chat_template is None


def test_a_tokenizer_with_methods_of_its_own_has_no_plain_form():
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    theirs = character_tokenizer(64)
    assert plain_form(theirs) is not None
    assert plain_form(Own(tokenizer_object=theirs.backend_tokenizer)) is None
