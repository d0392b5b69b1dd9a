// Operands of 8-bit GEMMs in rows of codes, and their scales where a GEMM does not take those by rows. Compiled after weight_values.cu and
// fp8_codes.cu.
//
// What is where, for y = x Wᵀ + low (s B)ᵀ and dx = dy W + d_low A with low = x Aᵀ and d_low = dy s B:
//
//   quantize_rows     rows of activations:      [                 | x          |   ]    one scale per token
//   low_columns                                 [ balance * low   |            | 0 ]
//   columns_b         forward weight  [o, ..]:  [ s B / balance   |            | 0 ]    one scale per output row
//   weight_rows                                                   [ W          ]
//   columns_a         backward weight [i, ..]:  [ Aᵀ / balance    |            | 0 ]    scale 1
//   weight_columns                                                [ codes(W)ᵀ  ]
//   quantize_rows     rows of gradients:        [                 | dy * scale of W's row |   ]
//   low_columns                                 [ balance * d_low |                       | 0 ]
//
// The adapter comes first because sums keep only some 14 bits on the way: what is added to a large sum and is smaller
// than its last bit would be lost every time, while in the beginning of a sum it moves all that follows. It takes whole
// steps of 32 products, `lead` columns. Inner widths are filled up with zeros to a multiple that suits the GEMM (128).
//
// The backward multiplies with the codes of the forward, only transposed: the scales of W's rows go into the gradient
// before it is quantized.
//
// The two factors of an adapter share scales with something else, so each product is balanced by a power of two: as
// large as the adapter's side of the weight needs to stay below 448, and otherwise such that both sides stay clear of
// the smallest codes. Weights keep 32 times their largest value free for that, activations and gradients twice: codes
// near 448 are no more exact than codes near 14, and no value of a row that matters is near the smallest code.
//
// A stack has such matrices, scales, maxima and a balance for each expert, one after the other. blockIdx.y is the expert, or blockIdx.z for
// the kernels of W. What is read of W, of A and of B lies below each other too.
//
// Rows of codes begin on 16 bytes. Widths are multiples of 8. A row with a NaN or an infinity gets the scale NaN.

constexpr float LARGEST_CODE = 448.0f;
// What the largest value of a weight's row becomes.
template <class VALUES> constexpr float TOP_OF_WEIGHTS = FP8_TOP_OF_WEIGHTS;
template <> constexpr float TOP_OF_WEIGHTS<Mxfp4Values> = FP8_TOP_OF_MXFP4;

// ------------------------------------------------------------------------------------------------------------ balance

// Largest power of two that is not above a positive value.
DEVICE float power_below(float value) { return __uint_as_float(__float_as_uint(value) & 0x7f800000u); }

// The factor of low-rank values whose size is up to `row_size` in units of a typical value of the row, and that the
// weight's side, whose largest value is `weight_size` in units of its scale, is divided by.
DEVICE float balance(float row_size, float weight_size) {
    if (!(row_size > 0.0f) || !(weight_size > 0.0f)) return 1.0f;
    const float safe = 0.125f / row_size, least = weight_size / LARGEST_CODE;
    const float even = fminf(sqrtf(2.0f * weight_size * safe), safe);
    const float wanted = power_below(fmaxf(even, 1e-30f));
    return wanted >= least ? wanted : 2.0f * power_below(fmaxf(least, 1e-30f));
}

// maxima [gridDim.x]: of |A| and of |s B| / scale of the row; and all A and s B in T, one module after the other, `matrix` values from
// one expert to the next. Launch: grid (any, experts), block 256.
KERNEL __launch_bounds__(256) adapter_values(float2 *maxima, T *a_out, T *b_out, Modules modules,
                                             const float *row_scales, int inputs, int outputs, long long matrix) {
    const long long expert = blockIdx.y;
    maxima += expert * gridDim.x, a_out += expert * matrix, b_out += expert * matrix, row_scales += expert * outputs;
    unsigned of_a = 0, of_b = 0;
    const int first = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256;
    for (int m = 0; m < modules.count; ++m) {
        const Module module = modules.of[m];
        const int count_a = module.rank * inputs, count_b = module.rank * module.rows;
        const float *a = module.a + expert * count_a, *b = module.b + expert * count_b;
        for (int at = first; at < count_a; at += step) {
            const float value = a[at];
            of_a = max(of_a, magnitude(value));
            a_out[at] = from_float<T>(value);
        }
        for (int at = first; at < count_b; at += step) {
            const float value = b[at] * module.scale;
            of_b = max(of_b, magnitude(value * __frcp_rn(row_scales[module.first_row + at / module.rank])));
            b_out[at] = from_float<T>(value);
        }
        a_out += count_a, b_out += count_b;
    }
    of_a = block_max_bits(of_a), of_b = block_max_bits(of_b);
    if (threadIdx.x == 0) maxima[blockIdx.x] = make_float2(__uint_as_float(of_a), __uint_as_float(of_b));
}

