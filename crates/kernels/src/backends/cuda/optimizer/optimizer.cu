// The optimizer: global norm, AdamW, and AdamW with moments in 8 bits (bitsandbytes' block-wise kernel), on parameters in
// f32 or bf16. Gradients of those in bf16, and what the norm reads, are T.
//
// The kernels named _foreach take up to MAX_TENSORS tensors by value, since adapters are hundreds of small tensors: a list of
// pointers and sizes, and where each tensor's pieces begin among those of the launch. The numbers of a step come as
// `Rates`, which the host computes in f64 and rounds once. Arithmetic is that of optimizer/reference.rs, operation by
// operation and without fusing.
//
// In place. Tensors are read and written as 16 bytes where all pointers of one are aligned to that, else value by
// value.

// Which tensor piece `piece` of a launch belongs to: the last whose first piece is not after it.
DEVICE int tensor_of(const int *first_piece, int tensors, int piece) {
    int low = 0;
#pragma unroll
    for (int step = MAX_TENSORS / 2; step > 0; step /= 2)
        if (low + step < tensors && first_piece[low + step] <= piece) low += step;
    return low;
}

// The numbers of one step t, for AdamW and for its 8-bit form.
struct Rates {
    float beta1, rest1; // rest1 = 1 - beta1
    float beta2, rest2;
    float step_size;       // lr / c1, c1 = 1 - beta1^t; in 8 bits lr c2 / c1
    float kept;            // 1 - lr * weight decay
    float epsilon;         // in 8 bits c2 * epsilon
    float root_correction; // c2 = sqrt(1 - beta2^t); not used in 8 bits
};

// ---------------------------------------------------------------------------------------------------------------- norm

struct NormTable {
    const T *x[MAX_TENSORS];
    long long n[MAX_TENSORS];
    int first_piece[MAX_TENSORS]; // pieces of NORM_PIECE values: the sum of their counts in the tensors before
    int tensors;
};

// partial[first_partial + piece] = sum of the squares of a piece of NORM_PIECE values. Launch: block 256; grid = all pieces.
KERNEL __launch_bounds__(256) squared_norm_partial(float *partial, int first_partial,
                                                   const __grid_constant__ NormTable table) {
    constexpr int ROUND = 256 * 4;
    const int tensor = tensor_of(table.first_piece, table.tensors, blockIdx.x);
    const long long start = static_cast<long long>(blockIdx.x - table.first_piece[tensor]) * NORM_PIECE;
    const T *x = table.x[tensor] + start;
    const long long left = table.n[tensor] - start;
    float sum[4] = {};
    if (left >= NORM_PIECE && aligned16(x)) {
#pragma unroll 8
        for (int round = 0; round < NORM_PIECE / ROUND; ++round) {
            float value[4];
            Pack<T, 4>::load(x + round * ROUND + threadIdx.x * 4).unpack(value);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[k] = fmaf(value[k], value[k], sum[k]);
        }
    } else {
        const int count = left < NORM_PIECE ? static_cast<int>(left) : NORM_PIECE;
#pragma unroll 4
        for (int round = 0; round < NORM_PIECE / ROUND; ++round)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int at = round * ROUND + threadIdx.x * 4 + k;
                const float value = at < count ? to_float(x[at]) : 0.0f;
                sum[k] = fmaf(value, value, sum[k]);
            }
    }
    const float total = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) partial[first_partial + blockIdx.x] = total;
}

// out[1] = sum of partial[count], added in f64 in a fixed order. Launch: grid 1, block 1024.
KERNEL __launch_bounds__(1024) sum_partials(float *out, const float *partial, int count) {
    __shared__ double sums[1024];
    double sum = 0.0;
    for (long long at = threadIdx.x; at < count; at += 1024) sum += partial[at];
    sums[threadIdx.x] = sum;
    for (int step = 512; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    }
    if (threadIdx.x == 0) *out = static_cast<float>(sums[0]);
}

// norm[1] = sqrt(squared_norm[1]); factor[1] = min(1, max_norm / (norm + 1e-6)), NaN if the norm is not finite or above the limit.
// Launch: one thread.
KERNEL clip(float *norm, float *factor, const float *squared_norm, float max_norm, float limit) {
    const float root = sqrtf(*squared_norm);
    *norm = root;
    // A NaN is above no limit, but not below either.
    *factor = root <= limit ? fminf(max_norm * (1.0f / (root + 1e-6f)), 1.0f) : __int_as_float(0x7fc00000);
}

