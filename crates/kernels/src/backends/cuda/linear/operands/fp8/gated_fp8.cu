// Gated activations that also write what they made as rows of codes, for the 8-bit GEMM that reads it. Compiled after
// fp8_codes.cu and gated.cu, whose arithmetic it is; the codes are those that quantize_rows would make of the result.
//
// One block owns a row, and keeps it in registers until its scale is known. Trade-off: rows of more than 16,384 values have to be
// quantized in a pass of their own.

// Vectors of eight values that a thread keeps.
constexpr int KEPT = 4;

// y [n, f] = a(gate) * up, and its codes. Strides as for `gated`; all rows on 16 bytes, f a multiple of 8. Launch: grid n,
// block threads for f / 8 / KEPT, whole warps, at most 512.
KERNEL __launch_bounds__(512, 2) gated_codes(RowsOfCodes out, T *y, long long y_stride, const T *gate, const T *up,
                                             long long gate_stride, long long up_stride, int f) {
    const long long row = blockIdx.x;
    y += row * y_stride, gate += row * gate_stride, up += row * up_stride;
    const int count = f / 8;
    Pack<T, 8> kept[KEPT];
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c >= count) break;
        float g[8], u[8];
        Pack<T, 8>::load_streaming(gate + c * 8).unpack(g);
        Pack<T, 8>::load_streaming(up + c * 8).unpack(u);
        gated_values(g, u);
        kept[k] = Pack<T, 8>::pack(g);
        kept[k].store(y + c * 8);
        largest = max(largest, out.largest(kept[k], c * 8));
    }
    const RowScale of_row = out.scale_of(row, largest);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c < count) out.store(row, of_row, kept[k], c * 8);
    }
}

// As `gated_backward`; dgate and dup also as codes, side by side. Launch: as for `gated_codes`.
DEVICE void gated_backward_row(const RowsOfCodes &out, T *dgate, T *dup, long long d_stride, const T *gate, const T *up,
                               long long gate_stride, long long up_stride, const T *dy, T *y, long long y_stride, int f) {
    const long long row = blockIdx.x;
    dgate += row * d_stride, dup += row * d_stride, gate += row * gate_stride, up += row * up_stride;
    dy += row * y_stride;
    const int count = f / 8;
    Pack<T, 8> of_gate[KEPT], of_up[KEPT];
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c >= count) break;
        float g[8], u[8], d[8], product[8];
        Pack<T, 8>::load_streaming(gate + c * 8).unpack(g);
        Pack<T, 8>::load_streaming(up + c * 8).unpack(u);
        Pack<T, 8>::load_streaming(dy + c * 8).unpack(d);
        gated_gradients(g, u, d, product);
        of_gate[k] = Pack<T, 8>::pack(g), of_up[k] = Pack<T, 8>::pack(u);
        of_gate[k].store(dgate + c * 8), of_up[k].store(dup + c * 8);
        if (y != nullptr) Pack<T, 8>::pack(product).store(y + row * y_stride + c * 8);
        largest = max(largest, out.largest(of_gate[k], c * 8));
        largest = max(largest, out.largest(of_up[k], f + c * 8));
    }
    const RowScale of_row = out.scale_of(row, largest);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c >= count) break;
        out.store(row, of_row, of_gate[k], c * 8);
        out.store(row, of_row, of_up[k], f + c * 8);
    }
}

#define GATED_BACKWARD_CODES(NAME, OUT)                                                                                           \
    KERNEL __launch_bounds__(512, 2) NAME(RowsOfCodes out, T *dgate, T *dup, long long d_stride, const T *gate, const T *up,       \
                                          long long gate_stride, long long up_stride, const T *dy, T *y, long long y_stride,      \
                                          int f) {                                                                                \
        gated_backward_row(OUT, dgate, dup, d_stride, gate, up, gate_stride, up_stride, dy, y, y_stride, f);                      \
    }
GATED_BACKWARD_CODES(gated_backward_codes, out)
GATED_BACKWARD_CODES(gated_backward_expert_codes, out.of_expert(blockIdx.x))
