"""Between messages and tokens: a prompt, the bridge from one turn to the next, and the text of a turn.

An episode's tokens are append-only: what was sampled is never decoded and encoded again. Only what the
environment says is tokenised, as the difference the chat template makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from agent_sat.errors import ConfigError
from agent_sat.types import IntArray

Message = dict[str, str]
Render = Callable[[list[Message], bool], list[int]]  # (messages, add_generation_prompt) -> token ids


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Chat:
    """One model's chat format.

    `stop` names tokens that end a turn besides the end-of-sequence token, which alone is hidden from the
    environment. Raises ConfigError when a stop token is unknown or the template rewrites an earlier turn.
    """

    def __init__(self, tokenizer: ChatTokenizer, render: Render, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.render = render
        self.end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids = tuple(dict.fromkeys((*self.end_ids, *(self._token_id(token) for token in stop))))
        self._num_before_joint = self._find_joint()
        self._after_turn = lru_cache(maxsize=4096)(self._render_after_turn)

    def prompt(self, text: str) -> IntArray:
        """The first turn's prompt: the user's message and the opening of the answer."""
        return np.asarray(self.render([{"role": "user", "content": text}], True), np.int32)

    def bridge(self, sampled_ids: IntArray, observation: str) -> IntArray:
        """What stands between a sampled turn and the next: its closing tokens, the tool's message, an opening.

        The closing token is left out if the model sampled it itself.
        """
        after = self._after_turn(observation)
        if len(sampled_ids) and after[0] == sampled_ids[-1] and after[0] in self.stop_ids:
            after = after[1:]
        return np.asarray(after, np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """The text the environment sees: tags included, without the end-of-sequence token."""
        ids = token_ids.tolist()
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _render_after_turn(self, observation: str) -> tuple[int, ...]:
        return tuple(self._render_joint("0", observation)[self._num_before_joint :])

    def _render_joint(self, answer: str, observation: str) -> list[int]:
        messages = [
            {"role": "user", "content": "0"},
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": observation},
        ]
        return self.render(messages, True)

    def _find_joint(self) -> int:
        """How many tokens come before the end of the assistant's words: found by changing those words."""
        one, other = self._render_joint("0", "0"), self._render_joint("1", "0")
        common = next(
            (i for i, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b), 0
        )
        if common == 0:
            raise ConfigError("the chat template hides the assistant's message before a tool message")
        return len(one) - common

    def _token_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == getattr(self.tokenizer, "unk_token_id", None):
            raise ConfigError(f"rollout.stop: {token!r} is not one token of this tokenizer")
        return token_id


def chat_of(tokenizer, stop: Sequence[str] = ()) -> Chat:  # noqa: ANN001 - a transformers tokenizer
    """The chat format of a transformers tokenizer with a chat template."""

    def render(messages: list[Message], add_generation_prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )

    return Chat(tokenizer, render, stop)
