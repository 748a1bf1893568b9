"""Tokenizers: one loaded from a folder, or the quickstart's own, made on the spot."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_sat.errors import ConfigError

TAGS = (
    "<|pad|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<python>",
    "</python>",
    "<python_output>",
    "</python_output>",
)
WORDS = ("print(", "get(", "next ", "value ", "error", "\\boxed{", "start ", "then ", "Compute ")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz'()*+-=;:.,{}\\/ \nABCDEFGHIJKLMNOPQRSTUVWXYZ<>_|%\"[]#!?"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}<|assistant|>"
    "{% elif message['role'] == 'tool' %}<python_output>{{ message['content'] }}</python_output>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The built-in character tokenizer for `characters`, else the one in the folder `name`; never a download.

    Raises ConfigError when the folder holds none or it has no chat template.
    """
    if name == "characters":
        return character_tokenizer()
    if not Path(name).is_dir():
        raise ConfigError(f"model.tokenizer {name!r} is neither 'characters' nor a folder with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer {name!r} is a folder without a tokenizer: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.tokenizer {name!r} has no chat template; add one to its folder")
    return tokenizer


def character_tokenizer() -> PreTrainedTokenizerFast:
    """107 tokens: a character each, the chat and tool tags, and a few frequent words."""
    vocabulary = {token: index for index, token in enumerate((*TAGS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        unk_token="?",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
