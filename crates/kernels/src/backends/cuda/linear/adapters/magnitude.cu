// DoRA: columns times m / norm forward and backward, the gradient of the magnitudes m, and the norms of the rows of W + s B A.
//
// Sums have an order that only sizes and grid decide. Trade-off: the unscaled outputs are read once more each way than without magnitudes.

static constexpr int BLOCK_COLUMNS = 256, WARPS = 8;

template <int V>
DEVICE void scaled_row(T *out, const T *z, const float *m, const float *norm, const T *bias, const T *plus, int d) {
    const int step = gridDim.y * blockDim.x * V;
    for (int c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < d; c += step) {
        float value[V], other[V], over[V];
        Pack<T, V>::load_streaming(z + c).unpack(value);
        if (m != nullptr) {
            Pack<float, V>::load(m + c).unpack(other);
            Pack<float, V>::load(norm + c).unpack(over);
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] *= other[i] / over[i];
        }
        if (bias != nullptr) {
            Pack<T, V>::load(bias + c).unpack(other);
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] += other[i];
        }
        if (plus != nullptr) {
            Pack<T, V>::load_streaming(plus + c).unpack(other);
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] += other[i];
        }
        Pack<T, V>::pack(value).store(out + c);
    }
}

// out [n, d] = m / norm z + bias + plus, rounded once; rows at strides of their own. m and norm [d] are null where nothing is scaled, bias
// [d] and plus [n, d] where there is none; plus may be out.
// grid (n, 1); with few rows (n, ceil(d / 4096)) fills the device; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
scale_columns(T *out, long long out_stride, const T *z, long long z_stride, const float *m, const float *norm,
              const T *bias, const T *plus, long long plus_stride, long long n, int d) {
    const bool vectors = d % 8 == 0 && out_stride % 8 == 0 && z_stride % 8 == 0 && plus_stride % 8 == 0 &&
                         aligned16(out, z, m, norm, bias, plus);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        T *to = out + row * out_stride;
        const T *from = z + row * z_stride, *add = plus == nullptr ? nullptr : plus + row * plus_stride;
        if (vectors) scaled_row<8>(to, from, m, norm, bias, add, d);
        else scaled_row<1>(to, from, m, norm, bias, add, d);
    }
}

// Columns of a lane: eight neighbors (V = 8), or eight that lie 32 apart (V = 1).
template <int V> DEVICE int column_of(int i) {
    const int lane = threadIdx.x % 32;
    return blockIdx.x * BLOCK_COLUMNS + (V == 8 ? lane * 8 + i : i * 32 + lane);
}

template <int V>
DEVICE void backward_row(float (&sum)[8], const float (&factor)[8], T *dz, const T *dy, const T *z, int d) {
    if constexpr (V == 8) {
        const int column = column_of<V>(0);
        if (column >= d) return;
        float gradient[8], output[8];
        Pack<T, 8>::load_streaming(dy + column).unpack(gradient);
        Pack<T, 8>::load_streaming(z + column).unpack(output);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += gradient[i] * output[i];
            gradient[i] *= factor[i];
        }
        Pack<T, 8>::pack(gradient).store(dz + column);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = column_of<V>(i);
            if (column >= d) continue;
            const float gradient = to_float(dy[column]);
            sum[i] += gradient * to_float(z[column]);
            dz[column] = from_float<T>(gradient * factor[i]);
        }
    }
}

