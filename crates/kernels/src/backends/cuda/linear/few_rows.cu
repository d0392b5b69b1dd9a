// Linear layers over few rows, y = x Wᵀ + bias + s B (A x) + residual: what a step of generation multiplies. Compiled after
// matrix_units.cu and weight_values.cu, which has the layouts of weights.
//
// Weights are read once, as they are stored, and decoded in registers into operands of the matrix units; each is rounded to T as
// write_out.cu does. The adapters' part is computed in f32 from A and B as they are stored, and added before the one rounding of the
// output. A block has 16 * M outputs of up to 8 * N rows: its warps divide the inner dimension and add up their sums in a fixed order.
// Trade-off: the inner dimension must be a multiple of 32, and x is read again for each block of outputs, which is right for up
// to 64 rows.
//
// Macro of the host: WEIGHT_VALUES, the struct of weight_values.cu that reads the weights.

constexpr int MAX_MODULES = 4;
constexpr int WARPS = 8;
// Inner columns that a warp multiplies in one step: a chunk for each of the four lanes that share a row.
constexpr int STEP = 4 * CHUNK;

// A module of the group: its columns of the output begin at `first_column`. B [rows, rank] and A [rank, inputs] are f32, or null.
struct Module {
    Stored stored;
    const float *a, *b;
    const void *bias;
    int rows, first_column, first_tile, rank, first_rank, bias_is_f32;
    float scale;
    int unused;
};

struct Modules {
    Module of[MAX_MODULES];
    int count, ranks;
};

template <class VALUES> struct ValuesOf {
    static DEVICE VALUES of(const Stored &stored, int inputs) { return VALUES{stored, inputs}; }
};
template <class E> struct ValuesOf<DenseValues<E>> {
    static DEVICE DenseValues<E> of(const Stored &stored, int inputs) {
        return DenseValues<E>{reinterpret_cast<const E *>(stored.codes), inputs};
    }
};

// One step of a warp: the weights of 16 rows, as the lanes of the matrix units hold them.
template <class VALUES, int M> struct Weights {
    typename VALUES::Chunk chunk[M][2];
    bool inside[M][2];
};

template <class VALUES, int M, int N> struct FewRows {
    static constexpr int OUTPUTS = 16 * M, ROWS = 8 * N;

    VALUES values;
    const Module &module;
    int inputs, first_row;

    // Rows lane / 4 and lane / 4 + 8 of each tile, this lane's chunk of the step.
    DEVICE Weights<VALUES, M> load(int step) const {
        const int lane = threadIdx.x % 32, column = step * STEP + lane % 4 * CHUNK;
        Weights<VALUES, M> weights;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + m * 16 + half * 8 + lane / 4;
                weights.inside[m][half] = column < inputs && row < module.rows;
                weights.chunk[m][half] = values.load_chunk(row, column, weights.inside[m][half]);
            }
        }
        return weights;
    }

    // sums += the weights times the rows of x. Sums over columns in any order that weights and rows share: a lane of the matrix
    // units gets neighbors.
    DEVICE void multiply(float (&sums)[M][N][4], const Weights<VALUES, M> &weights, const T *x, long long x_stride, int n,
                         int step, float level) const {
        const int lane = threadIdx.x % 32, column = step * STEP + lane % 4 * CHUNK;
        const int from = column < inputs ? column : 0;
#pragma unroll
        for (int part = 0; part < CHUNK / 8; ++part) {
            Word a[M][2][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float value[8];
                    values.unpack_part(weights.chunk[m][half], part, weights.inside[m][half], level, value);
                    // Registers 0 and 2 of an operand are of the upper rows, 1 and 3 of the lower ones.
                    a[m][0][half] = pack2<T>(value[0], value[1]), a[m][0][2 + half] = pack2<T>(value[2], value[3]);
                    a[m][1][half] = pack2<T>(value[4], value[5]), a[m][1][2 + half] = pack2<T>(value[6], value[7]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                const int row = min(tile * 8 + lane / 4, n - 1);
                const uint4 b = *reinterpret_cast<const uint4 *>(x + row * x_stride + from + part * 8);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(sums[m][tile], a[m][0], b.x, b.y);
                    multiply_add(sums[m][tile], a[m][1], b.z, b.w);
                }
            }
        }
    }

    // Adds the sums of all warps; the result is in `total`, [row][output].
    DEVICE void add_up(float *total, const float (&sums)[M][N][4]) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float *own = total + warp % (WARPS / 2) * OUTPUTS * ROWS;
        const auto each = [&](auto function) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int tile = 0; tile < N; ++tile)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int row = tile * 8 + lane % 4 * 2 + k % 2, output = m * 16 + lane / 4 + k / 2 * 8;
                        function(own[row * OUTPUTS + output], sums[m][tile][k]);
                    }
        };
        if (warp >= WARPS / 2) each([](float &to, float value) { to = value; });
        __syncthreads();
        if (warp < WARPS / 2) each([](float &to, float value) { to += value; });
        __syncthreads();
    }

    // What the adapter adds to an output.
    DEVICE float adapted(const float *low, int row, int output, int ranks) const {
        float sum = 0.0f;
        const float *b = module.b + static_cast<long long>(output) * module.rank;
        const float *of_row = low + static_cast<long long>(row) * ranks + module.first_rank;
        for (int k = 0; k < module.rank; ++k) sum += of_row[k] * b[k];
        return sum * module.scale;
    }

    DEVICE float bias(int output) const {
        if (module.bias == nullptr) return 0.0f;
        return module.bias_is_f32 ? static_cast<const float *>(module.bias)[output]
                                  : to_float(static_cast<const T *>(module.bias)[output]);
    }

    DEVICE void run(T *y, long long y_stride, const T *x, long long x_stride, const float *low, int ranks,
                    const T *residual, long long residual_stride, int n) const {
        __shared__ float total[WARPS / 2 * OUTPUTS * ROWS];
        const float level = VALUES::level_of_lane();
        const int warp = threadIdx.x / 32, steps = (inputs + STEP - 1) / STEP;
        float sums[M][N][4] = {};
        Weights<VALUES, M> next = load(warp);
        for (int step = warp; step < steps; step += WARPS) {
            const Weights<VALUES, M> weights = next;
            next = load(step + WARPS);
            multiply(sums, weights, x, x_stride, n, step, level);
        }
        add_up(total, sums);
        for (int at = threadIdx.x; at < OUTPUTS * ROWS; at += WARPS * 32) {
            const int row = at / OUTPUTS, output = first_row + at % OUTPUTS;
            if (row >= n || output >= module.rows) continue;
            float value = 0.0f;
#pragma unroll
            for (int part = 0; part < WARPS / 2; ++part) value += total[part * OUTPUTS * ROWS + at];
            value += bias(output);
            if (module.b != nullptr) value += adapted(low, row, output, ranks);
            const int column = module.first_column + output;
            if (residual != nullptr) value += to_float(residual[row * residual_stride + column]);
            y[row * y_stride + column] = from_float<T>(value);
        }
    }
};

