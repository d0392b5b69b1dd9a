// Sums over the rows of a matrix, in an order that only the sizes and the grid decide.
//
// column_sums leaves one row of sums per block row, sum_partial_rows adds those up. Trade-off: a matrix of few columns and few
// rows does not fill the device.

static constexpr int WARPS = 8;

// Columns of a lane: eight neighbors (V = 8), or eight that lie 32 apart (V = 1).
template <int V> DEVICE void add_row(float (&sum)[8], const T *row, int d) {
    const int lane = threadIdx.x % 32;
    if constexpr (V == 8) {
        const int column = blockIdx.x * SUMMED_COLUMNS + lane * 8;
        if (column >= d) return;
        float value[8];
        Pack<T, 8>::load_streaming(row + column).unpack(value);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += value[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = blockIdx.x * SUMMED_COLUMNS + i * 32 + lane;
            if (column < d) sum[i] += to_float(row[column]);
        }
    }
}

template <int V> DEVICE void sum_rows(float *partial, const T *x, long long stride, long long n, int d) {
    __shared__ float sums[WARPS][SUMMED_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[8] = {};
    for (long long row = static_cast<long long>(blockIdx.y) * WARPS + warp; row < n;
         row += static_cast<long long>(gridDim.y) * WARPS)
        add_row<V>(sum, x + row * stride, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[warp][V == 8 ? lane * 8 + i : i * 32 + lane] = sum[i];
    __syncthreads();
    const int column = blockIdx.x * SUMMED_COLUMNS + threadIdx.x;
    if (column >= d) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += sums[i][threadIdx.x];
    partial[static_cast<long long>(blockIdx.y) * d + column] = total;
}

// partial [gridDim.y, d] = sums of parts of the rows of x [n, d] at a row stride (elements).
// grid (ceil(d / 256), any), block (256) exactly, no dynamic shared memory.
KERNEL __launch_bounds__(256) column_sums(float *partial, const T *x, long long stride, long long n, int d) {
    if (d % 8 == 0 && stride % 8 == 0 && aligned16(x)) sum_rows<8>(partial, x, stride, n, d);
    else sum_rows<1>(partial, x, stride, n, d);
}

// out [d] = sum over the rows of partial [rows, d].
// grid (ceil(d / 32)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) sum_partial_rows(float *out, const float *partial, int rows, int d) {
    __shared__ float sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    float sum = 0.0f;
    if (column < d) {
#pragma unroll 8
        for (int row = lane; row < rows; row += 8) sum += partial[static_cast<long long>(row) * d + column];
    }
    sums[lane][threadIdx.x % 32] = sum;
    __syncthreads();
    if (lane != 0 || column >= d) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += sums[i][threadIdx.x];
    out[column] = total;
}
