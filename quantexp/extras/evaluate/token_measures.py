"""What two outputs of one model say about the same tokens: losses, top tokens, divergence; summed by document.

# B sequences, T tokens, V rows of the padded vocabulary, M measures
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

#: Elements of the float64 strips in which the logits are compared: 32 MiB.
_STRIP = 1 << 22


class TokenMeasure(IntEnum):
    """A number for each token; its value is the place among them."""

    #: 1 for each token that counts.
    TOKENS = 0
    #: -log p(label), nats.
    LOSS = 1
    #: The same in the reference.
    REFERENCE_LOSS = 2
    #: 1 where the largest logit is the label's.
    CORRECT = 3
    REFERENCE_CORRECT = 4
    #: 1 where both have the same largest logit.
    SAME_TOP = 5
    #: sum p_reference (log p_reference - log p), nats.
    DIVERGENCE = 6


NUM_MEASURES = len(TokenMeasure)


@torch.no_grad()
def token_measures(reference_BTV: Tensor, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Each measure of each token, float64 [M, B, T].

    Logits are compared in float64, so a divergence is exact to about 1e-15; logits in 16 bits are taken as they are.
    Of equal largest logits the first counts as the top. A logit of NaN gives NaN in losses and divergence.
    """
    reference, logits = reference_BTV.flatten(0, 1), logits_BTV.flatten(0, 1)
    labels = labels_BT.reshape(-1)
    rows = max(1, _STRIP // reference.shape[-1])
    strips = [
        _of_rows(*each)
        for each in zip(*(torch.split(x, rows) for x in (reference, logits, labels)), strict=True)
    ]
    return torch.cat(strips, dim=1).view(NUM_MEASURES, *labels_BT.shape)


def _of_rows(reference: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    log_p, log_q = (x.to(torch.float64).log_softmax(-1) for x in (reference, logits))
    at = labels.unsqueeze(-1)
    top_p, top_q = reference.argmax(-1), logits.argmax(-1)
    divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True)
    measures = {
        TokenMeasure.TOKENS: torch.ones_like(labels),
        TokenMeasure.LOSS: -log_q.gather(-1, at).squeeze(-1),
        TokenMeasure.REFERENCE_LOSS: -log_p.gather(-1, at).squeeze(-1),
        TokenMeasure.CORRECT: top_q == labels,
        TokenMeasure.REFERENCE_CORRECT: top_p == labels,
        TokenMeasure.SAME_TOP: top_p == top_q,
        TokenMeasure.DIVERGENCE: divergence.sum(-1),
    }
    return torch.stack([measures[each].to(torch.float64) for each in TokenMeasure])


class DocumentSums:
    """The sums of measures over the tokens of each document, for several maps."""

    def __init__(self, num_maps: int) -> None:
        self._num_maps = num_maps
        #: Document -> float64 [maps, M].
        self.sums: dict[int, Tensor] = {}

    def add(self, index: int, measures: Tensor, mask_BT: Tensor, documents_BT: Tensor) -> None:
        """Add the unmasked tokens of a micro-batch under the map with this index; `measures` is [M, B, T]."""
        chosen = mask_BT.reshape(-1) != 0
        documents, places = torch.unique(documents_BT.reshape(-1)[chosen], return_inverse=True)
        sums = measures.new_zeros(NUM_MEASURES, len(documents))
        sums.index_add_(1, places, measures.flatten(1)[:, chosen])
        for document, column in zip(documents.tolist(), sums.cpu().T, strict=True):
            kept = self.sums.setdefault(
                document, torch.zeros(self._num_maps, NUM_MEASURES, dtype=torch.float64)
            )
            kept[index] += column

    def include(self, other: Mapping[int, Tensor]) -> None:
        """Add the sums of another rank."""
        for document, sums in other.items():
            if document in self.sums:
                self.sums[document] = self.sums[document] + sums
            else:
                self.sums[document] = sums

    def table(self) -> tuple[list[int], Tensor]:
        """The documents in ascending order, and their sums, float64 [documents, maps, M]."""
        documents = sorted(self.sums)
        if not documents:
            return [], torch.zeros(0, self._num_maps, NUM_MEASURES, dtype=torch.float64)
        return documents, torch.stack([self.sums[each] for each in documents])
