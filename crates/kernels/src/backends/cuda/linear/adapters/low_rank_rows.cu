// x Aᵀ of all adapters of a group in the launch that makes x, for the few rows of a decoding step: of a norm, of a gated activation, or of
// given rows. Compiled after matrix_units.cu, and after gated.cu where ACTIVATION is defined.
//
// As a GEMM this has one or two tiles, which leave the device idle, and takes as long as a hundred times the work. Here a block has sixteen
// ranks of eight rows; its warps divide the columns and add up their sums in a fixed order. Where that makes few blocks, the columns are
// divided among several as well: the last to arrive adds up the parts of all, in their order, so that results do not depend on scheduling.
// What is made is stored once, by the blocks of all ranks in turn. A is [ranks, width] in T, below the weight.
// Trade-off: eight rows read A again, sixteen ranks make x again, and parts read all of a norm's rows again, which is right from cache.

constexpr int WARPS = 8, TILE_RANKS = 16, TILE_ROWS = 8, SUMS = TILE_RANKS * TILE_ROWS;
constexpr int COLUMNS = 32;            // of a warp: eight for each of the four lanes that share a row
constexpr int ROUND = WARPS * COLUMNS; // of a block
constexpr int AHEAD = 4;               // rounds whose loads are in flight
typedef Pack<T, 8> Values;

// How many blocks of a tile have arrived: zero before and after each launch.
__device__ unsigned arrived[1024];

struct Product {
    T *low;
    const T *a;
    float *parts;
    long long low_stride, a_stride;
    int ranks, n, width, part_columns;
};

// Eight made values, stored where this block is to store them.
DEVICE Values made_of(const float (&value)[8], T *to, bool stores) {
    const Values made = Values::pack(value);
    if (stores) made.store(to);
    return made;
}

struct Plain {
    const T *x;
    long long x_stride;
    typedef Values Loaded;
    DEVICE Values load(int row, int column) const { return Values::load(x + row * x_stride + column); }
    DEVICE void begin(int) {}
    DEVICE Values make(const Values &loaded, int, int, bool) const { return loaded; }
};

struct Normed {
    T *y;
    const T *x;
    const float *w;
    long long y_stride;
    int width;
    float w_offset, eps, rstd;
    struct Loaded {
        Values x;
        Pack<float, 8> w;
    };
    DEVICE Loaded load(int row, int column) const {
        return {Values::load(x + static_cast<long long>(row) * width + column), Pack<float, 8>::load(w + column)};
    }
    // Reads all columns of the rows, while the loads of the block's own are under way.
    DEVICE void begin(int row) {
        __shared__ float squares[WARPS][TILE_ROWS];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * COLUMNS + lane % 4 * 8;
        const T *of_row = x + static_cast<long long>(row) * width;
        float sum = 0.0f;
        for (int column = first; column < width; column += 16 * ROUND) {
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                float value[8], of_eight = 0.0f;
                (column + k * ROUND < width ? Values::load(of_row + column + k * ROUND) : Values{}).unpack(value);
#pragma unroll
                for (int i = 0; i < 8; ++i) of_eight += value[i] * value[i];
                sum += of_eight;
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0) squares[warp][lane / 4] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += squares[other][lane / 4];
        rstd = 1.0f / sqrtf(sum / width + eps);
    }
    // As norm.cu rounds it.
    DEVICE Values make(const Loaded &loaded, int row, int column, bool stores) const {
        float value[8], scale[8];
        loaded.x.unpack(value), loaded.w.unpack(scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = value[i] * rstd * (scale[i] + w_offset);
        return made_of(value, y + row * y_stride + column, stores);
    }
};

// The last block of a tile gets true, once the parts of all are there.
DEVICE bool is_last(int tile) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        // Orders what the barriers order: the parts of all threads of this block, and of those that arrived before.
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(&arrived[tile]) : "memory");
        last = before == gridDim.z - 1;
        if (last) arrived[tile] = 0;
    }
    __syncthreads();
    return last;
}

