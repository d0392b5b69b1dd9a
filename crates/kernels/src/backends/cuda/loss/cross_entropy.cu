// Cross entropy of rows of f32 logits: loss, and in the same memory the gradient in T.
//
// One block per row, two passes: the first finds the maximum and the sum of exponentials (Milakov and Gimelshein, Online
// normalizer calculation for softmax, 2018), the second writes (softmax - onehot) * scale. A row of a large vocabulary
// is half a megabyte and 132 of them overflow the second-level cache, so what fits is kept on the multiprocessor
// between the passes: the head of the row in as much dynamic shared memory as the launch gives, then some in registers;
// only the rest is read again. Trade-off: rows are not split over blocks, so fewer rows than multiprocessors leave some idle.
//
// The row is cut into tiles of THREADS * V values, V of them a thread. Kinds of tiles, in order: shared, register,
// re-read.

static constexpr int THREADS = CROSS_ENTROPY_THREADS;
static constexpr int KEPT = __CUDA_ARCH__ >= 900 ? 6 : 5;      // tiles in registers: what fits without spills
static constexpr int AT_ONCE = 4;       // loads of one thread in flight together
static constexpr float LOWEST = -3.402823466e38f;

// SOFT_CAP is defined where logits are capped: z = SOFT_CAP * tanh(logit / SOFT_CAP) takes the place of the logit as it is read, and the
// gradient of the logit is that of z times 1 - (z / SOFT_CAP)^2.
DEVICE float capped(float logit) {
#ifdef SOFT_CAP
    return SOFT_CAP * tanhf(logit / SOFT_CAP);
#else
    return logit;
#endif
}

DEVICE float slope_of_capped(float z) {
#ifdef SOFT_CAP
    return 1.0f - z / SOFT_CAP * (z / SOFT_CAP);
#else
    return 1.0f;
#endif
}

template <int V> DEVICE Pack<float, V> capped(const Pack<float, V> &logits) {
#ifdef SOFT_CAP
    float value[V];
    logits.unpack(value);
#pragma unroll
    for (int i = 0; i < V; ++i) value[i] = capped(value[i]);
    return Pack<float, V>::pack(value);
#else
    return logits;
#endif
}

// Maximum and sum of exp(value - maximum) of the values seen so far. Starts at (LOWEST, 0): no infinity minus infinity.
struct Online {
    float maximum, sum;

    template <int C> DEVICE void add(const float (&value)[C]) {
        float highest = maximum;
#pragma unroll
        for (int i = 0; i < C; ++i) highest = fmaxf(highest, value[i]);
        float sums = sum * exp_fast(maximum - highest);
#pragma unroll
        for (int i = 0; i < C; ++i) sums += exp_fast(value[i] - highest);
        maximum = highest, sum = sums;
    }
};

DEVICE unsigned dynamic_shared_bytes() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// One row in flight, as one thread sees it.
template <int V> struct Row {
    static constexpr int TILE = THREADS * V;
    typedef Pack<float, V> Values;

    const float *logits;
    int v;          // values
    Values *shared;       // this thread's slot of the first shared tile; the next tile lies THREADS slots on
    int held;       // tiles in shared memory

    DEVICE int index(int tile) const { return tile * TILE + static_cast<int>(threadIdx.x) * V; }

    // What lies beyond the row reads as minus infinity: no weight, no maximum.
    static DEVICE Values nothing() {
        float lowest[V];
#pragma unroll
        for (int i = 0; i < V; ++i) lowest[i] = -__int_as_float(0x7f800000);
        return Values::pack(lowest);
    }
    DEVICE Values load(int tile) const {
        return index(tile) < v ? capped<V>(Values::load(logits + index(tile))) : nothing();
    }
    DEVICE Values load_streaming(int tile) const {
        return index(tile) < v ? capped<V>(Values::load_streaming(logits + index(tile))) : nothing();
    }
};

// Adds `count` packs to the running sums.
template <int V, int COUNT> DEVICE void add_packs(Online &online, const Pack<float, V> (&packs)[COUNT]) {
    float value[COUNT * V];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        float part[V];
        packs[k].unpack(part);
#pragma unroll
        for (int i = 0; i < V; ++i) value[k * V + i] = part[i];
    }
    online.add(value);
}

// First pass. With KEEP the shared and register tiles stay behind for the second.
template <int V, bool KEEP>
DEVICE Online first_pass(const Row<V> &row, int tiles, Pack<float, V> (&kept)[KEPT]) {
    typedef Pack<float, V> Values;
    Online online = {LOWEST, 0.0f};
    int tile = 0;
    if constexpr (KEEP) {
        for (; tile < row.held; tile += AT_ONCE) {
            Values part[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                part[k] = tile + k < row.held ? row.load_streaming(tile + k) : Row<V>::nothing();
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                if (tile + k < row.held) row.shared[(tile + k) * THREADS] = part[k];
            add_packs(online, part);
        }
#pragma unroll
        for (int k = 0; k < KEPT; ++k) kept[k] = row.load_streaming(row.held + k);
        add_packs(online, kept);
        tile = row.held + KEPT;
    }
    for (; tile < tiles; tile += AT_ONCE) {
        Values part[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) part[k] = row.load(tile + k);
        add_packs(online, part);
    }
    return online;
}

// What the second pass needs of the first.
struct Normalizer {
    float maximum, factor, scale;     // factor is scale / sum
    int target;
};

template <int V>
DEVICE void store_gradient(T *gradient, const Row<V> &row, int tile, const Pack<float, V> &logits,
                           const Normalizer &by) {
    const int index = row.index(tile);
    if (index >= row.v) return;
    float value[V];
    logits.unpack(value);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const float slope = slope_of_capped(value[i]);
        value[i] = exp_fast(value[i] - by.maximum) * by.factor;
        if (index + i == by.target) value[i] -= by.scale;
        value[i] *= slope;
    }
    Pack<T, V>::pack(value).store_streaming(gradient + index);
}