// ------------------------------------------------------------------------------------------------------- sums of ranges

struct RangesTable {
    float *to[MAX_TENSORS];
    const float *from[MAX_TENSORS];
    long long n[MAX_TENSORS];
    int first_piece[MAX_TENSORS]; // pieces of RANGE_PIECE values
    int tensors;
    unsigned char adds[MAX_TENSORS]; // 0: the range is written for the first time
};

// to = from, or to += from, RANGE_PIECE values per block.
template <int V> DEVICE void range_piece(float *to, const float *from, bool adds, long long start, long long n) {
    constexpr int UNROLL = 8 / V;
    typedef Pack<float, V> Values;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long at = start + (u * 256 + threadIdx.x) * V;
        if (at >= n) continue;
        float value[V], earlier[V] = {};
        Values::load_streaming(from + at).unpack(value);
        if (adds) Values::load(to + at).unpack(earlier);
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = adds ? __fadd_rn(earlier[k], value[k]) : value[k];
        Values::pack(value).store(to + at);
    }
}

// Gradients of many parameters into their ranges of one sum. Launch: block 256; grid = all pieces.
KERNEL __launch_bounds__(256) accumulate_ranges(const __grid_constant__ RangesTable table) {
    const int tensor = tensor_of(table.first_piece, table.tensors, blockIdx.x);
    const long long start = static_cast<long long>(blockIdx.x - table.first_piece[tensor]) * RANGE_PIECE;
    float *to = table.to[tensor];
    const float *from = table.from[tensor];
    const long long n = table.n[tensor];
    const bool adds = table.adds[tensor] != 0;
    if (n % 4 == 0 && aligned16(to, from)) range_piece<4>(to, from, adds, start, n);
    else range_piece<1>(to, from, adds, start, n);
}

// --------------------------------------------------------------------------------------------------------------- AdamW

// Neither infinite nor NaN, by the bits: no compiler option changes that.
DEVICE bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

// p (1 - lr wd) - lr m^ / (sqrt(v^) + eps): decay first, as torch does it.
DEVICE void adamw_value(float &p, float g, float &m, float &v, float scale, const Rates &rates) {
    g = __fmul_rn(g, scale);
    m = __fadd_rn(__fmul_rn(m, rates.beta1), __fmul_rn(g, rates.rest1));
    v = __fadd_rn(__fmul_rn(v, rates.beta2), __fmul_rn(__fmul_rn(g, g), rates.rest2));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), rates.root_correction), rates.epsilon);
    p = __fsub_rn(__fmul_rn(p, rates.kept), __fmul_rn(__fdiv_rn(m, denominator), rates.step_size));
}

// V values per thread, UNROLL of them in flight, from `start` on.
template <int V>
DEVICE void adamw_piece(float *p, const float *g, float *m, float *v, float scale, const Rates &rates, long long start,
                        long long n) {
    constexpr int UNROLL = 8 / V;
    typedef Pack<float, V> Values;
    Values packs[UNROLL][4];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long at = start + (u * 256 + threadIdx.x) * V;
        if (at >= n) continue;
        packs[u][0] = Values::load(p + at), packs[u][1] = Values::load_streaming(g + at);
        packs[u][2] = Values::load_streaming(m + at), packs[u][3] = Values::load_streaming(v + at);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long at = start + (u * 256 + threadIdx.x) * V;
        if (at >= n) continue;
        float value[4][V];
#pragma unroll
        for (int which = 0; which < 4; ++which) packs[u][which].unpack(value[which]);
#pragma unroll
        for (int k = 0; k < V; ++k) adamw_value(value[0][k], value[1][k], value[2][k], value[3][k], scale, rates);
        Values::pack(value[0]).store(p + at);
        Values::pack(value[2]).store_streaming(m + at);
        Values::pack(value[3]).store_streaming(v + at);
    }
}

DEVICE void adamw_tensor(float *p, const float *g, float *m, float *v, float scale, const Rates &rates, long long piece,
                         long long n) {
    const long long start = piece * ADAMW_PIECE;
    if (n % 4 == 0 && aligned16(p, g, m, v)) adamw_piece<4>(p, g, m, v, scale, rates, start, n);
    else adamw_piece<1>(p, g, m, v, scale, rates, start, n);
}