template <int V>
DEVICE void backward_rows(float *partial, T *dz, long long dz_stride, const T *dy, long long dy_stride, const T *z,
                          long long z_stride, const float *m, const float *norm, long long n, int d) {
    __shared__ float sums[WARPS][BLOCK_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[8] = {}, factor[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int column = column_of<V>(i);
        factor[i] = column < d ? m[column] / norm[column] : 0.0f;
    }
    for (long long row = static_cast<long long>(blockIdx.y) * WARPS + warp; row < n;
         row += static_cast<long long>(gridDim.y) * WARPS)
        backward_row<V>(sum, factor, dz + row * dz_stride, dy + row * dy_stride, z + row * z_stride, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[warp][V == 8 ? lane * 8 + i : i * 32 + lane] = sum[i];
    __syncthreads();
    const int column = blockIdx.x * BLOCK_COLUMNS + threadIdx.x;
    if (column >= d) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += sums[i][threadIdx.x];
    partial[static_cast<long long>(blockIdx.y) * d + column] = total / norm[column];
}

// dz [n, d] = m / norm dy, and partial [gridDim.y, d] = sums of dy z / norm over parts of the rows; rows at strides of their own.
// grid (ceil(d / 256), any), block (256) exactly, no dynamic shared memory.
KERNEL __launch_bounds__(256)
scale_columns_backward(float *partial, T *dz, long long dz_stride, const T *dy, long long dy_stride, const T *z,
                       long long z_stride, const float *m, const float *norm, long long n, int d) {
    const bool vectors =
        d % 8 == 0 && dz_stride % 8 == 0 && dy_stride % 8 == 0 && z_stride % 8 == 0 && aligned16(dz, dy, z);
    if (vectors) backward_rows<8>(partial, dz, dz_stride, dy, dy_stride, z, z_stride, m, norm, n, d);
    else backward_rows<1>(partial, dz, dz_stride, dy, dy_stride, z, z_stride, m, norm, n, d);
}

template <int V> DEVICE void subtracted_row(T *y, const T *a, const T *b, int d) {
    const int step = gridDim.y * blockDim.x * V;
    for (int c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < d; c += step) {
        float value[V], other[V];
        Pack<T, V>::load_streaming(a + c).unpack(value);
        Pack<T, V>::load_streaming(b + c).unpack(other);
#pragma unroll
        for (int i = 0; i < V; ++i) value[i] -= other[i];
        Pack<T, V>::pack(value).store(y + c);
    }
}

// y [n, d] = a - b, rows at strides of their own; y may be a or b at the same stride.
// grid (n, 1); with few rows (n, ceil(d / 4096)) fills the device; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
subtract_rows(T *y, long long y_stride, const T *a, long long a_stride, const T *b, long long b_stride, long long n, int d) {
    const bool vectors =
        d % 8 == 0 && y_stride % 8 == 0 && a_stride % 8 == 0 && b_stride % 8 == 0 && aligned16(y, a, b);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        if (vectors) subtracted_row<8>(y + row * y_stride, a + row * a_stride, b + row * b_stride, d);
        else subtracted_row<1>(y + row * y_stride, a + row * a_stride, b + row * b_stride, d);
    }
}

template <int V> DEVICE float squares_of_row(const T *row, int d) {
    float sum = 0.0f;
    for (int c = threadIdx.x * V; c < d; c += blockDim.x * V) {
        float value[V];
        Pack<T, V>::load_streaming(row + c).unpack(value);
#pragma unroll
        for (int i = 0; i < V; ++i) sum += value[i] * value[i];
    }
    return sum;
}

// out [n] = sums of the squares of the rows of x [n, d] at a row stride.
// grid (n), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) row_squares(float *out, const T *x, long long stride, long long n, int d) {
    const bool vectors = d % 8 == 0 && stride % 8 == 0 && aligned16(x);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        const T *values = x + row * stride;
        const float sum = block_sum(vectors ? squares_of_row<8>(values, d) : squares_of_row<1>(values, d));
        if (threadIdx.x == 0) out[row] = sum;
    }
}

// norm [n] = sqrt(squares + 2 s <t, b> + s^2 <u, b>) over rows of t = W A^T, u = B A A^T and b = B, all [n, r].
// grid (ceil(n / 8)), block (256): a warp per row; no dynamic shared memory.
KERNEL __launch_bounds__(256)
adapted_norms(float *norm, const float *squares, const float *t, const float *u, const float *b, float s, long long n, int r) {
    const int lane = threadIdx.x % 32;
    const long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= n) return;
    float sum = 0.0f;
    for (int i = lane; i < r; i += 32) {
        const long long at = row * r + i;
        sum += b[at] * s * (2.0f * t[at] + s * u[at]);
    }
    sum = warp_sum(sum);
    // Rounding may leave less than nothing of a row that the adapter cancels.
    if (lane == 0) norm[row] = sqrtf(fmaxf(squares[row] + sum, 0.0f));
}