// Second pass. The gradient may lie in the row's own memory, value j of it no further on than logit j: tiles are
// re-read in ascending order, and a barrier stands between reading a tile and writing it, so a logit that is overwritten
// has been read. The shared and register tiles come last, when nothing is left to be read.
template <int V>
DEVICE void second_pass(T *gradient, const Row<V> &row, int tiles, const Pack<float, V> (&kept)[KEPT],
                        const Normalizer &by) {
    typedef Pack<float, V> Values;
    for (int tile = row.held + KEPT; tile < tiles; tile += AT_ONCE) {
        Values part[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) part[k] = row.load_streaming(tile + k);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) store_gradient<V>(gradient, row, tile + k, part[k], by);
    }
#pragma unroll
    for (int k = 0; k < KEPT; ++k) store_gradient<V>(gradient, row, row.held + k, kept[k], by);
#pragma unroll 4
    for (int tile = 0; tile < row.held; ++tile) store_gradient<V>(gradient, row, tile, row.shared[tile * THREADS], by);
}

template <int V, bool GRADIENT>
DEVICE void cross_entropy_row(float *logits, T *gradient, int target, float *log_prob, float *is_highest,
                              float scale, int v) {
    extern __shared__ uint4 storage[];
    constexpr int TILE = Row<V>::TILE;
    const int tiles = (v + TILE - 1) / TILE;
    const int room = dynamic_shared_bytes() / (TILE * sizeof(float));
    Pack<float, V> *slot = reinterpret_cast<Pack<float, V> *>(storage) + threadIdx.x;
    const Row<V> row = {logits, v, slot, GRADIENT ? min(room, tiles) : 0};
    Pack<float, V> kept[KEPT];
    const Online online = first_pass<V, GRADIENT>(row, tiles, kept);

    const bool inside = target >= 0 && target < v;
    float target_logit = __int_as_float(0x7fffffff);
    if (threadIdx.x == 0 && inside) target_logit = capped(logits[target]);
    const float maximum = block_max(online.maximum);
    const float sum = block_sum(online.sum * exp_fast(online.maximum - maximum));
    if (threadIdx.x == 0) {
        log_prob[blockIdx.x] = (target_logit - maximum) - logf(sum);
        if (is_highest != nullptr) is_highest[blockIdx.x] = target_logit >= maximum ? 1.0f : 0.0f;
    }
    if constexpr (GRADIENT) second_pass<V>(gradient, row, tiles, kept, Normalizer{maximum, scale / sum, scale, target});
}

// logits [c, v] f32 with row stride v; log_prob[row] = logits[target] - log(sum(exp(logits))); dlogits, where it is not null, =
// (softmax - onehot) * scale * weights[row] in T at row stride d_stride (elements); weights may be null: all 1. is_highest,
// where it is not null, gets 1 where no logit of the row is higher than the target's, else 0. Row r of dlogits may
// begin at the same byte as row r of the logits (d_stride = v * 4 / sizeof(T)) and otherwise must not overlap the logits. Logits are
// only read, unless dlogits lies on them. A target outside 0..v makes the log probability NaN and reads nothing outside.
// grid (c), block (1024) exactly, dynamic shared memory: as much as a block may have (opt in by
// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; 14 * 16384 = 229376 bytes on sm_90, 10 * 16384 on sm_80); any amount
// is right, and none is needed for the loss only. v is below 2^31 - 16384.
KERNEL __launch_bounds__(THREADS, 1)
cross_entropy(float *logits, T *dlogits, long long d_stride, const int *targets, const float *weights, float *log_prob,
              float *is_highest, float scale, int c, long long v) {
    if (weights != nullptr && static_cast<int>(blockIdx.x) < c) scale *= weights[blockIdx.x];
    constexpr long long T_VECTOR = sizeof(T) * 4;
    const long long row = blockIdx.x;
    if (row >= c) return;
    float *logits_row = logits + row * v;
    const int target = targets[row], values = static_cast<int>(v);
    const bool logits_fit = v % 4 == 0 && aligned16(logits);
    if (dlogits == nullptr) {
        if (logits_fit) cross_entropy_row<4, false>(logits_row, nullptr, target, log_prob, is_highest, scale, values);
        else cross_entropy_row<1, false>(logits_row, nullptr, target, log_prob, is_highest, scale, values);
        return;
    }
    T *gradient = dlogits + row * d_stride;
    const bool gradient_fits = d_stride % 4 == 0 && reinterpret_cast<unsigned long long>(dlogits) % T_VECTOR == 0;
    if (logits_fit && gradient_fits) cross_entropy_row<4, true>(logits_row, gradient, target, log_prob, is_highest, scale, values);
    else cross_entropy_row<1, true>(logits_row, gradient, target, log_prob, is_highest, scale, values);
}

// out[0] += factor * sum of weights[i] * values[i] over c values, in an order that only c decides; weights may be null: all 1.
// grid (1), block (1024), no dynamic shared memory.
KERNEL __launch_bounds__(THREADS)
add_sum(float *out, float factor, const float *values, const float *weights, int c) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < c; i += blockDim.x) sum += weights != nullptr ? weights[i] * values[i] : values[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] += factor * sum;
}
