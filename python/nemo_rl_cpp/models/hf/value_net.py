"""A critic on any architecture of transformers: its layers, and one number a token."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from nemo_rl_cpp.models.sources import ModelFolderError
from nemo_rl_cpp.models.weight_files import raw_tensors, weight_files

SCORE = "score.weight"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ValueNet(nn.Module):
    """V = score · h, h [..., D] the last hidden states (behind the final norm). The head starts at zero, as the native critic's.

    Attributes:
        backbone: transformers' AutoModel.
        score: linear, D -> 1 without bias, as in transformers' `...ForSequenceClassification` with one label.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    @classmethod
    def of(cls, backbone: nn.Module, folder: Path | None) -> Self:
        """With the head of `folder`, where it has one with one label. ModelFolderError where its width is another."""
        made = cls(backbone)
        for name, raw in () if folder is None else raw_tensors(weight_files(folder)):
            if name != SCORE:
                continue
            if tuple(raw.shape) != tuple(made.score.weight.shape):
                raise ModelFolderError(
                    f"{folder}: {SCORE} has the shape {list(raw.shape)}, but a critic's is {list(made.score.weight.shape)} (one label)"
                )
            with torch.no_grad():  # the bytes are there for this turn only
                made.score.weight.copy_(torch.frombuffer(bytearray(raw.data), dtype=_DTYPES[raw.dtype]).view(raw.shape))
        return made

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def forward(self, row: Tensor, column: Tensor, **inputs: object) -> Tensor:
        """One pass over the backbone's `inputs` of b rows; [W, 1], the values at the places (row, column), W of each."""
        hidden = self.backbone(**inputs).last_hidden_state
        return self.score(hidden[row, column])
