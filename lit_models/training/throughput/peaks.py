"""What GPUs can do at most, without sparsity; a device that is not listed is unknown.

Dense TFLOP/s of the tensor cores with sums in float32, and of float32 without them. NVIDIA's
sheets give most of these with structured sparsity, which is twice as much and which no training
here uses. Names are those of `torch.cuda.get_device_name`, whole: a laptop's, a slice's (MIG) or
a cut-down model's name differs, and so does what it can do.

The comments say what each row was checked against in November 2026. NVIDIA's own files could not be
opened then, so most are copies, or tables that cite them. "Lightning" is the table of Lightning
2.6.6, `fabric/utilities/throughput.py`, which cites the sheets and white papers. A device whose
figures no sheet confirmed was left out: the RTX 3090 (its tensor cores with sums in float32: one
measures 76 where 71 are commonly given), the RTX 6000 Ada, the A30 (TF32 and float32).
"""

import torch

from lit_models.blocks import rounds_to_float32

TERA = 1e12
# NVIDIA's table, copied by https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html; the
# digits behind the point: https://glennklockwood.com/garden/processors/h100
_H100_SXM = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}
# https://glennklockwood.com/garden/processors/A100, which cites the data sheet
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}
PEAKS: dict[str, dict[str, float]] = {
    # 2,250 BF16, 1,130 TF32, 75 FP32: https://hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100; 2,250,
    # 1,100 and 80: https://glennklockwood.com/garden/processors/B200
    "NVIDIA B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0},
    # as the H100 SXM; rounded in the data sheet of the H200, says Lightning
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    # the table of the H100 SXM
    "NVIDIA H100 PCIe": {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.0},
    # a table of Dell's servers, whose address was not kept; Lightning's 1,979 is that of the SXM
    # with sparsity, but its figures of the H200 NVL agree with these
    "NVIDIA H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    # https://hmc-tech.com/gpu/nvidia-a100-vs-nvidia-a40
    "NVIDIA A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    # Lightning, down to the L4
    "NVIDIA A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "NVIDIA L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    # the data sheet's table: https://www.mullet.se/product.html?product_id=355414
    "NVIDIA L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5},
    "NVIDIA L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    # Lightning, down to the T4
    "Tesla V100-SXM2-16GB": {"fp16": 125.0, "fp32": 15.7},
    "Tesla V100-SXM2-32GB": {"fp16": 125.0, "fp32": 15.7},
    "Tesla V100-PCIE-16GB": {"fp16": 112.0, "fp32": 14.0},
    "Tesla V100-PCIE-32GB": {"fp16": 112.0, "fp32": 14.0},
    "Tesla T4": {"fp16": 65.0, "fp32": 8.1},
    # Lightning for TF32 and FP32, from the Ada white paper; 165 BF16 with sums in float32:
    # https://waredb.com/processor/nvidia-geforce-rtx-4090
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
}


def arithmetic(precision: str) -> str:
    """Return the kind of product that a precision of the trainer computes with: bf16, fp16, tf32,
    fp32 or fp64; the precision itself where it is another.

    Args:
        precision: `trainer.precision`.
    """
    if precision.startswith("32"):
        return "fp32" if rounds_to_float32() else "tf32"
    kinds = {"bf16": "bf16", "16": "fp16", "64": "fp64"}
    return kinds.get(precision.removesuffix("-true").removesuffix("-mixed"), precision)


def dtype_of(kind: str) -> torch.dtype | None:
    """Return the dtype of the factors of a kind of product; None where it is unknown."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return torch.float32 if kind in ("tf32", "fp32") else dtypes.get(kind)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak of a device in FLOP/s; None where it is unknown, as any CPU's is."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision)


def peak_of(name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU by its name, in FLOP/s; None where it is unknown."""
    tera = PEAKS.get(name, {}).get(arithmetic(precision))
    return None if tera is None else tera * TERA
