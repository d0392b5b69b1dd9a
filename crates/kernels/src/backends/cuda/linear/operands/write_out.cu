// Frozen weights, quantized or dense, to what a linear layer multiplies with, in T, the adapter next to them. Compiled after
// weight_values.cu, which has the layouts. With T = float and no adapter it is dequantization.
//
// Each value is rounded once. Not supported: matrices of 2^31 rows or columns.

// A weight as a GEMM reads it, its adapter next to it and below:
//
//                 i columns    `ranks` columns
//        o rows   values       scale * B
//   a_rows rows   A
//
// A stack has one such matrix per blockIdx.z, `matrix` values apart; its values, A and B are read from below each other.
// Rows lie `stride` values apart. This module's columns of B begin at `first` and are `rank` wide; the others, which
// belong to modules that share the input, are zero, as are the rows of A beyond `rank`.
template <class VALUES> struct WriteOut {
    T *out;
    VALUES values;
    T *a_out;
    const float *a, *b;
    float scale;
    int o, i, rank, first, ranks, a_rows;
    long long stride, matrix;

    // Moves on to this block's matrix of a stack.
    DEVICE void choose_matrix() {
        const long long z = blockIdx.z;
        out += z * matrix;
        a_out += z * matrix;
        a += z * rank * i;
        b += z * o * rank;
    }

    // Rows of A from row k on, this thread's V columns.
    template <int V> DEVICE void write_a(int k, int column) const {
        float value[V] = {};
        if (k < rank) Pack<float, V>::load(a + static_cast<long long>(k) * i + column).unpack(value);
        Pack<T, V>::pack(value).store(a_out + k * stride + column);
    }

    DEVICE void write_b(int first_row, int rows) const {
        for (int at = threadIdx.x; at < rows * ranks; at += blockDim.x) {
            const int row = first_row + at / ranks, k = at % ranks - first;
            const bool own = k >= 0 && k < rank;
            out[row * stride + i + at % ranks] =
                from_float<T>(own ? b[static_cast<long long>(row) * rank + k] * scale : 0.0f);
        }
    }

    // V neighbors a thread, ROWS rows of them in flight.
    template <int V> DEVICE void run() const {
        constexpr int ROWS = 4;
        const float level = VALUES::level_of_lane();
        const int column = (blockIdx.x * blockDim.x + threadIdx.x) * V;
        const bool inside = column < i;
        for (int first_row = blockIdx.y * ROWS; first_row < o + a_rows; first_row += gridDim.y * ROWS) {
            typename VALUES::template Loaded<V> loaded[ROWS];
#pragma unroll
            for (int down = 0; down < ROWS; ++down) {
                const int row = first_row + down;
                loaded[down] = values.template load<V>(static_cast<long long>(blockIdx.z) * o + row, column, inside && row < o);
            }
#pragma unroll
            for (int down = 0; down < ROWS; ++down) {
                const int row = first_row + down;
                float value[V];
                VALUES::template unpack<V>(loaded[down], level, value);
                if (!inside || row >= o + a_rows) continue;
                if (row < o) Pack<T, V>::pack(value).store(out + row * stride + column);
                else write_a<V>(row - o, column);
            }
            if (blockIdx.x == 0 && first_row < o) write_b(first_row, min(ROWS, o - first_row));
        }
    }

    DEVICE void run(bool vectors) {
        choose_matrix();
        if (vectors && i % 8 == 0 && stride % 8 == 0 && aligned16(out, a_out, a)) run<8>();
        else run<1>();
    }
};

// See WriteOut. With ranks = 0 and a_rows = 0, `a`, `b` and `a_out` may be null. Codes lie on the 16-byte grid.
// Launch: block (whole warps, at most 256); grid (ceil(i / (8 * block)), any; ceil((o + a_rows) / 4) is fast, matrices), without
// the 8 where i or the stride is no multiple of 8 or an address is off the 16-byte grid; no shared memory.
#define QUANTIZED_WRITE_OUT(NAME, ROWS, COLUMNS, VALUES)                                                              \
    KERNEL __launch_bounds__(256) NAME(T *out, Stored stored, T *a_out, const float *a, const float *b, float scale,  \
                                       int o, int i, int rank, int first, int ranks, int a_rows, long long stride,    \
                                       long long matrix) {                                                            \
        WriteOut<VALUES> weight = {out, {stored, i}, a_out, a, b, scale, o, i, rank, first, ranks, a_rows, stride,    \
                                   matrix};                                                                           \
        weight.run(true);                                                                                             \
    }
QUANTIZED_FORMATS(QUANTIZED_WRITE_OUT)

// The same from a weight that is stored dense, without gaps, in E.
#define DENSE_WRITE_OUT(NAME, E)                                                                                      \
    KERNEL __launch_bounds__(256) NAME(T *out, const E *w, T *a_out, const float *a, const float *b, float scale,     \
                                       int o, int i, int rank, int first, int ranks, int a_rows, long long stride,    \
                                       long long matrix) {                                                            \
        WriteOut<DenseValues<E>> weight = {out, {w, i}, a_out, a, b, scale, o, i, rank, first, ranks, a_rows, stride, \
                                           matrix};                                                                   \
        weight.run(aligned16(w));                                                                                     \
    }
DENSE_WRITE_OUT(dense_write_out_bf16, bf16)
DENSE_WRITE_OUT(dense_write_out_f16, f16)
DENSE_WRITE_OUT(dense_write_out_f32, float)

// All A and s B of a group next to weights that are written already; see WriteOut. What no module has stays as it is.
// Launch: grid (any, matrices), any block, no shared memory.
KERNEL __launch_bounds__(256) write_adapters(T *out, Modules modules, int o, int i, long long stride, long long matrix) {
    out += blockIdx.y * matrix;
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int m = 0; m < modules.count; ++m) {
        const Module module = modules.of[m];
        const float *a = module.a + static_cast<long long>(blockIdx.y) * module.rank * i;
        const float *b = module.b + static_cast<long long>(blockIdx.y) * module.rows * module.rank;
        T *a_out = out + (o + module.first_rank) * stride;
        for (int at = first; at < module.rank * i; at += step)
            a_out[at / i * stride + at % i] = from_float<T>(a[at]);
        T *b_out = out + module.first_row * stride + i + module.first_rank;
        for (int at = first; at < module.rank * module.rows; at += step)
            b_out[at / module.rank * stride + at % module.rank] = from_float<T>(b[at] * module.scale);
    }
}
