"""A training step of a transformers model, as peers take it. It needs torch alone, because peers run in separate
environments."""

import torch
from training_samples import Layout, PeerBatch, Samples, padded

CHUNK = 256


def full_loss(model, batch: PeerBatch) -> torch.Tensor:
    """Return -sum(logprobs), from the logits of all tokens from the first trained one on."""
    first = int(batch.trained.any(0).nonzero()[0])
    logits = model(
        batch.input_ids, logits_to_keep=batch.input_ids.shape[1] - first + 1, use_cache=False, **batch.options
    ).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch.input_ids[:, first:, None])[..., 0]
    return -logprobs[batch.trained[:, first:]].sum()


def chunked_loss(model, batch: PeerBatch) -> torch.Tensor:
    """Return -sum(logprobs), from the logits of 256 trained tokens at a time, which the backward pass recomputes."""
    from torch.utils.checkpoint import checkpoint

    def chunk(hidden, targets):
        return torch.log_softmax(model.lm_head(hidden).float(), -1).gather(-1, targets[:, None]).sum()

    wanted = batch.trained[:, 1:]
    hidden = model.model(batch.input_ids, use_cache=False, **batch.options).last_hidden_state[:, :-1][wanted]
    parts = zip(hidden.split(CHUNK), batch.input_ids[:, 1:][wanted].split(CHUNK), strict=True)
    return -sum(checkpoint(chunk, h, t, use_reentrant=False) for h, t in parts)


def peer_step(model, precision: str, loss_of=full_loss, layout: Layout = padded):
    """Return a function that takes a step of a transformers model on samples and returns the gradient norm."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.01, fused=True)

    def run(samples: Samples) -> float:
        optimizer.zero_grad()
        for batch in layout(samples):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = loss_of(model, batch) / samples.trained.sum()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(norm)

    return run