// scale [1] multiplies the gradient. One that is not finite skips the step: everything stays as it is.
struct AdamWTable {
    float *p[MAX_TENSORS];
    const float *g[MAX_TENSORS];
    float *m[MAX_TENSORS];
    float *v[MAX_TENSORS];
    long long n[MAX_TENSORS];
    int first_piece[MAX_TENSORS]; // pieces of ADAMW_PIECE values
    int tensors;
};

// One step on up to 64 tensors. Launch: block 256; grid = all pieces.
KERNEL __launch_bounds__(256) adamw_foreach(const __grid_constant__ AdamWTable table, const float *scale, Rates rates) {
    if (!is_finite(*scale)) return;
    const int tensor = tensor_of(table.first_piece, table.tensors, blockIdx.x);
    adamw_tensor(table.p[tensor], table.g[tensor], table.m[tensor], table.v[tensor], *scale, rates,
                 blockIdx.x - table.first_piece[tensor], table.n[tensor]);
}

// ------------------------------------------------------------------------------------------------- parameters in bf16

template <int V> DEVICE void load_bits(unsigned (&bits)[V], const unsigned short *from) {
    if constexpr (V == 4) {
        const uint2 words = *reinterpret_cast<const uint2 *>(from);
        bits[0] = words.x & 0xffffu, bits[1] = words.x >> 16, bits[2] = words.y & 0xffffu, bits[3] = words.y >> 16;
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) bits[k] = from[k];
    }
}

template <int V> DEVICE void store_bits(unsigned short *to, const unsigned (&bits)[V]) {
    if constexpr (V == 4) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) to[k] = static_cast<unsigned short>(bits[k]);
    }
}

// A parameter whose values are the upper halves of floats (optimizer/rounding.rs). With `lower` its values are rounded to
// the nearest, away from zero in ties, and their lower halves are kept there; a lower half from 0x8000 on had rounded its
// upper one up. Without, the random stream of `key` rounds.
struct Narrow {
    unsigned short *upper, *lower;
    unsigned long long key;

    template <int V> DEVICE void load(float (&value)[V], long long at) const {
        unsigned high[V], low[V] = {};
        load_bits(high, upper + at);
        if (lower != nullptr) load_bits(low, lower + at);
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = __uint_as_float(((high[k] - (low[k] >> 15)) << 16) | low[k]);
    }

    template <int V> DEVICE void store(const float (&value)[V], long long at) const {
        unsigned high[V], low[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const unsigned bits = __float_as_uint(value[k]);
            const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u; // it stays one without its lower half
            const unsigned long long index = at + k;
            const unsigned random = random_bits(index / 2, key) >> (index % 2 * 16) & 0xffffu;
            high[k] = is_nan ? bits >> 16 | 0x40u : (bits + (lower != nullptr ? 0x8000u : random)) >> 16;
            low[k] = is_nan ? 0u : bits & 0xffffu;
        }
        store_bits(upper + at, high);
        if (lower != nullptr) store_bits(lower + at, low);
    }
};

struct NarrowTable {
    unsigned short *upper[NARROW_TENSORS];
    unsigned short *lower[NARROW_TENSORS]; // null where `key` rounds
    unsigned long long key[NARROW_TENSORS];
    const T *g[NARROW_TENSORS];
    float *m[NARROW_TENSORS];
    float *v[NARROW_TENSORS];
    long long n[NARROW_TENSORS];
    int first_piece[NARROW_TENSORS]; // pieces of ADAMW_PIECE values
    int tensors;
};

template <int V>
DEVICE void adamw_narrow_piece(const Narrow &p, const T *g, float *m, float *v, float scale, const Rates &rates,
                               long long start, long long n) {
#pragma unroll
    for (int u = 0; u < 8 / V; ++u) {
        const long long at = start + (u * 256 + threadIdx.x) * V;
        if (at >= n) continue;
        float value[V], gradient[V], mean[V], square[V];
        p.load(value, at);
        Pack<T, V>::load_streaming(g + at).unpack(gradient);
        Pack<float, V>::load_streaming(m + at).unpack(mean);
        Pack<float, V>::load_streaming(v + at).unpack(square);
#pragma unroll
        for (int k = 0; k < V; ++k) adamw_value(value[k], gradient[k], mean[k], square[k], scale, rates);
        p.store(value, at);
        Pack<float, V>::pack(mean).store_streaming(m + at);
        Pack<float, V>::pack(square).store_streaming(v + at);
    }
}

