"""A run's model under a precision map, as a model of lm-evaluation-harness (`lm_eval.api.model.TemplateLM`).

Each request is a forward pass by itself, without padding: what a format shares over a whole operand, such as the scale
of a tensor, then depends on no other request. Texts become tokens as with the harness's own model `hf`: what the
tokenizer puts before a text comes first, and a text that is too long loses its beginning.

# T tokens of a request, V tokens of the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import ConfigError

#: Tokens that are generated if a task names no number, as with the harness's model `hf`.
_MOST_GENERATED = 256
#: Elements of the float64 strips of logits: 32 MiB.
_STRIP = 1 << 22

#: Tokens -> logits, [T, V].
Logits = Callable[[Sequence[int]], Tensor]
#: Context and continuation as text, and the tokens of each.
_Pair = tuple[tuple[str, str], list[int], list[int]]


class SchemeModel(TemplateLM):  # type: ignore[misc]
    """The model under one precision map; counts the requests that were cut."""

    def __init__(
        self, logits: Logits, tokenizer: Tokenizer, max_length: int, advance: Callable[[], None]
    ) -> None:
        """Take the forward pass of a run.

        Args:
            logits: the forward pass of one sequence of at most max_length tokens.
            tokenizer: of the run's data.
            max_length: tokens of the longest sequence.
            advance: called after each request.
        """
        super().__init__()
        self._logits, self._tokenizer = logits, tokenizer
        self._max_length, self._advance = max_length, advance
        self._prefix = tokenizer.prefix
        #: Requests whose beginning did not fit.
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the tokenizer's first token, or the end of a document."""
        return next(iter(self._prefix), self.eot_token_id)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The text's tokens; after what the tokenizer puts before a text, unless add_special_tokens is False."""
        prefix = [] if add_special_tokens is False else list(self._prefix)
        return [*prefix, *self._tokenizer.tokenize(string)]

    def _loglikelihood_tokens(self, requests: list[_Pair], **_: Any) -> list[tuple[float, bool]]:
        results = []
        for _text, context, continuation in requests:
            results.append(self._score(context, continuation))
            self._advance()
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in nats, in windows that predict each token once."""
        results = []
        for request in requests:
            (text,) = request.args
            tokens = self._tokenizer.tokenize(text)
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
        """The log-likelihood of a continuation in nats, and whether each of its tokens is the likeliest."""
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
        stops, most = generation_of(task, options, self._max_length)
        encoded = self.tok_encode(context)
        self.cut += len(encoded) + most > self._max_length
        tokens = encoded[-(self._max_length - most) :] or [self.prefix_token_id]
        first = len(tokens)
        text = ""
        while len(tokens) - first < most:
            known = self._logits(tokens)[-1, : self._tokenizer.vocab_size]
            token = int(known.argmax())
            if token == self.eot_token_id:
                break
            tokens.append(token)
            text = self._tokenizer.detokenize(tokens[first:])
            ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
            if ends:
                return text[: min(ends)]
        return text


def generation_of(task: str, options: dict[str, Any], max_length: int) -> tuple[list[str], int]:
    """The stops of a task's answers, and the most tokens of one, by the harness's rules.

    Raises:
        ConfigError: the task draws its tokens at random, or its answers do not fit a sequence.
    """
    known = normalize_gen_kwargs(options, _MOST_GENERATED)
    if known["do_sample"] and known["temperature"] != 0:
        raise ConfigError(
            f"evaluate.tasks: {task} draws its answers at random (do_sample), and only the likeliest token is "
            "taken here; set do_sample: false in a copy of the task"
        )
    most = int(known["max_gen_toks"])
    if most >= max_length:
        raise _too_short(max_length, f"up to {most:,}")
    return list(known["until"]), most


def _too_short(max_length: int, tokens: str) -> ConfigError:
    return ConfigError(
        f"training.seq_length={max_length} is too short for an answer of {tokens} tokens; set a larger one"
    )
