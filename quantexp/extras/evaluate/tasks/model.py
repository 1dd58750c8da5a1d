"""A run's model under a precision map, as a model of lm-evaluation-harness (`lm_eval.api.model.TemplateLM`).

Each request is a forward pass by itself, without padding: what a format shares over a whole operand, such as the scale
of a tensor, then depends on no other request. Texts become tokens, and tokens answers, as in the harness's own model
`hf` (`lm_eval/models/huggingface.py`, 0.4.13); a text that is too long loses its beginning.

# T tokens of a request, V tokens of the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from quantexp.errors import ConfigError, DataError
from quantexp.extras.evaluate.tasks.tokens import TaskTokenizer
from quantexp.model.huggingface import GENERATION

#: Tokens that are generated if a task names no number, as with the harness's model `hf`.
_MOST_GENERATED = 256
#: What `generate` of transformers takes into account besides the logits, and the values with which it changes nothing.
_NEUTRAL = {
    "num_beams": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(
        (
            *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
            *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        )
    ),
}
#: Elements of the float64 strips of logits: 32 MiB.
_STRIP = 1 << 22

#: Tokens -> logits, [T, V].
Logits = Callable[[Sequence[int]], Tensor]
#: Context and continuation as text, and the tokens of each.
_Pair = tuple[tuple[str, str], list[int], list[int]]


class SchemeModel(TemplateLM):  # type: ignore[misc]
    """The model under one precision map; counts the requests that were cut."""

    def __init__(
        self,
        logits: Logits,
        tokenizer: TaskTokenizer,
        max_length: int,
        advance: Callable[[], None],
        generation: Mapping[str, Any],
        *,
        score_template: bool = True,
    ) -> None:
        """Take the forward pass of a run.

        Args:
            logits: the forward pass of one sequence of at most max_length tokens.
            tokenizer: of the run's data.
            max_length: tokens of the longest sequence.
            advance: called after each request.
            generation: see `generation_config`; it names the ids that end an answer, besides the tokenizer's.
            score_template: score tokens of the tokenizer's template as `hf` does; else they are context only.
        """
        super().__init__()
        self._logits, self._tokenizer = logits, tokenizer
        self._max_length, self._advance = max_length, advance
        self._generation, self._score_template = generation, score_template
        ends = generation.get("eos_token_id", [])
        self._ends = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        #: Requests whose beginning did not fit.
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: that of the beginning, or without one that of a document's end."""
        bos = self._tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The text's tokens with those of the template, unless add_special_tokens is False.

        None omits them too if the text begins with the token of the beginning.
        """
        first = self._tokenizer.decode([self.prefix_token_id]) or None
        return self._encode(string, first, add_special_tokens)

    def _encode(self, text: str, first: str | None, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(text, first)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and not self._score_template:
            ids = ids[: len(ids) - self._num_last]
        return ids

    @cached_property
    def _num_last(self) -> int:
        """The number of tokens that the template puts after a text."""
        text, whole = (
            self._tokenizer.encode("a", add_special_tokens=each) for each in (False, True)
        )
        first = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return len(whole) - first - len(text)

    def _loglikelihood_tokens(self, requests: list[_Pair], **_: Any) -> list[tuple[float, bool]]:
        results = []
        for _text, context, continuation in requests:
            results.append(self._score(context, continuation))
            self._advance()
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in nats, in windows that predict each token once.

        With `score_template` the template's first token is one of them, as in `hf`.
        """
        results = []
        for request in requests:
            (text,) = request.args
            tokens = self.tok_encode(text, None if self._score_template else False)
            if not self._score_template and tokens[:1] == [self.prefix_token_id]:
                del tokens[0]
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._max_length, 1)
            scores = [self._score(*make_disjoint_window(window)) for window in windows]
            results.append(sum(score for score, _ in scores))
            self._advance()
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, the likeliest token each time.

        Raises:
            ConfigError: the task draws its tokens at random.
        """
        results = []
        for request in requests:
            context, options = request.args
            results.append(self._written(request.task_name or "", context, options))
            self._advance()
        return results

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-likelihood of a continuation in nats, and whether each of its tokens is the likeliest.

        Raises:
            DataError: the continuation has no token.
            ConfigError: it has more than a sequence.
        """
        if not continuation:
            raise DataError(
                "evaluate.tasks: an answer has no token of its own, so that it has no score; correct the task, or take "
                "another tokenizer"
            )
        if len(continuation) > self._max_length:
            raise _too_short(self._max_length, f"{len(continuation):,}")
        tokens = [*context, *continuation]
        self.cut += len(tokens) - 1 > self._max_length
        taken = tokens[-self._max_length - 1 :]
        logits_TV = self._logits(taken[:-1])[-len(continuation) :]
        labels = torch.tensor(continuation, device=logits_TV.device)
        rows = max(1, _STRIP // logits_TV.shape[-1])
        score, is_greedy = 0.0, True
        strips = (torch.split(x, rows) for x in (logits_TV, labels))
        for strip, own in zip(*strips, strict=True):
            log_p = strip.to(torch.float64).log_softmax(-1)
            score += float(log_p.gather(-1, own.unsqueeze(-1)).sum())
            is_greedy = is_greedy and bool((strip.argmax(-1) == own).all())
        return score, is_greedy

    def _written(self, task: str, context: str, options: dict[str, Any]) -> str:
        stops, most = generation_of(task, options, self._max_length, self._generation)
        stops = handle_stop_sequences(stops, self._tokenizer.decode([self.eot_token_id]) or None)
        encoded = self._encode(context, self._tokenizer.bos_token, None)
        self.cut += len(encoded) + most > self._max_length
        tokens = encoded[-(self._max_length - most) :] or [self.prefix_token_id]
        # As `hf`: a stop counts if it is in the text of the last tokens, as many as its own and two.
        lengths = [
            len(self._tokenizer.encode(stop, add_special_tokens=False)) + 2 for stop in stops
        ]
        written: list[int] = []
        while len(written) < most:
            written.append(int(self._logits([*tokens, *written])[-1].argmax()))
            if written[-1] in self._ends or any(
                stop in self._tokenizer.decode(written[-length:])
                for stop, length in zip(stops, lengths, strict=True)
            ):
                break
        text = self._tokenizer.decode(written, skip_special_tokens=True)
        return str(postprocess_generated_text(text, stops, None))


def generation_of(
    task: str, options: dict[str, Any], max_length: int, generation: Mapping[str, Any]
) -> tuple[list[str], int]:
    """The stops of a task's answers, and the most tokens of one, by the harness's rules.

    Raises:
        ConfigError: the task, or the generation of the weights, takes other tokens than the likeliest ones, or the
            task's answers do not fit a sequence.
    """
    known = normalize_gen_kwargs(options, _MOST_GENERATED)
    if known["do_sample"] and known["temperature"] != 0:
        raise ConfigError(
            f"evaluate.tasks: {task} draws its answers at random (do_sample), and only the likeliest token is "
            "taken here; set do_sample: false in a copy of the task"
        )
    for key, neutral in _NEUTRAL.items():
        if (value := options.get(key, generation.get(key))) not in (None, neutral):
            file = "the task" if key in options else f"the weights with another {GENERATION}"
            raise ConfigError(
                f"evaluate.tasks: {key}={value} changes which tokens {task} writes, and only the likeliest token is "
                f"taken here; drop it in a copy of {file}"
            )
    most = int(known["max_gen_toks"])
    if most >= max_length:
        raise _too_short(max_length, f"up to {most:,}")
    return list(known["until"]), most


def _too_short(max_length: int, tokens: str) -> ConfigError:
    return ConfigError(
        f"training.seq_length={max_length} is too short for an answer of {tokens} tokens; set a larger one"
    )