// Both maxima, of `parts` pairs, in every thread.
DEVICE float2 all_maxima(const float2 *maxima, int parts) {
    unsigned of_a = 0, of_b = 0;
    for (int at = threadIdx.x; at < parts; at += blockDim.x) {
        const float2 part = maxima[at];
        of_a = max(of_a, magnitude(part.x)), of_b = max(of_b, magnitude(part.y));
    }
    of_a = block_max_bits(of_a), of_b = block_max_bits(of_b);
    return make_float2(__uint_as_float(of_a), __uint_as_float(of_b));
}

DEVICE void store_sixteen(unsigned char *to, const float (&value)[16]) {
    unsigned word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        word[k] = e4m3x2(value[4 * k], value[4 * k + 1]) | e4m3x2(value[4 * k + 2], value[4 * k + 3]) << 16;
    *reinterpret_cast<uint4 *>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// Columns [0, lead) and [lead + inputs, stride) of the forward weight [o, stride]: s B / balance under the scale of each
// row, and zeros; and the balance itself. A thread writes sixteen columns of a row. Launch: block 256, grid (ceil(o * (stride - inputs) /
// 4096), experts).
KERNEL __launch_bounds__(256) columns_b(unsigned char *codes, float *used, const float2 *maxima, int parts, Modules modules,
                                        const float *row_scales, int outputs, int inputs, int lead, int stride) {
    const long long expert = blockIdx.y;
    codes += expert * outputs * stride, row_scales += expert * outputs;
    const float2 largest = all_maxima(maxima + expert * parts, parts);
    const float factor = balance(largest.x * sqrtf(static_cast<float>(inputs)), largest.y);
    if (blockIdx.x == 0 && threadIdx.x == 0) used[expert] = factor;
    const int pieces = (stride - inputs) / 16, at = blockIdx.x * 256 + threadIdx.x;
    if (at >= outputs * pieces) return;
    const int row = at / pieces, first = at % pieces * 16;
    const float by = __frcp_rn(row_scales[row] * factor);
    float value[16] = {};
    for (int m = 0; m < modules.count; ++m) {
        const Module module = modules.of[m];
        const int own_row = row - module.first_row;
        if (own_row < 0 || own_row >= module.rows) continue;
        const float *b = module.b + (expert * module.rows + own_row) * module.rank;
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            const int k = first + c - module.first_rank;
            if (k >= 0 && k < module.rank) value[c] = b[k] * module.scale * by;
        }
    }
    store_sixteen(codes + static_cast<long long>(row) * stride + first + (first < lead ? 0 : inputs), value);
}

// Columns [0, lead) and [lead + outputs, stride) of the backward weight [i, stride]: Aᵀ / balance, and zeros; the scales
// of all rows, 1; and the balance itself. A thread writes sixteen columns of a row; neighbors have neighboring rows. Launch: block 256, grid
// (ceil(i * max(stride - outputs, 16) / 4096), experts).
KERNEL __launch_bounds__(256) columns_a(unsigned char *codes, float *scales, float *used, const float2 *maxima, int parts,
                                        Modules modules, int outputs, int inputs, int lead, int stride) {
    const long long expert = blockIdx.y;
    codes += expert * inputs * stride, scales += expert * inputs;
    const int at = blockIdx.x * 256 + threadIdx.x, row = at % inputs, first = at / inputs * 16;
    if (at < inputs) scales[at] = 1.0f;
    if (modules.count == 0 && outputs == stride) return;
    const float2 largest = all_maxima(maxima + expert * parts, parts);
    const float factor = balance(largest.y * sqrtf(static_cast<float>(outputs)), largest.x);
    if (blockIdx.x == 0 && threadIdx.x == 0) used[expert] = factor;
    if (first >= stride - outputs) return;
    const float by = __frcp_rn(factor);
    float value[16] = {};
    for (int m = 0; m < modules.count; ++m) {
        const Module module = modules.of[m];
        const float *a = module.a + expert * module.rank * inputs;
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            const int k = first + c - module.first_rank;
            if (k >= 0 && k < module.rank) value[c] = a[static_cast<long long>(k) * inputs + row] * by;
        }
    }
    store_sixteen(codes + static_cast<long long>(row) * stride + first + (first < lead ? 0 : outputs), value);
}

