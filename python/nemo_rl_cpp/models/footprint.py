"""Bytes per token of the buffers that the native core keeps between passes, as listed in csrc/model/workspace.h."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_cpp.models.model_sizes import ModelSizes

KEY_TILE = 32
"""Tokens of a block of the KV cache (csrc/kernels/attention.h)."""
_VOCAB_BLOCK, _ROW_BLOCK, _FUSED_ROWS, _FUSED_LOGITS = 2048, 64, 1024, 56_000_000
"""The LM head computes the logits of up to _FUSED_ROWS rows, at most _FUSED_LOGITS numbers, before their loss is known,
in blocks of _VOCAB_BLOCK columns (csrc/kernels/product_figures.h)."""
_SUM = 4
"""Bytes of a number in the residual stream and in sums of gradients: float32."""


@dataclass(frozen=True)
class Buffers:
    """The bytes per token of the native core's buffers in forward and backward passes. `width`: bytes of a number in
    the run's precision, 2 or 4."""

    sizes: ModelSizes
    width: int

    @property
    def _mixer(self) -> float:
        """Return the bytes per token that a layer's mixer (attention, or a recurrent layer) stores for the backward
        pass, averaged over all layers."""
        s, layers = self.sizes, self.sizes.num_hidden_layers
        query, key_value = s.query_size, s.key_value_size
        gate = query if s.native["output_gate"] else 0
        projections = 2 if s.normalises_heads else 1
        latents = (s.q_lora_rank or query) + s.kv_lora_rank + s.qk_rope_head_dim if s.kv_lora_rank else 0
        stored = projections * (query + 2 * key_value) + gate + query + latents
        attention = self.width * stored + _SUM * s.num_attention_heads
        recurrent = self.width * 2 * (s.convolved + s.recurrent_values) if s.recurrent_layers else 0
        return (attention * s.attention_layers + recurrent * len(s.recurrent_layers)) / layers

    @property
    def layer(self) -> float:
        """Return the bytes per token that a layer stores for its backward pass (csrc/model/layer_activations.h)."""
        s = self.sizes
        inputs = s.native.get("per_layer_input", 0)
        streams = (1 if s.mlp_layers else 2) + s.norms_of_results + (1 if inputs else 0)
        gates = s.mlp_matrices - 1
        columns = self._inner * (len(s.mlp_layers) / s.num_hidden_layers if s.mlp_layers else 1)  # averaged over layers
        stored = gates * self.width * columns + 2 * self.width * inputs
        return self._mixer + stored + streams * (_SUM * s.hidden_size + _SUM)

    @property
    def kept(self) -> float:
        """Return the bytes per token that all layers store for their backward pass (csrc/model/kept_activations.h)."""
        return self.layer * self.sizes.num_hidden_layers + _SUM * self.sizes.hidden_size

    @property
    def _inner(self) -> float:
        """Return the intermediate size of a layer's MLP, or of the experts that process one token, summed."""
        return self.sizes.experts_per_token * self.sizes.intermediate_size + self.sizes.shared_expert_size

    @property
    def _scratch(self) -> float:
        """Return the bytes per token of the buffers that all layers of a forward pass share
        (csrc/model/experts.cpp)."""
        s = self.sizes
        results = (self.width + _SUM) * s.hidden_size if s.norms_of_results else 0
        rows = s.experts_per_token * (self.width + _SUM) * (s.latent_size or s.hidden_size)
        by_expert = rows + _SUM * s.hidden_size * bool(s.shared_expert_size) if s.experts > 1 else 0
        return self.width * (s.hidden_size + self._inner + s.per_layer_inputs) + results + by_expert

    def head(self, scored: float) -> float:
        """Return the bytes per token of the LM head's inputs and their gradients. `scored`: the fraction of the tokens
        for which logits are computed."""
        return scored * self.sizes.hidden_size * (3 * _SUM + self.width)

    def training(self, checkpointing: bool, scored: float) -> float:
        """Return the bytes per token of a forward and a backward pass. `scored`: the fraction of the tokens for which
        logits are computed."""
        s, layers = self.sizes, self.sizes.num_hidden_layers
        stored = self.layer * layers
        if checkpointing:
            stored = self.layer + (layers + 1) * _SUM * s.hidden_size
        return stored + self.backward + self.head(scored)

    @property
    def backward(self) -> float:
        """Return the bytes per token of a backward pass besides stored activations: gradients, and the last layer's
        output."""
        s = self.sizes
        query, key_value = s.query_size, s.key_value_size
        by_expert = s.experts_per_token * (s.latent_size or s.hidden_size) if s.experts > 1 else 0
        columns = s.mlp_matrices * self._inner + by_expert
        mixer = 2 * query + 2 * key_value
        if s.recurrent_layers:  # both results, and the gradients of the convolution and of the projection
            mixer = max(mixer, 2 * s.convolved + 3 * s.recurrent_values)
        streams = 3 * _SUM * s.hidden_size + self.width * (s.hidden_size + mixer)
        return streams + self.width * (columns + s.per_layer_inputs) + self._scratch

    def scoring(self, scored: float) -> float:
        """Return the bytes per token of a forward pass without a backward pass. `scored`: the fraction of the tokens
        for which logits are computed."""
        head = scored * self.sizes.hidden_size * (_SUM + self.width)
        return _SUM * self.sizes.hidden_size + self._mixer + self._scratch + head

    @property
    def prefill(self) -> float:
        """Return the bytes per token of a prefill's forward pass."""
        return 2 * _SUM * self.sizes.hidden_size + self.layer + self._scratch

    def logits(self, rows: float) -> float:
        """Return the peak bytes that the logits of `rows` tokens and their gradients take in training. The LM head
        computes them for a chunk of the tokens at a time."""
        blocks = -(-self.sizes.vocab_size // _VOCAB_BLOCK)
        most = _FUSED_LOGITS // (blocks * _VOCAB_BLOCK) // _ROW_BLOCK * _ROW_BLOCK
        at_once = min(max(_ROW_BLOCK, min(most, _FUSED_ROWS)), rows)
        return at_once * _VOCAB_BLOCK * (_SUM * blocks + self.width)
