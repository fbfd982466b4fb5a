"""The demo's model: ordinary PyTorch, which knows nothing of packed batches.

One class serves both ways of batching. Given a padded batch it needs the mask of the padding, as every such
model does; given a packed batch, ``tokens`` is a `PackedTensor` and there is no padding to mask.
"""

import torch
from torch import Tensor, nn


class ReviewClassifier(nn.Module):
    """Word and position embeddings, ``nn.TransformerEncoder``, the mean over the words, a linear head."""

    def __init__(
        self, words: int, max_length: int, *, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(1, max_length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Scores [B, 2] of ``tokens`` [B, n]; ``padding`` [B, n] is true where a padded batch is empty."""
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(_mean_over_words(x, padding))


def _mean_over_words(x: Tensor, padding: Tensor | None) -> Tensor:
    if padding is None:
        return x.mean(1)
    valid = (~padding).unsqueeze(-1)
    return (x * valid).sum(1) / valid.sum(1)