// One step on up to 32 tensors in bf16. Launch: block 256; grid = all pieces.
KERNEL __launch_bounds__(256) adamw_bf16_foreach(const __grid_constant__ NarrowTable table, const float *scale,
                                                 Rates rates) {
    if (!is_finite(*scale)) return;
    const int tensor = tensor_of(table.first_piece, table.tensors, blockIdx.x);
    const Narrow p = {table.upper[tensor], table.lower[tensor], table.key[tensor]};
    const T *g = table.g[tensor];
    float *m = table.m[tensor], *v = table.v[tensor];
    const long long n = table.n[tensor];
    const long long start = static_cast<long long>(blockIdx.x - table.first_piece[tensor]) * ADAMW_PIECE;
    if (n % 4 == 0 && aligned16(p.upper, p.lower, g, m, v)) adamw_narrow_piece<4>(p, g, m, v, *scale, rates, start, n);
    else adamw_narrow_piece<1>(p, g, m, v, *scale, rates, start, n);
}

// ----------------------------------------------------------------------------------------------------- AdamW in 8 bits

// Nearest values of an ascending table by the bits of the float: the top bits name a cell, each cell holds at most one
// decision point (checked for both dynamic maps with these sizes), so a code is two lookups instead of a search of
// eight. BITS of the mantissa name a cell, down to 2^-OCTAVES; below that lies no decision point.
template <int VALUES, int BITS, int OCTAVES> struct Encoder {
    static constexpr int CELLS = (OCTAVES << BITS) + 1;
    static constexpr int LOWEST = (127 - OCTAVES) << BITS;
    float midpoint[VALUES];      // the last is one that no value exceeds
    unsigned char below[CELLS];  // decision points in lower cells

    static DEVICE int cell(float x) {
        const int cell = (__float_as_int(x) >> (23 - BITS)) - LOWEST;
        return min(max(cell, 0), CELLS - 1);
    }

    // From `map` of VALUES ascending values, all threads of the block together; a barrier must follow.
    DEVICE void build(const float *map) {
        for (int k = threadIdx.x; k < VALUES; k += blockDim.x) {
            const bool last = k == VALUES - 1;
            const float mine = last ? __int_as_float(0x7f800000) : __fadd_rn(map[k], map[k + 1]) * 0.5f;
            midpoint[k] = mine;
            const int from = k == 0 ? 0 : cell(__fadd_rn(map[k - 1], map[k]) * 0.5f) + 1;
            const int to = last ? CELLS - 1 : cell(mine);
            for (int at = from; at <= to; ++at) below[at] = k;
        }
    }

    // How many decision points lie below x >= 0; on one, the count that is odd where ODD_TIES, else even.
    template <bool ODD_TIES> DEVICE int count(float x) const {
        const int lower = below[cell(x)];
        const float decision = midpoint[lower];
        const bool tie = x == decision && (lower % 2 == 1) != ODD_TIES;
        return lower + (x > decision || tie ? 1 : 0);
    }
};

// Two moments' tables.
struct Codebook {
    float signed_map[256];
    float unsigned_map[256];
    // The signed map is 0 in the middle (code 127) and otherwise its own mirror image, with 1 added: codes count from
    // there.
    Encoder<129, 6, 22> signed_codes;
    Encoder<256, 7, 23> unsigned_codes;

    DEVICE void build(const float *from_signed, const float *from_unsigned) {
        for (int k = threadIdx.x; k < 256; k += blockDim.x) {
            signed_map[k] = from_signed[k];
            unsigned_map[k] = from_unsigned[k];
        }
        signed_codes.build(from_signed + 127);
        unsigned_codes.build(from_unsigned);
        __syncthreads();
    }

    // `scaled` is value over the block's largest magnitude, NaN in a block of zeros, whose codes are then
    // bitsandbytes'. A code never turns a sign round; zero counts as positive.
    DEVICE unsigned first_code(float scaled, float value) const {
        const int steps = signed_codes.count<true>(fabsf(scaled));
        const bool negative = __float_as_int(value) < 0;
        const int code = negative ? 127 - min(max(steps, 1), 127) : 127 + steps;
        return scaled == scaled ? code : negative ? 0 : value > 0.0f ? 1 : 255;
    }

