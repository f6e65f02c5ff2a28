"""A retriever's encoder as an ONNX program, in float32 and with matrices of 8 bits for a CPU."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Vectors(nn.Module):
    """Tokens and their mask, [R, T] int64 each, to unit vectors. Args: network: a BiEncoder."""

    def __init__(self, network: Any, size: int | None) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors = self.network.encode(input_ids, attention_mask.bool())
        return F.normalize(vectors[:, : self.size], dim=-1)


def write_programs(module: Any, folder: Path) -> None:
    """Write encoder.onnx and encoder.int8.onnx, which onnxruntime quantises dynamically.

    Raises:
        ValueError: the extra is not installed.
    """
    try:
        import onnxscript  # noqa: F401 - of the exporter
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise ValueError(f"--format onnx needs pip install 'unisono[onnx]' ({error}).") from error
    shape = dict(enumerate(map(torch.export.Dim, ("rows", "positions"))))
    program = torch.onnx.export(
        Vectors(module.network, module.size).eval(),
        tuple(torch.ones(2, 8, dtype=torch.long) for _ in range(2)),
        dynamo=True,
        verbose=False,
        dynamic_shapes=(shape, shape),
        input_names=["input_ids", "attention_mask"],
        output_names=["vector"],
    )
    whole, small = folder / "encoder.onnx", folder / "encoder.int8.onnx"
    program.save(whole)
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8)
