"""Converts between the messages of Tinker's SDK and tensors."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB
from torch import Tensor

from nemo_rl_cpp.tinker.adapters import Base, Datum
from nemo_rl_cpp.tinker.errors import UserError
from nemo_rl_cpp.tinker.worker import Sampled

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
_TEXT_ONLY = "holds something else than tokens: images and audio are not here"


def prompt_of(prompt: types.ModelInput) -> list[int]:
    """Return the tokens of a prompt."""
    try:
        return prompt.to_ints()
    except ValueError:
        raise UserError(f"the prompt {_TEXT_ONLY}") from None


def data_of(request: pb.ForwardBackwardRequest, base: Base, needed: Sequence[str], known: Sequence[str]) -> list[Datum]:
    """Read the data of a forward pass.

    Args:
        needed: the inputs that each datum must have in addition to target_tokens.
        known: the inputs that it may have.
    """
    if not request.data:
        raise UserError("the request has no datum")
    return [_datum(number, datum, base, needed, known) for number, datum in enumerate(request.data)]


def _datum(number: int, datum: pb.Datum, base: Base, needed: Sequence[str], known: Sequence[str]) -> Datum:
    here = f"datum {number}"
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError(f"{here} {_TEXT_ONLY}")
        tokens += np.frombuffer(_whole(chunk.encoded_text.tokens, 4, here), np.int32).tolist()
    base.check_tokens(tokens, here, room=1)
    given = dict(datum.loss_fn_inputs)
    for name in ("target_tokens", *needed):
        if name not in given:
            raise UserError(f"{here} has no {name} in loss_fn_inputs")
    for name in given:
        if name not in ("target_tokens", *needed, *known):
            raise UserError(f"{here} has {name} in loss_fn_inputs, which this loss does not read")
    arrays = {name: _array(tensor, f"{here}: {name}", len(tokens)) for name, tensor in given.items()}
    targets = arrays.pop("target_tokens").tolist()
    base.check_tokens(targets, f"target_tokens of {here}")
    if targets[:-1] != tokens[1:]:
        raise UserError(
            f"{here}: target_tokens are not the input's tokens moved by one, and other targets are not here"
        )
    inputs = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    return Datum([*tokens, targets[-1]], inputs)


def _array(tensor: pb.Tensor, what: str, length: int) -> np.ndarray:
    if tensor.dtype not in _DTYPES or not tensor.HasField("dense"):
        raise UserError(f"{what} is no dense tensor of float32 or int64")
    if len(tensor.shape) > 1:
        raise UserError(f"{what} has {len(tensor.shape)} dimensions, and only one target a token is here")
    dtype = np.dtype(_DTYPES[tensor.dtype])
    array = np.frombuffer(_whole(tensor.dense, dtype.itemsize, what), dtype)
    if len(array) != length:
        raise UserError(f"{what} has {len(array)} elements, the input {length} tokens")
    return array


def _whole(data: bytes, size: int, what: str) -> bytes:
    if len(data) % size:
        raise UserError(f"{what}: {len(data)} bytes are no whole number of elements")
    return data


def config_of(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return `loss_fn_config`."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {k: getattr(v, v.WhichOneof("value") or "number") for k, v in request.loss_fn_config_v2.items()}


def forward_output(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a serialized ForwardBackwardOutput with the log-probabilities of each datum."""
    offsets = np.cumsum([0] + [4 * len(row) for row in logprobs]).astype(np.int64)
    data = torch.cat(list(logprobs)).numpy().astype(np.float32).tobytes()
    field = pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(logprobs))
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return output.SerializeToString()


def sample_response(
    samples: Sequence[Sampled], stopped: Sequence[int], prompt_logprobs: Tensor | None, likeliest: tuple[Tensor, Tensor] | None, k: int
) -> bytes:  # fmt: skip
    """Return a serialized SampleResponse.

    Args:
        stopped: the reasons of samples that ended before the length limit.
        likeliest: tokens [P - 1, k'] and their log-probabilities, at each position of the prompt except the first.
        k: the number of likeliest tokens returned per sampled token.
    """
    response = pb.SampleResponse()
    for sample in samples:
        reason = pb.STOP_REASON_STOP if sample.reason in stopped else pb.STOP_REASON_LENGTH
        message = response.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(sample.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
        )
        if k:
            message.topk_sampled_logprobs.CopyFrom(_top(sample.likeliest, k))
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.numpy().astype(np.float32).tobytes()
    if likeliest is not None:
        rows = [tuple(zip(*row)) for row in zip(likeliest[0].tolist(), likeliest[1].tolist())]
        response.topk_prompt_logprobs.CopyFrom(_top([(), *rows], likeliest[0].shape[1]))
    return response.SerializeToString()


def _top(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> pb.TopkLogprobs:
    tokens, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), MASK_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            tokens[place, column], logprobs[place, column] = token, logprob
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))
