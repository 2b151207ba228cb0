"""Converts between the messages of Tinker's SDK and this package's types."""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB
from torch import Tensor

from nemo_rl_cpp.tinker.types import Datum, ForwardBackwardOutput, SampleRequest, SampleResponse, UserError, tokens_of

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


def sample_request_of(request: types.SampleRequest) -> SampleRequest:
    """Convert the SDK's request for samples. Raise UserError for an option that is not supported."""
    for unknown in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(request, unknown):
            raise UserError(f"{unknown} is not here: leave it out")
    return SampleRequest(
        tokens_of(request.prompt, "the prompt"), request.num_samples, request.sampling_params, bool(request.prompt_logprobs),
        request.prompt_logprobs_last_n, request.topk_prompt_logprobs, request.topk_sample_logprobs,
    )  # fmt: skip


def data_of(request: pb.ForwardBackwardRequest) -> list[Datum]:
    """Return the training data in a request for a forward pass."""
    data = []
    for number, datum in enumerate(request.data):
        here, tokens = f"datum {number}", []
        for chunk in datum.model_input:
            if not chunk.HasField("encoded_text"):
                raise UserError(f"{here} holds something else than tokens: images and audio are not here")
            tokens += _numbers(chunk.encoded_text.tokens, np.int32, here).tolist()
        inputs = {name: _tensor(given, f"{here}: {name}") for name, given in datum.loss_fn_inputs.items()}
        data.append(Datum(tokens, inputs))
    return data


def _tensor(tensor: pb.Tensor, what: str) -> Tensor:
    """Return a tensor with one or two dimensions. Elements missing from a sparse tensor are 0."""
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{what} is no tensor of float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    if tensor.HasField("dense"):
        values = torch.from_numpy(_numbers(tensor.dense, dtype, what).copy())
        if shape and (min(shape) < 0 or math.prod(shape) != len(values)):
            raise UserError(f"{what} has {len(values)} elements, expected those of the shape {shape}")
        return values.view(shape or [len(values)])
    if not tensor.HasField("sparse_csr") or len(shape) != 2:
        raise UserError(f"{what} is neither a dense tensor nor a sparse matrix")
    csr = tensor.sparse_csr
    parts = [_numbers(data, kind, what) for data, kind in (
        (csr.crow_indices, np.int64), (csr.col_indices, np.int64), (csr.values, dtype)
    )]  # fmt: skip
    try:
        return torch.sparse_csr_tensor(
            *(torch.from_numpy(part.copy()) for part in parts), size=shape, check_invariants=True
        )
    except RuntimeError:
        raise UserError(f"{what} is no sparse matrix of the shape {shape} in the CSR format") from None


def _numbers(data: bytes, dtype: type[np.generic], what: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(f"{what}: {len(data)} bytes are no whole number of elements")
    return np.frombuffer(data, dtype)


def config_of(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the loss settings of a request, which are in the field `loss_fn_config_v2` or `loss_fn_config`."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {k: getattr(v, v.WhichOneof("value") or "number") for k, v in request.loss_fn_config_v2.items()}


def encoded(result: object) -> bytes | dict:
    """Return a result in the form that the SDK reads: a serialized protobuf message, or JSON."""
    if isinstance(result, SampleResponse):
        return _sample_response(result)
    if not isinstance(result, ForwardBackwardOutput):
        return result
    logprobs = (each["logprobs"] for each in result.loss_fn_outputs)
    records = [_record(list(rows), shape) for shape, rows in groupby(logprobs, lambda row: row.shape[1:])]
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=result.metrics
    )
    return message.SerializeToString()


def _record(rows: list[Tensor], trailing: torch.Size) -> pb.ArrayRecord:
    """Pack the log-probabilities of consecutive data, [N, *trailing] each, into one protobuf message."""
    offsets = np.cumsum([0] + [4 * row.numel() for row in rows]).astype(np.int64)
    data = torch.cat([row.flatten() for row in rows]).numpy().astype(np.float32).tobytes()
    field = pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing)
    return pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))


def _sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse()
    for sequence in response.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.topk_logprobs:
            added.topk_sampled_logprobs.CopyFrom(_top(sequence.topk_logprobs))
    if response.prompt_logprobs is not None:
        numbers = [np.nan if logprob is None else logprob for logprob in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(numbers, np.float32).tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top([row or () for row in response.topk_prompt_logprobs]))
    return message.SerializeToString()


def _top(rows: Sequence[Sequence[tuple[int, float]]]) -> pb.TopkLogprobs:
    k = max(len(row) for row in rows)
    tokens, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), MASK_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row):
            tokens[place, column], logprobs[place, column] = token, logprob
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))