template <class VALUES, int M, int N>
DEVICE void few_rows(T *y, long long y_stride, const T *x, long long x_stride, const Modules &modules, const float *low,
                     const T *residual, long long residual_stride, int n, int inputs) {
    int index = 0;
    while (index + 1 < modules.count && static_cast<int>(blockIdx.x) >= modules.of[index + 1].first_tile) ++index;
    const Module &module = modules.of[index];
    const int first_row = (blockIdx.x - module.first_tile) * 16 * M;
    const FewRows<VALUES, M, N> product = {ValuesOf<VALUES>::of(module.stored, inputs), module, inputs, first_row};
    product.run(y, y_stride, x, x_stride, low, modules.ranks, residual, residual_stride, n);
}

// y [n, all rows of the modules] from x [n, inputs], 1 <= n <= 8 * N; low [n, ranks] is x Aᵀ (adapter_rows), null without adapters;
// the residual may be null, and may be y. Rows of x lie on 16 bytes.
// Launch: grid (the tiles of all modules, a module's first_tile counting those before it, ceil(rows / (16 * M)) each), block 256.
#define FEW_ROWS(NAME, M, N, BLOCKS)                                                                                  \
    KERNEL __launch_bounds__(256, BLOCKS)                                                                             \
    NAME(T *y, long long y_stride, const T *x, long long x_stride, const __grid_constant__ Modules modules,           \
         const float *low, const T *residual, long long residual_stride, int n, int inputs) {                        \
        few_rows<WEIGHT_VALUES, M, N>(y, y_stride, x, x_stride, modules, low, residual, residual_stride, n, inputs);         \
    }
FEW_ROWS(few_rows_8, 1, 1, 2)
FEW_ROWS(few_rows_16, 1, 2, 2)
FEW_ROWS(few_rows_32, 2, 4, 1)
FEW_ROWS(few_rows_64, 2, 8, 1)

// low [n, ranks] = x Aᵀ of all adapters in f32. inputs is a multiple of 8; rows of x and A lie on 16 bytes.
// Launch: grid (ranks, ceil(n / 8)), block 256.
KERNEL __launch_bounds__(256)
adapter_rows(float *low, const T *x, long long x_stride, const __grid_constant__ Modules modules, int n, int inputs) {
    __shared__ float parts[WARPS][8];
    int index = 0;
    const int rank = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * 8;
    while (rank >= modules.of[index].first_rank + modules.of[index].rank) ++index;
    const float *a = modules.of[index].a + static_cast<long long>(rank - modules.of[index].first_rank) * inputs;
    float sums[8] = {};
    for (int column = threadIdx.x * 8; column < inputs; column += 256 * 8) {
        float factors[8];
        load8(a + column, factors);
#pragma unroll
        for (int row = 0; row < 8; ++row) {
            if (first + row >= n) break;
            float value[8];
            load8(x + (first + row) * x_stride + column, value);
#pragma unroll
            for (int k = 0; k < 8; ++k) sums[row] += factors[k] * value[k];
        }
    }
#pragma unroll
    for (int row = 0; row < 8; ++row) {
        const float sum = warp_sum(sums[row]);
        if (lane == 0) parts[warp][row] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= 8 || first + threadIdx.x >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += parts[part][threadIdx.x];
    low[static_cast<long long>(first + threadIdx.x) * modules.ranks + rank] = sum;
}