    DEVICE unsigned second_code(float scaled) const {
        const int code = unsigned_codes.count<false>(scaled);
        return scaled == scaled ? code : 0;
    }
};

// value / divisor, |value| <= divisor, correctly rounded: the reciprocal's quotient and one correction, for one
// division per block. Small divisors are scaled up so that the correction does not underflow. 0 / 0 is NaN.
struct Divisor {
    float factor, divisor, inverse;

    DEVICE explicit Divisor(float by)
        : factor(by < 1e-25f ? 0x1p64f : 1.0f), divisor(by * factor), inverse(__frcp_rn(divisor)) {}

    DEVICE float divide(float value) const {
        value *= factor;
        const float quotient = value * inverse;
        return fmaf(fmaf(-quotient, divisor, value), inverse, quotient);
    }
};

// One value; a gradient that is not finite keeps the parameter and loses both moments.
DEVICE void adamw_8bit_value(float &p, float g, float &m, float &v, float scale, const Rates &rates) {
    if (!is_finite(g)) {
        m = v = 0.0f;
        return;
    }
    g = __fmul_rn(g, scale);
    v = __fadd_rn(__fmul_rn(v, rates.beta2), __fmul_rn(__fmul_rn(rates.rest2, g), g));
    m = __fadd_rn(__fmul_rn(m, rates.beta1), __fmul_rn(rates.rest1, g));
    const float ratio = __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), rates.epsilon));
    p = __fmul_rn(__fsub_rn(p, __fmul_rn(rates.step_size, ratio)), rates.kept);
}

// Four values from `start` on, of which those from n on do not exist, of a parameter or a gradient.
template <class E> DEVICE void load4(float (&to)[4], const E *from, long long start, long long n, bool wide) {
    if (wide) {
        Pack<E, 4>::load(from + start).unpack(to);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = start + k < n ? to_float(from[start + k]) : 0.0f;
}

DEVICE void load4(float (&to)[4], const Narrow &from, long long start, long long n, bool wide) {
    if (wide) {
        from.load(to, start);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float one[1] = {0.0f};
        if (start + k < n) from.load(one, start + k);
        to[k] = one[0];
    }
}

DEVICE void store4(const float (&from)[4], float *to, long long start, long long n, bool wide) {
    if (wide) {
        Pack<float, 4>::pack(from).store(to + start);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (start + k < n) to[start + k] = from[k];
}

DEVICE void store4(const float (&from)[4], const Narrow &to, long long start, long long n, bool wide) {
    if (wide) {
        to.store(from, start);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float one[1] = {from[k]};
        if (start + k < n) to.store(one, start + k);
    }
}

DEVICE bool begins_on_vectors(const float *p) { return aligned16(p); }

DEVICE bool begins_on_vectors(const Narrow &p) { return aligned16(p.upper, p.lower); }

// P: float * or Narrow; G: the format of gradients.
template <class P, class G> struct EightBit {
    P p;
    const G *g;
    unsigned char *m_codes;
    float *m_absmax;
    unsigned char *v_codes;
    float *v_absmax;
    long long n;

    // A block of 256 values by one warp: a lane takes four values twice, 128 apart. Codes are whole blocks, values
    // may end.
    DEVICE void step_block(const Codebook &book, float scale, const Rates &rates, long long block) const {
        const int lane = threadIdx.x % 32;
        const long long start = block * MOMENT_BLOCK + lane * 4;
        const bool wide = (block + 1) * MOMENT_BLOCK <= n && begins_on_vectors(p) && aligned16(g);
        unsigned *m_words = reinterpret_cast<unsigned *>(m_codes + start);
        unsigned *v_words = reinterpret_cast<unsigned *>(v_codes + start);
        const unsigned m_word[2] = {m_words[0], m_words[32]}, v_word[2] = {v_words[0], v_words[32]};
        const float m_scale = m_absmax[block], v_scale = v_absmax[block];
        float value[2][4], gradient[2][4], m[2][4], v[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load4(value[half], p, start + half * 128, n, wide);
            load4(gradient[half], g, start + half * 128, n, wide);
        }
        float m_largest = 0.0f, v_largest = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float &mean = m[half][k], &square = v[half][k];
                mean = __fmul_rn(book.signed_map[m_word[half] >> 8 * k & 255], m_scale);
                square = __fmul_rn(book.unsigned_map[v_word[half] >> 8 * k & 255], v_scale);
                adamw_8bit_value(value[half][k], gradient[half][k], mean, square, scale, rates);
                if (!wide && start + half * 128 + k >= n) mean = square = 0.0f; // filled up with zeros
                m_largest = fmaxf(m_largest, fabsf(mean)), v_largest = fmaxf(v_largest, fabsf(square));
            }
            store4(value[half], p, start + half * 128, n, wide);
        }
        m_largest = warp_max(m_largest), v_largest = warp_max(v_largest);
        const Divisor m_by(m_largest), v_by(v_largest);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned m_new = 0, v_new = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                m_new |= book.first_code(m_by.divide(m[half][k]), m[half][k]) << 8 * k;
                v_new |= book.second_code(v_by.divide(v[half][k])) << 8 * k;
            }
            m_words[32 * half] = m_new, v_words[32 * half] = v_new;
        }
        if (lane == 0) m_absmax[block] = m_largest, v_absmax[block] = v_largest;
    }
};