// --------------------------------------------------------------------------------------------------------------- rows

// Vectors of eight values that a thread keeps between the two passes over a row.
constexpr int KEPT = 4;

// Codes of x [n, width] at its row stride. Launch: grid n, block threads for width / 8 / KEPT, whole warps, at most 1024. x and
// rows of codes on 16 bytes.
DEVICE void quantize_row(const RowsOfCodes &out, long long row, const T *x, int width) {
    const int vectors = width / 8;
    Pack<T, 8> kept[KEPT];
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int at = threadIdx.x + k * blockDim.x;
        if (at < vectors) kept[k] = Pack<T, 8>::load(x + at * 8);
    }
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int at = threadIdx.x + k * blockDim.x;
        if (at < vectors) largest = max(largest, out.largest(kept[k], at * 8));
    }
    for (int at = threadIdx.x + KEPT * blockDim.x; at < vectors; at += blockDim.x)
        largest = max(largest, out.largest(Pack<T, 8>::load(x + at * 8), at * 8));
    const RowScale of_row = out.scale_of(row, largest);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        const int at = threadIdx.x + k * blockDim.x;
        if (at < vectors) out.store(row, of_row, kept[k], at * 8);
    }
    for (int at = threadIdx.x + KEPT * blockDim.x; at < vectors; at += blockDim.x)
        out.store(row, of_row, Pack<T, 8>::load(x + at * 8), at * 8);
}

KERNEL __launch_bounds__(1024) quantize_rows(RowsOfCodes out, const T *x, long long x_stride, int width) {
    quantize_row(out, blockIdx.x, x + blockIdx.x * x_stride, width);
}

// The same with the column scales of each row's expert.
KERNEL __launch_bounds__(1024) quantize_expert_rows(RowsOfCodes out, const T *x, long long x_stride, int width) {
    quantize_row(out.of_expert(blockIdx.x), blockIdx.x, x + blockIdx.x * x_stride, width);
}

// The other columns of the codes of n rows of `width` values: `low` [n, ranks] times *factor, or the factor of the row's expert, under the
// scale of the row, then zeros up to `lead`, and zeros after the values. A thread writes sixteen columns. Launch: block 256, grid ceil(n * (stride - width) / 4096).
KERNEL __launch_bounds__(256) low_columns(RowsOfCodes out, const T *low, long long low_stride, const float *factor,
                                          long long n, int ranks, int width) {
    const int pieces = (out.stride - width) / 16;
    const long long at = blockIdx.x * 256ll + threadIdx.x, row = at / pieces;
    if (row >= n) return;
    const int first = static_cast<int>(at % pieces) * 16;
    float value[16] = {};
    if (first < ranks) {
        const float by = factor[out.starts == nullptr ? 0 : out.expert_of(row)] * __fdiv_rn(1.0f, out.scales[row]);
#pragma unroll
        for (int c = 0; c < 16; ++c)
            if (first + c < ranks) value[c] = to_float(low[row * low_stride + first + c]) * by;
    }
    store_sixteen(out.codes + row * out.stride + first + (first < out.lead ? 0 : width), value);
}

// Scale of a weight's row, and what its values are multiplied by: of a scale, so that it is the same whenever it is known.
DEVICE float weight_factor(float scale) { return __fdiv_rn(1.0f, scale); }

