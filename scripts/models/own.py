"""Plain PyTorch models, as people write them, and factories around transformers'."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SentenceEncoder(nn.Module):
    """BERT, the mean over real tokens, unit length."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        hidden_BSD = self.encoder(input_ids, attention_mask)[0]
        mask_BS1 = attention_mask.unsqueeze(-1).to(hidden_BSD.dtype)
        mean_BD = (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1).clamp(min=1e-9)
        return F.normalize(mean_BD, dim=-1)


def whisper_encoder() -> nn.Module:
    """The encoder of Whisper by itself."""
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=128,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    return WhisperModel(config).encoder


class LSTMTagger(nn.Module):
    """Embedding, two bidirectional LSTM layers, a tag for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden_BSD, _ = self.lstm(self.embedding(ids))
        return self.head(hidden_BSD)


class GRUEncoder(nn.Module):
    """A GRU's last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, last_1BD = self.gru(x)
        return last_1BD[0]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels down and up, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = (
            _block(3, 8),
            _block(8, 16),
            _block(16, 32),
        )
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.third, self.fourth = _block(32, 16), _block(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(self.pool(first))
        bottom = self.bottom(self.pool(second))
        up = self.third(torch.cat((second, self.up(bottom)), 1))
        up = F.interpolate(up, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.fourth(torch.cat((first, up), 1)))


class TabularMLP(nn.Sequential):
    """Linear, BatchNorm, ReLU, Dropout, twice."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Translator(nn.Module):
    """torch.nn.Transformer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=True)


class PaddedEncoder(nn.Module):
    """torch.nn.TransformerEncoder as it is made by default, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class SelfAttention(nn.Module):
    """torch.nn.MultiheadAttention with a padding mask, and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(
        self, x: torch.Tensor, padding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A row that is padding throughout would have no key to look at.
        padding = padding & (torch.arange(x.shape[1], device=x.device) > 0)
        mixed, weights = self.attention(x, x, x, key_padding_mask=padding)
        return self.norm(x + mixed), weights


class Recommender(nn.Module):
    """DLRM: dense features and embedding bags, and all their products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(50, 16, mode="sum") for _ in range(2)
        )
        self.top = nn.Sequential(nn.Linear(19, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, bags: list[torch.Tensor]) -> torch.Tensor:
        dense_BD = self.bottom(dense)
        bags_BD = [table(ids) for table, ids in zip(self.tables, bags, strict=True)]
        all_BFD = torch.stack([dense_BD, *bags_BD], 1)
        products_BFF = all_BFD @ all_BFD.transpose(1, 2)
        row, column = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat((dense_BD, products_BFF[:, row, column]), 1))


class CachedDecoder(nn.Module):
    """Two layers of attention; keys and values are in lists that the caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(
        self, x: torch.Tensor, past: list[list[torch.Tensor]]
    ) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        present = []
        for project, (keys, values) in zip(self.projections, past, strict=True):
            query, key, value = project(x).chunk(3, -1)
            keys, values = torch.cat((keys, key), 1), torch.cat((values, value), 1)
            present.append([keys, values])
            heads = (
                t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (query, keys, values)
            )
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x, present


class Int8Linear(nn.Module):
    """Weights as int8 buffers, a scale for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs)
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias


class Int8MLP(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Int8Linear(32, 64), Int8Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))