template <class Input> DEVICE void low_rank_of(const Product &product, Input input) {
    __shared__ float sums[WARPS][SUMS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.y * gridDim.x + blockIdx.x;
    const int first_rank = blockIdx.x * TILE_RANKS, first_row = blockIdx.y * TILE_ROWS;
    const int begin = blockIdx.z * product.part_columns, end = min(product.width, begin + product.part_columns);
    // Ranks and rows past the last are multiplied as the last, and not stored.
    const int row = min(first_row + lane / 4, product.n - 1);
    const T *top = product.a + min(first_rank + lane / 4, product.ranks - 1) * product.a_stride;
    const T *bottom = product.a + min(first_rank + lane / 4 + 8, product.ranks - 1) * product.a_stride;
    float sum[4] = {};
    for (int round = 0; begin + round * ROUND < end; round += AHEAD) {
        typename Input::Loaded loaded[AHEAD];
        Values upper[AHEAD], lower[AHEAD];
        int column[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            column[k] = begin + (round + k) * ROUND + warp * COLUMNS + lane % 4 * 8;
            const int from = column[k] < end ? column[k] : begin;
            loaded[k] = input.load(row, from);
            upper[k] = Values::load(top + from), lower[k] = Values::load(bottom + from);
        }
        if (round == 0) input.begin(row);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const bool inside = column[k] < end, is_turn = (round + k) % gridDim.x == blockIdx.x;
            Values x = input.make(loaded[k], row, column[k], inside && is_turn && first_row + lane / 4 < product.n);
#pragma unroll
            for (int i = 0; i < 4; ++i) x.word[i] = inside ? x.word[i] : 0u;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const Word a[4] = {upper[k].word[i], lower[k].word[i], upper[k].word[i + 1], lower[k].word[i + 1]};
                multiply_add(sum, a, x.word[i], x.word[i + 1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][(lane % 4 * 2 + i % 2) * TILE_RANKS + lane / 4 + i / 2 * 8] = sum[i];
    __syncthreads();
    const int at = threadIdx.x;
    float total = 0.0f;
    if (at < SUMS) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += sums[w][at];
    }
    if (const int count = gridDim.z; count > 1) {
        float *parts = product.parts + static_cast<long long>(tile) * count * SUMS;
        if (at < SUMS) parts[blockIdx.z * SUMS + at] = total;
        if (!is_last(tile) || at >= SUMS) return;
        total = 0.0f;
        for (int first = 0; first < count; first += 16) {
#pragma unroll
            for (int k = 0; k < 16; ++k) total += first + k < count ? __ldcg(parts + first * SUMS + at + k * SUMS) : 0.0f;
        }
    }
    const int to_row = first_row + at / TILE_RANKS, rank = first_rank + at % TILE_RANKS;
    if (at < SUMS && to_row < product.n && rank < product.ranks)
        product.low[to_row * product.low_stride + rank] = from_float<T>(total);
}

// low [n, ranks] = x Aᵀ, at row strides; x [n, width]. Ranks and widths are multiples of 8, rows of x and A lie on 16 bytes.
// Launch: grid (ceil(ranks / 16), ceil(n / 8), ceil(width / part_columns)), block 256; with several parts of the columns, which are whole
// rounds, at most 1024 tiles, and parts [tiles, gridDim.z, 128].
KERNEL __launch_bounds__(256, 2)
low_rank_rows(const T *x, long long x_stride, T *low, long long low_stride, const T *a, long long a_stride, float *parts, int ranks,
              int n, int width, int part_columns) {
    wait_for_earlier();
    const Product product = {low, a, parts, low_stride, a_stride, ranks, n, width, part_columns};
    low_rank_of(product, Plain{x, x_stride});
}

// y = x / sqrt(mean(x^2) + eps) * (w + w_offset) as well, at a stride, from x without gaps.
KERNEL __launch_bounds__(256, 2)
norm_low_rank_rows(T *y, long long y_stride, const T *x, const float *w, float w_offset, float eps, T *low, long long low_stride,
                   const T *a, long long a_stride, float *parts, int ranks, int n, int width, int part_columns) {
    wait_for_earlier();
    const Product product = {low, a, parts, low_stride, a_stride, ranks, n, width, part_columns};
    low_rank_of(product, Normed{y, x, w, y_stride, width, w_offset, eps});
}

#ifdef ACTIVATION
struct GatedRows {
    T *y;
    const T *gate, *up;
    long long y_stride, gate_stride, up_stride;
    struct Loaded {
        Values gate, up;
    };
    DEVICE Loaded load(int row, int column) const {
        return {Values::load(gate + row * gate_stride + column), Values::load(up + row * up_stride + column)};
    }
    DEVICE void begin(int) {}
    DEVICE Values make(const Loaded &loaded, int row, int column, bool stores) const {
        float g[8], u[8];
        loaded.gate.unpack(g), loaded.up.unpack(u);
        gated_values(g, u);
        return made_of(g, y + row * y_stride + column, stores);
    }
};

// y = a(gate) up as well, each at its stride.
KERNEL __launch_bounds__(256, 2)
gated_low_rank_rows(T *y, long long y_stride, const T *gate, const T *up, long long gate_stride, long long up_stride, T *low,
                    long long low_stride, const T *a, long long a_stride, float *parts, int ranks, int n, int width,
                    int part_columns) {
    wait_for_earlier();
    const Product product = {low, a, parts, low_stride, a_stride, ranks, n, width, part_columns};
    low_rank_of(product, GatedRows{y, gate, up, y_stride, gate_stride, up_stride});
}
#endif