struct EightBitTable {
    float *p[MAX_TENSORS];
    const float *g[MAX_TENSORS];
    unsigned char *m_codes[MAX_TENSORS];
    float *m_absmax[MAX_TENSORS];
    unsigned char *v_codes[MAX_TENSORS];
    float *v_absmax[MAX_TENSORS];
    int n[MAX_TENSORS];
    int first_block[MAX_TENSORS]; // blocks of MOMENT_BLOCK values
    int tensors, blocks;   // blocks of all tensors
};

// One step on up to 64 tensors. Codes are [ceil(n / 256) * 256] aligned to 4 bytes, what lies beyond n is written as zeros' codes;
// maps are the signed and unsigned dynamic maps [256]. Launch: block 512; grid min(ceil(blocks / 16), 2 * multiprocessors).
KERNEL __launch_bounds__(512, 2) adamw_8bit_foreach(const __grid_constant__ EightBitTable table, const float *map_signed,
                                                    const float *map_unsigned, const float *scale, Rates rates) {
    const float by = *scale;
    if (!is_finite(by)) return; // the same for every thread, so no barrier is left waiting
    __shared__ Codebook book;
    book.build(map_signed, map_unsigned);
    for (int block = blockIdx.x * 16 + threadIdx.x / 32; block < table.blocks; block += gridDim.x * 16) {
        const int at = tensor_of(table.first_block, table.tensors, block);
        const EightBit<float *, float> tensor = {table.p[at],       table.g[at],        table.m_codes[at], table.m_absmax[at],
                                                 table.v_codes[at], table.v_absmax[at], table.n[at]};
        tensor.step_block(book, by, rates, block - table.first_block[at]);
    }
}

struct NarrowEightBitTable {
    unsigned short *upper[NARROW_TENSORS];
    unsigned short *lower[NARROW_TENSORS]; // null where `key` rounds
    unsigned long long key[NARROW_TENSORS];
    const T *g[NARROW_TENSORS];
    unsigned char *m_codes[NARROW_TENSORS];
    float *m_absmax[NARROW_TENSORS];
    unsigned char *v_codes[NARROW_TENSORS];
    float *v_absmax[NARROW_TENSORS];
    int n[NARROW_TENSORS];
    int first_block[NARROW_TENSORS]; // blocks of MOMENT_BLOCK values
    int tensors, blocks;             // blocks of all tensors
};

// The same on up to 32 tensors in bf16.
KERNEL __launch_bounds__(512, 2)
adamw_8bit_bf16_foreach(const __grid_constant__ NarrowEightBitTable table, const float *map_signed,
                        const float *map_unsigned, const float *scale, Rates rates) {
    const float by = *scale;
    if (!is_finite(by)) return; // the same for every thread, so no barrier is left waiting
    __shared__ Codebook book;
    book.build(map_signed, map_unsigned);
    for (int block = blockIdx.x * 16 + threadIdx.x / 32; block < table.blocks; block += gridDim.x * 16) {
        const int at = tensor_of(table.first_block, table.tensors, block);
        const Narrow p = {table.upper[at], table.lower[at], table.key[at]};
        const EightBit<Narrow, T> tensor = {p,                  table.g[at],        table.m_codes[at], table.m_absmax[at],
                                            table.v_codes[at],  table.v_absmax[at], table.n[at]};
        tensor.step_block(book, by, rates, block - table.first_block[at]);
    }
}
