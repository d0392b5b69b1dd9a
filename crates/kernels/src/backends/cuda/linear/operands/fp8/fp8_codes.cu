// Rows of E4M3 codes (4 exponent bits, 3 of mantissa, up to 448, no infinity) with one f32 scale per row; a value is
// code * scale. For every source that writes such rows. Needs sm_89 (the conversion instruction). The numbers of the recipe
// (FP8_...) are those of firebrick-precision, `linear`.

// Codes of two values, the first in the low byte; beyond 448 is 448, NaN is 0x7f.
DEVICE unsigned e4m3x2(float first, float second) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
}

DEVICE void store_codes(unsigned char *to, const float (&value)[8]) {
    uint2 codes;
    codes.x = e4m3x2(value[0], value[1]) | e4m3x2(value[2], value[3]) << 16;
    codes.y = e4m3x2(value[4], value[5]) | e4m3x2(value[6], value[7]) << 16;
    *reinterpret_cast<uint2 *>(to) = codes;
}

// The larger magnitude, as bits: without their sign floats are ordered as their bits are, NaN on top.
DEVICE unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

template <int V> DEVICE unsigned magnitude(const float (&value)[V]) {
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) largest = max(largest, magnitude(value[k]));
    return largest;
}

// Over a block of whole warps; every thread gets the result.
DEVICE unsigned block_max_bits(unsigned bits) {
    __shared__ unsigned partial[32];
    bits = __reduce_max_sync(0xffffffffu, bits);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    return __reduce_max_sync(0xffffffffu, lane < blockDim.x / 32 ? partial[lane] : 0u);
}

// Smallest power of two that is not below a positive value.
DEVICE float power_above(float value) {
    const unsigned bits = __float_as_uint(value), power = bits & 0x7f800000u;
    return __uint_as_float(bits == power ? power : power + 0x00800000u);
}

// Scale of a row whose largest magnitude becomes `top`, or at most `top` under a power of two, and what values are multiplied by.
struct RowScale {
    float scale, factor;

    DEVICE RowScale(unsigned bits, float top, bool powers_of_two) {
        const float largest = fmaxf(__uint_as_float(bits), FP8_AMAX_FLOOR);
        scale = __fdiv_rn(largest, top), factor = __fdiv_rn(top, largest);
        if (powers_of_two) scale = power_above(scale), factor = __fdiv_rn(1.0f, scale);
        if (bits >= 0x7f800000u) scale = factor = __uint_as_float(0x7fffffffu);
    }
};

// ----------------------------------------------------------------------------------------- rows that a block has at hand

// Rows [n, width] of codes among rows of `stride` bytes: columns before `lead` and after the last are left to
// `low_columns`. Where column scales are given, what is quantized is the value times the scale of its column. Scales are
// powers of two where the GEMM takes no others. Rows of experts are sorted by expert: expert e has rows starts[e] to
// starts[e + 1] and its own column scales, `columns` after those of the one before. `starts` is null for other rows.
struct RowsOfCodes {
    unsigned char *codes;
    float *scales;
    const float *column_scales;
    const int *starts;
    int lead, stride, powers_of_two, experts, columns, unused;

    DEVICE int expert_of(long long row) const {
        int first = 0, end = experts;
        while (end - first > 1) {
            const int middle = (first + end) / 2;
            if (starts[middle] <= row) first = middle;
            else end = middle;
        }
        return first;
    }

    // The same rows with the column scales of the row's expert. Kernels whose rows may have these exist twice, since the search
    // took registers from rows that have none.
    DEVICE RowsOfCodes of_expert(long long row) const {
        RowsOfCodes rows = *this;
        rows.column_scales += expert_of(row) * columns;
        return rows;
    }

    // Eight values from column `at` on, as they are quantized.
    DEVICE void values(const Pack<T, 8> &pack, int at, float (&value)[8]) const {
        pack.unpack(value);
        if (column_scales == nullptr) return;
        float by[8];
        Pack<float, 8>::load(column_scales + at).unpack(by);
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] *= by[k];
    }

    DEVICE unsigned largest(const Pack<T, 8> &pack, int at) const {
        float value[8];
        values(pack, at, value);
        return magnitude(value);
    }

    DEVICE void store(long long row, const RowScale &of_row, const Pack<T, 8> &pack, int at) const {
        float value[8];
        values(pack, at, value);
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] *= of_row.factor;
        store_codes(codes + row * stride + lead + at, value);
    }

    // The scale of a row from the largest magnitude that each thread has seen, also in memory.
    DEVICE RowScale scale_of(long long row, unsigned seen) const {
        const RowScale of_row(block_max_bits(seen), FP8_TOP_OF_ROWS, powers_of_two != 0);
        if (threadIdx.x == 0) scales[row] = of_row.scale;
        return of_row;
    }
};
