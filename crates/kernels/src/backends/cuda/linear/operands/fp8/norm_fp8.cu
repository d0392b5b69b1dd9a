// RMSNorm that also writes what it made as rows of codes, for the 8-bit GEMM that reads it. Compiled after fp8_codes.cu
// and norm.cu; the codes are those that quantize_rows would make of the result.
// Trade-off: rows have to fit in the registers of a block, 8,192 values of a 16-bit type.

// y and its codes. Rows on 16 bytes, d a multiple of 8 and at most KEEP * 8 * blockDim.x. grid (n), block threads_for(d, 512).
KERNEL __launch_bounds__(512) rms_norm_codes(RowsOfCodes out, T *y, long long y_stride, const T *x, const float *w,
                                             float w_offset, int d, float eps) {
    const long long row = blockIdx.x;
    y += row * y_stride, x += row * d;
    const int count = d / 8;
    Pack<T, 8> kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c < count) kept[k] = Pack<T, 8>::load_streaming(x + c * 8);
    }
#pragma unroll
    for (int k = 0; k < KEEP; ++k)
        if (static_cast<int>(threadIdx.x + k * blockDim.x) < count) sum += sum_of_squares<8>(kept[k]);
    const float rstd = 1.0f / sqrtf(block_sum(sum) / d + eps);
    const Weight weight = {w, w_offset};
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c >= count) break;
        kept[k] = normed<8>(kept[k], weight.at(c * 8), nullptr, rstd);
        kept[k].store(y + c * 8);
        largest = max(largest, out.largest(kept[k], c * 8));
    }
    const RowScale of_row = out.scale_of(row, largest);
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        const int c = threadIdx.x + k * blockDim.x;
        if (c < count) out.store(row, of_row, kept[k], c * 8);
    }
}
