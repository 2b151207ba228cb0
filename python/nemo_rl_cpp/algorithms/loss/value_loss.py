"""MseValueLossFn: the critic's loss over the native op."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl_cpp import ops
from nemo_rl_cpp.algorithms._config import as_model
from nemo_rl_cpp.algorithms.loss.clipped_pg import NativeGradient
from nemo_rl_cpp.algorithms.loss.interfaces import LossInputType, LossType
from nemo_rl_cpp.config.loss import MseValueLossConfig


class MseValueLossFn:
    """Squared error of value predictions, clipped around the old ones when `cliprange` is set (PPO).

    data: token_mask, returns and (with a cliprange) values [B, S]; sample_mask [B]. No column is shifted here.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __init__(self, cfg: MseValueLossConfig):
        cfg = as_model(cfg, MseValueLossConfig)
        self.cfg = cfg
        self.scale = cfg.scale
        self.cliprange = cfg.cliprange
        self.loss_type = LossType.TOKEN_LEVEL

    def native(
        self,
        values: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor | float | None,
        global_valid_toks: Tensor | float | None,
    ) -> ops.ValueLossResult:
        """Loss, gradient with respect to `values` [B, S], metrics and the first non-finite (sample, token)."""
        clipping = bool(self.cliprange and self.cliprange > 0)
        result = ops.mse_value_loss(
            values.detach(),
            returns=data["returns"],
            token_mask=data["token_mask"],
            sample_mask=data["sample_mask"],
            old_values=data["values"] if clipping else None,
            global_valid_toks=global_valid_toks,
            scale=self.scale,
            cliprange=self.cliprange,
        )
        result.metrics["num_valid_samples"] = int(values.shape[0])
        return result

    def __call__(
        self, logits: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics) for value predictions [B, S] or [B, S, 1]; differentiable in them."""
        values = logits.squeeze(-1) if logits.ndim > 2 and logits.shape[-1] == 1 else logits
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        result = self.native(values, data, global_valid_seqs, global_valid_toks)
        if not torch.is_grad_enabled():
            return result.loss, result.metrics
        return NativeGradient.apply(result.loss, values, result.grad_values), result.metrics
