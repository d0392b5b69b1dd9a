// RMSNorm, forward and backward.
//
// One block owns a row and keeps the first KEEP vectors of each thread in registers (two of a 16-bit type, one of f32),
// so a row of up to KEEP * 8 * blockDim.x values is read from memory once; what is wider is read again, from cache. A
// width that is no multiple of 8, or a pointer off the 16-byte grid, takes the same body one value at a time. Trade-off:
// rows are not split over several blocks, so a few very wide rows do not fill the device.
//
// Block for a row of d values: threads_for(d, most) = clamp(ceil(d / 16) rounded up to a multiple of 32, 32, most). Any
// multiple of 32 up to `most` gives the same results up to rounding.

static constexpr int KEEP = 4 / sizeof(T);

// The weights of a norm, and what is added to them before they multiply.
struct Weight {
    const float *value;
    float offset;

    DEVICE Weight at(int column) const { return {value + column, offset}; }

    // At most four neighboring weights per instruction; weights stay in the first-level cache for the next row.
    template <int V> DEVICE void load(float (&factor)[V]) const {
        Pack<float, V>::load(value).unpack(factor);
#pragma unroll
        for (int i = 0; i < V; ++i) factor[i] += offset;
    }
};

template <int V> DEVICE float sum_of_squares(const Pack<T, V> &pack) {
    float value[V], sum = 0.0f;
    pack.unpack(value);
#pragma unroll
    for (int i = 0; i < V; ++i) sum += value[i] * value[i];
    return sum;
}

template <int V>
DEVICE Pack<T, V> normed(const Pack<T, V> &x, Weight weight, const T *residual, float rstd) {
    float value[V], scale[V];
    x.unpack(value);
    weight.load<V>(scale);
#pragma unroll
    for (int i = 0; i < V; ++i) value[i] = value[i] * rstd * scale[i];
    if (residual != nullptr) {
        Pack<T, V>::load_streaming(residual).unpack(scale);
#pragma unroll
        for (int i = 0; i < V; ++i) value[i] += scale[i];
    }
    return Pack<T, V>::pack(value);
}

template <int V>
DEVICE void rms_norm_row(T *y, const T *x, Weight weight, const T *residual, int d, float eps) {
    const int count = d / V, stride = blockDim.x;
    Pack<T, V> kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        const int c = threadIdx.x + k * stride;
        if (c < count) kept[k] = Pack<T, V>::load_streaming(x + c * V);
    }
#pragma unroll
    for (int k = 0; k < KEEP; ++k)
        if (static_cast<int>(threadIdx.x) + k * stride < count) sum += sum_of_squares<V>(kept[k]);
#pragma unroll 1
    for (int c = threadIdx.x + KEEP * stride; c < count; c += stride)
        sum += sum_of_squares<V>(Pack<T, V>::load(x + c * V));

    const float rstd = 1.0f / sqrtf(block_sum(sum) / d + eps);
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        const int c = threadIdx.x + k * stride;
        const T *plus = residual ? residual + c * V : nullptr;
        if (c < count) normed<V>(kept[k], weight.at(c * V), plus, rstd).store(y + c * V);
    }
#pragma unroll 1
    for (int c = threadIdx.x + KEEP * stride; c < count; c += stride) {
        const T *plus = residual ? residual + c * V : nullptr;
        normed<V>(Pack<T, V>::load(x + c * V), weight.at(c * V), plus, rstd).store(y + c * V);
    }
}

// y [n, d] = x / sqrt(mean(x^2) + eps) * (w + w_offset) + residual, with rows of y and of the residual at row strides of their own. The residual
// may be null. y may be x where y is dense, and may be the residual at one stride.
// grid (n), block threads_for(d, 512), no dynamic shared memory.
KERNEL __launch_bounds__(512) rms_norm(T *y, long long y_stride, const T *x, const float *w, float w_offset,
                                       const T *residual, long long residual_stride, int d, float eps) {
    const long long row = blockIdx.x;
    y += row * y_stride, x += row * d;
    if (residual != nullptr) residual += row * residual_stride;
    const bool vectors = d % 8 == 0 && y_stride % 8 == 0 && residual_stride % 8 == 0 && aligned16(y, x, w, residual);
    const Weight weight = {w, w_offset};
    if (vectors) rms_norm_row<8>(y, x, weight, residual, d, eps);
    else rms_norm_row<1>(y, x, weight, residual, d, eps);
}

