"""What the weight gradients of full fine-tuning would take in FP8, next to bf16, on an H100.

    python weight_gradient_formats.py OUT.json

`dW = dy^T x`, with dy [n, o] and x [n, i]. In FP8 both operands need one scale each (E4M3, per tensor) and have to lie along the tokens:
cuBLASLt takes 8-bit operands with A untransposed and B transposed only. So next to the GEMM there are, for each operand, the pass that
finds the largest value (read 2 bytes) and the one that quantizes and transposes (read 2, write 1). Their time is not measured but the bytes
over the rate of copies measured here, which no kernel beats: the sum is the least that FP8 takes.
"""

import json
import sys
import time

import torch

SHAPES = {  # tokens, then (o, i) of qkv, attention's output, gate and up, down
    "1B, 32,768 tokens": (32768, [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]),
    "3B, 16,384 tokens": (16384, [(5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)]),
    "8B, 12,288 tokens": (12288, [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]),
}


def milliseconds(work, seconds=0.6):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        count += 5
    return (time.perf_counter() - start) / count * 1e3


def main():
    big = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(big)
    copied = 2 * big.numel() * 2 / milliseconds(lambda: target.copy_(big)) * 1e3
    del big, target
    one = torch.ones((), device="cuda")
    results = []
    for name, (n, shapes) in SHAPES.items():
        for o, i in shapes:
            dy = torch.randn(n, o, dtype=torch.bfloat16, device="cuda")
            x = torch.randn(n, i, dtype=torch.bfloat16, device="cuda")
            bf16 = milliseconds(lambda: dy.t() @ x)
            left, right = (t.t().contiguous().to(torch.float8_e4m3fn) for t in (dy, x))
            gemm = lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            fp8 = milliseconds(gemm)
            passes = 5 * n * (o + i) / copied * 1e3
            results.append(dict(shape=name, o=o, i=i, bf16_ms=bf16, fp8_gemm_ms=fp8, fp8_passes_ms=passes))
            print(name, o, i, f"bf16 {bf16:.3f} ms, fp8 {fp8:.3f} + {passes:.3f}, {bf16 / (fp8 + passes):.2f} times")
    versions = dict(torch=torch.__version__, device=torch.cuda.get_device_name(), copies_tb_s=copied / 1e12)
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(dict(made_with=versions, weight_gradients=results), out, indent=1)


if __name__ == "__main__":
    main()
