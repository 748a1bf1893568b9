"""Between messages and tokens: a prompt, the bridge from one turn to the next, and the text of a turn.

An episode's tokens are append-only: what was sampled is never decoded and encoded again. Of what the
environment says, only the words are tokenised, and tags in them stay plain text: a tool's output cannot
close its own envelope.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from agent_sat.errors import ConfigError
from agent_sat.types import IntArray

Message = dict[str, str]
Render = Callable[[list[Message], bool], list[int]]  # (messages, add_generation_prompt) -> token ids
Encode = Callable[[str], list[int]]  # plain text -> token ids, tags not recognised


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Chat:
    """One model's chat format.

    `stop` names tokens that end a turn besides the end-of-sequence token, which alone is hidden from the
    environment. Raises ConfigError when a stop token is unknown or the template hides the assistant's turn.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, render: Render, encode: Encode, stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.render = render
        self.encode = encode
        self.end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids = tuple(dict.fromkeys((*self.end_ids, *(self._token_id(token) for token in stop))))
        self._before, self._after = self._find_envelope()

    def prompt(self, text: str) -> IntArray:
        """The first turn's prompt: the user's message and the opening of the answer."""
        return np.asarray(self.render([{"role": "user", "content": text}], True), np.int32)

    def bridge(self, sampled_ids: IntArray, observation: str) -> IntArray:
        """What stands between a sampled turn and the next: its closing tokens, the tool's message, an opening.

        The closing token is left out if the model sampled it itself.
        """
        between = [*self._before, *self.encode(observation), *self._after]
        if len(sampled_ids) and between[0] == sampled_ids[-1] and between[0] in self.stop_ids:
            between = between[1:]
        return np.asarray(between, np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """The text the environment sees: tags included, without the end-of-sequence token."""
        ids = token_ids.tolist()
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _find_envelope(self) -> tuple[list[int], list[int]]:
        """The tokens between the assistant's words and the tool's, and those after the tool's: found by changing
        the words of each and looking at what stays.
        """
        one, other = self._joint("0", "0"), self._joint("1", "0")
        num_same = common_prefix(one[::-1], other[::-1])
        if num_same == 0 or num_same == len(one):
            raise ConfigError("the chat template hides the assistant's message before a tool message")
        after_turn = one[len(one) - num_same :]
        other = self._joint("0", "1")[len(one) - num_same :]
        num_before = common_prefix(after_turn, other)
        num_after = common_prefix(after_turn[::-1], other[::-1])
        if num_before == len(after_turn):
            raise ConfigError("the chat template hides the tool's message")
        return after_turn[:num_before], after_turn[len(after_turn) - num_after :]

    def _joint(self, answer: str, observation: str) -> list[int]:
        messages = [
            {"role": "user", "content": "0"},
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": observation},
        ]
        return self.render(messages, True)

    def _token_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == getattr(self.tokenizer, "unk_token_id", None):
            raise ConfigError(f"rollout.stop: {token!r} is not one token of this tokenizer")
        return token_id


def common_prefix(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def chat_of(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> Chat:
    """The chat format of a transformers tokenizer with a chat template."""

    def render(messages: list[Message], add_generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )  # type: ignore[return-value]

    plain = copy.deepcopy(tokenizer)  # one of its own: changing a tokenizer's mind about tags is slow

    def encode(text: str) -> list[int]:
        return plain(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]  # type: ignore[return-value]

    return Chat(tokenizer, render, encode, stop)  # type: ignore[arg-type]