// codes [o, i] at a row stride and scales [o] of a weight [o, i]; where the scales are known they are read. A stack has `outputs` rows of
// codes, those of all its modules, from one expert to the next. Launch: grid (o, 1, experts), block 256.
template <class VALUES>
DEVICE void weight_rows(unsigned char *codes, float *scales, VALUES values, int inputs, int outputs, int stride,
                        bool is_known, bool powers_of_two) {
    const long long row = static_cast<long long>(blockIdx.z) * gridDim.x + blockIdx.x;
    const long long to = static_cast<long long>(blockIdx.z) * outputs + blockIdx.x;
    const float level = VALUES::level_of_lane();
    codes += to * stride;
    const int vectors = inputs / 8;
    float value[8];
    if (!is_known) {
        unsigned largest = 0;
        // All lanes decode: the bounds are those of the block.
        for (int start = 0; start < vectors; start += blockDim.x) {
            const int at = start + threadIdx.x;
            VALUES::template unpack<8>(values.template load<8>(row, at * 8, at < vectors), level, value);
            if (at < vectors) largest = max(largest, magnitude(value));
        }
        const RowScale of_row(block_max_bits(largest), TOP_OF_WEIGHTS<VALUES>, powers_of_two);
        if (threadIdx.x == 0) scales[to] = of_row.scale;
        __syncthreads();
    }
    const float factor = weight_factor(scales[to]);
    for (int start = 0; start < vectors; start += blockDim.x) {
        const int at = start + threadIdx.x;
        VALUES::template unpack<8>(values.template load<8>(row, at * 8, at < vectors), level, value);
        if (at >= vectors) continue;
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] *= factor;
        store_codes(codes + at * 8, value);
    }
}

// codes [i, o] at a row stride of a weight [o, i], transposed, under the scales of its rows; o and i are multiples of 16. A stack has the scales of
// all its modules, `all_outputs`, from one expert to the next. Launch: grid (ceil(i / 128), ceil(o / 128), experts), block 256.
template <class VALUES>
DEVICE void weight_columns(unsigned char *codes, const float *scales, VALUES values, int outputs, int all_outputs,
                           int inputs, long long stride) {
    constexpr int TILE = 128;
    __shared__ unsigned tile[TILE][TILE / 4 + 1];
    __shared__ float factors[TILE];
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    const long long expert = blockIdx.z, before = expert * outputs;
    codes += expert * inputs * stride, scales += expert * all_outputs;
    const float level = VALUES::level_of_lane();
    if (threadIdx.x < TILE && first_row + threadIdx.x < outputs)
        factors[threadIdx.x] = weight_factor(scales[first_row + threadIdx.x]);
    __syncthreads();
#pragma unroll 4
    for (int step = 0; step < 8; ++step) {
        const int at = step * 256 + threadIdx.x, row = at / 16, column = at % 16 * 8;
        const bool inside = first_row + row < outputs && first_column + column < inputs;
        float value[8];
        VALUES::template unpack<8>(values.template load<8>(before + first_row + row, first_column + column, inside), level, value);
        if (!inside) continue;
        const float factor = factors[row];
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] *= factor;
        tile[row][column / 4] = e4m3x2(value[0], value[1]) | e4m3x2(value[2], value[3]) << 16;
        tile[row][column / 4 + 1] = e4m3x2(value[4], value[5]) | e4m3x2(value[6], value[7]) << 16;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int at = step * 256 + threadIdx.x, column = at / 8, row = at % 8 * 16;
        if (first_row + row >= outputs || first_column + column >= inputs) continue;
        unsigned out[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            unsigned bytes = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const unsigned source = tile[row + word * 4 + k][column / 4];
                bytes |= (source >> (column % 4 * 8) & 0xffu) << (k * 8);
            }
            out[word] = bytes;
        }
        *reinterpret_cast<uint4 *>(codes + (first_column + column) * stride + first_row + row) =
            make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// Both for each kind of weight: rows(codes, scales, i, all o, stride, is_known, powers_of_two, weight) and columns(codes, scales, o, all o, i,
// stride, weight). Codes and dense values are aligned to 16 bytes.
#define QUANTIZED_WEIGHT_ROWS(WRITE_OUT, ROWS, COLUMNS, VALUES)                                                       \
    KERNEL __launch_bounds__(256) ROWS(unsigned char *out, float *row_scales, int inputs, int outputs, int stride,    \
                                       int is_known, int powers_of_two, Stored stored) {                              \
        weight_rows(out, row_scales, VALUES{stored, inputs}, inputs, outputs, stride, is_known != 0,                  \
                    powers_of_two != 0);                                                                              \
    }