// ------------------------------------------------------------------------------------------------------------ backward

// Most threads of a block of rms_norm_backward.
static constexpr int BACKWARD_THREADS = 256;

// Adds x^2 and x * (dy * w) of one vector to the two sums of the row.
template <int V>
DEVICE void add_row_sums(const Pack<T, V> &x, const Pack<T, V> &dy, Weight weight, float &squares,
                         float &products) {
    float xs[V], dys[V], scale[V];
    x.unpack(xs), dy.unpack(dys);
    weight.load<V>(scale);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        squares += xs[i] * xs[i];
        products += xs[i] * (dys[i] * scale[i]);
    }
}

// dx = rstd * (g - x * along) + dx_residual with g = dy * (w + w_offset); adds dy * x * rstd to dw, whose values lie DW_STRIDE
// apart.
template <int V, int DW_STRIDE>
DEVICE void store_gradient(T *dx, const Pack<T, V> &x, const Pack<T, V> &dy, Weight weight, const T *dx_residual,
                           float rstd, float along, float *dw) {
    float xs[V], dys[V], scale[V];
    x.unpack(xs), dy.unpack(dys);
    if constexpr (DW_STRIDE > 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) dw[i * DW_STRIDE] += dys[i] * (xs[i] * rstd);
    }
    weight.load<V>(scale);
#pragma unroll
    for (int i = 0; i < V; ++i) xs[i] = rstd * (dys[i] * scale[i] - xs[i] * along);
    if (dx_residual != nullptr) {
        Pack<T, V>::load_streaming(dx_residual).unpack(dys);
#pragma unroll
        for (int i = 0; i < V; ++i) xs[i] += dys[i];
    }
    Pack<T, V>::pack(xs).store(dx);
}

// Low-rank gradients of the adapters that read the norm's result, and where they go times 1 / rms of their row: nowhere if there are none.
struct LowRankRows {
    const T *low;
    T *scaled; // [n, ranks]
    long long stride;
    int ranks;

    DEVICE void scale(long long row, float rstd) const {
        for (int r = threadIdx.x; r < ranks; r += blockDim.x)
            scaled[row * ranks + r] = from_float<T>(to_float(low[row * stride + r]) * rstd);
    }
};

template <int V, bool WEIGHT_GRADIENT>
DEVICE void rms_norm_backward_rows(T *dx_nd, long long dx_stride, const T *x_nd, Weight weight, const T *dy_nd,
                                   long long dy_stride, const T *residual_nd, long long residual_stride,
                                   float *dw_partial, LowRankRows low, long long n, int d, float eps) {
    const int count = d / V, stride = blockDim.x;
    float *dw_row = WEIGHT_GRADIENT ? dw_partial + static_cast<long long>(blockIdx.x) * d : nullptr;
    // Each thread's own sums; in shared memory because registers decide how many rows are in flight.
    __shared__ float sums_of_block[WEIGHT_GRADIENT ? KEEP * V : 1][BACKWARD_THREADS];
    float *dw = &sums_of_block[0][threadIdx.x];
    if constexpr (WEIGHT_GRADIENT) {
#pragma unroll
        for (int i = 0; i < KEEP * V; ++i) dw[i * BACKWARD_THREADS] = 0.0f;
    }

    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        const T *x = x_nd + row * d, *dy = dy_nd + row * dy_stride;
        const T *residual = residual_nd != nullptr ? residual_nd + row * residual_stride : nullptr;
        T *dx = dx_nd + row * dx_stride;
        Pack<T, V> xs[KEEP], dys[KEEP];
        float squares = 0.0f, products = 0.0f;
#pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            const int c = threadIdx.x + k * stride;
            if (c < count) {
                xs[k] = Pack<T, V>::load_streaming(x + c * V);
                dys[k] = Pack<T, V>::load_streaming(dy + c * V);
            }
        }
#pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            const int c = threadIdx.x + k * stride;
            if (c < count) add_row_sums<V>(xs[k], dys[k], weight.at(c * V), squares, products);
        }
#pragma unroll 1
        for (int c = threadIdx.x + KEEP * stride; c < count; c += stride)
            add_row_sums<V>(Pack<T, V>::load(x + c * V), Pack<T, V>::load(dy + c * V), weight.at(c * V), squares,
                            products);

        const float2 sums = block_sum2(squares, products);
        const float rstd = 1.0f / sqrtf(sums.x / d + eps);
        const float along = rstd * rstd * (sums.y / d);
        low.scale(row, rstd);
#pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            const int c = threadIdx.x + k * stride;
            if (c < count)
                store_gradient<V, WEIGHT_GRADIENT ? BACKWARD_THREADS : 0>(
                    dx + c * V, xs[k], dys[k], weight.at(c * V), residual ? residual + c * V : nullptr, rstd, along,
                    dw + k * V * BACKWARD_THREADS);
        }
#pragma unroll 1
        for (int c = threadIdx.x + KEEP * stride; c < count; c += stride) {
            // The first row of the block starts the sum, so nothing need be cleared before the launch.
            if constexpr (WEIGHT_GRADIENT) {
#pragma unroll
                for (int i = 0; i < V; ++i)
                    if (row == blockIdx.x) dw_row[c * V + i] = 0.0f;
            }
            store_gradient<V, WEIGHT_GRADIENT ? 1 : 0>(
                dx + c * V, Pack<T, V>::load(x + c * V), Pack<T, V>::load(dy + c * V), weight.at(c * V),
                residual ? residual + c * V : nullptr, rstd, along, dw_row + c * V);
        }
    }
    if constexpr (WEIGHT_GRADIENT) {
#pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            const int c = threadIdx.x + k * stride;
            if (c >= count) break;
            float sum[V];
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] = dw[(k * V + i) * BACKWARD_THREADS];
            Pack<float, V>::pack(sum).store(dw_row + c * V);
        }
    }
}

// dx, dy, dx_residual [n, d] at their row strides; x [n, d] contiguous; dx_residual may be null; dx may be dy or
// dx_residual at one stride, or x where it is contiguous. dw_partial [gridDim.x, d] may be null: one row of sums per block,
// overwritten, to be added up by sum_partial_rows. Every element of dw_partial is written only if gridDim.x <= n. grid:
// without dw_partial (n); with it (min(n, blocks that fit the device at once: 4 per multiprocessor)).
// block threads_for(d, 256), no dynamic shared memory.
KERNEL __launch_bounds__(BACKWARD_THREADS, 4)
rms_norm_backward(T *dx, long long dx_stride, const T *x, const float *w, float w_offset, const T *dy,
                  long long dy_stride, const T *dx_residual, long long residual_stride, float *dw_partial, LowRankRows low, long long n, int d,
                  float eps) {
    const bool vectors = d % 8 == 0 && dx_stride % 8 == 0 && dy_stride % 8 == 0 && residual_stride % 8 == 0 &&
                         aligned16(dx, x, w, dy, dx_residual, dw_partial);
#define ROWS(V, WEIGHT_GRADIENT)                                                                                      \
    rms_norm_backward_rows<V, WEIGHT_GRADIENT>(dx, dx_stride, x, {w, w_offset}, dy, dy_stride, dx_residual, residual_stride,      \
                                               dw_partial, low, n, d, eps)
    if (dw_partial != nullptr) {
        if (vectors) ROWS(8, true);
        else ROWS(1, true);
    } else {
        if (vectors) ROWS(8, false);
        else ROWS(1, false);
    }
#undef ROWS
}

// y [rows, d] times the weight of each column, in its place: dA from a sum over the norm's input. grid (ceil(rows * d / 256)), block (256).
KERNEL __launch_bounds__(256) times_weight(float *y, const float *w, float w_offset, long long count, int d) {
    const long long at = blockIdx.x * 256ll + threadIdx.x;
    if (at < count) y[at] *= w[at % d] + w_offset;
}