QUANTIZED_FORMATS(QUANTIZED_WEIGHT_ROWS)

#define QUANTIZED_WEIGHT_COLUMNS(WRITE_OUT, ROWS, COLUMNS, VALUES)                                                    \
    KERNEL __launch_bounds__(256) COLUMNS(unsigned char *out, const float *row_scales, int outputs, int all_outputs,  \
                                          int inputs, long long stride, Stored stored) {                              \
        weight_columns(out, row_scales, VALUES{stored, inputs}, outputs, all_outputs, inputs, stride);                \
    }
QUANTIZED_FORMATS(QUANTIZED_WEIGHT_COLUMNS)

#define DENSE_WEIGHT_ROWS(NAME, E)                                                                                    \
    KERNEL __launch_bounds__(256) NAME(unsigned char *out, float *row_scales, int inputs, int outputs, int stride,    \
                                       int is_known, int powers_of_two, const E *w) {                                 \
        weight_rows(out, row_scales, DenseValues<E>{w, inputs}, inputs, outputs, stride, is_known != 0,               \
                    powers_of_two != 0);                                                                              \
    }
DENSE_WEIGHT_ROWS(bf16_weight_rows, bf16)
DENSE_WEIGHT_ROWS(f16_weight_rows, f16)
DENSE_WEIGHT_ROWS(f32_weight_rows, float)

#define DENSE_WEIGHT_COLUMNS(NAME, E)                                                                                 \
    KERNEL __launch_bounds__(256) NAME(unsigned char *out, const float *row_scales, int outputs, int all_outputs,     \
                                       int inputs, long long stride, const E *w) {                                    \
        weight_columns(out, row_scales, DenseValues<E>{w, inputs}, outputs, all_outputs, inputs, stride);             \
    }
DENSE_WEIGHT_COLUMNS(bf16_weight_columns, bf16)
DENSE_WEIGHT_COLUMNS(f16_weight_columns, f16)
DENSE_WEIGHT_COLUMNS(f32_weight_columns, float)

// -------------------------------------------------------------------------------- scales that a GEMM does not take by rows

// E8M0 scales of blocks of 32 codes: the power of two of each row in all its blocks. They lie in tiles of 128 rows by four
// blocks, in which rows 32 apart are side by side, as cuBLASLt reads them; rows after the last get 1. A thread
// writes four rows of a tile. Launch: block 256, grid ceil(rows / 128) * tiles / 8, rounded up.
KERNEL __launch_bounds__(256) block_scales(uint4 *blocks, const float *scales, int rows, int tiles) {
    const int at = blockIdx.x * 256 + threadIdx.x, tile = at / 32, first = tile / tiles * 128 + at % 32;
    if (tile >= (rows + 127) / 128 * tiles) return;
    unsigned word[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int row = first + part * 32;
        const unsigned exponent = row < rows ? __float_as_uint(scales[row]) >> 23 & 0xffu : 127u;
        word[part] = exponent * 0x01010101u;
    }
    blocks[at] = make_uint4(word[0], word[1], word[2], word[3]);
}

// d [n, width], what a GEMM of bare codes gave, times the scales of its rows and columns, plus c, which has the same strides, and
// bias, each where it is given. A thread has eight columns; rows on 16 bytes. Launch: block 256, grid ceil(n * width / 2048).
KERNEL __launch_bounds__(256) scale_products(T *d, long long stride, const float *row_scales, const float *column_scales,
                                             const T *c, const T *bias, long long n, int width) {
    const int vectors = width / 8;
    const long long at = blockIdx.x * 256ll + threadIdx.x, row = at / vectors;
    if (row >= n) return;
    const int column = static_cast<int>(at % vectors) * 8;
    const long long place = row * stride + column;
    float value[8], by[8], added[8];
    Pack<T, 8>::load(d + place).unpack(value);
    Pack<float, 8>::load(column_scales + column).unpack(by);
    const float of_row = row_scales[row];
#pragma unroll
    for (int k = 0; k < 8; ++k) value[k] *= of_row * by[k];
    if (c != nullptr) {
        Pack<T, 8>::load(c + place).unpack(added);
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] += added[k];
    }
    if (bias != nullptr) {
        Pack<T, 8>::load(bias + column).unpack(added);
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] += added[k];
    }
    Pack<T, 8>::pack(value).store(d + place);
}
