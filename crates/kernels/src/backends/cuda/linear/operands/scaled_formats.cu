// Weights [o, i] to NVFP4, MXFP4 and FP8 (E4M3 with a scale per row): the bytes of crates/precision, src/scaling.rs, which has
// the formulas. Every step is one f32 operation, rounded to nearest even. Compiled after weight_values.cu, which has the layouts.
//
// Conversions are integer arithmetic: instructions for them came with sm_89 and sm_100. A weight with a NaN or an infinity
// gets codes of no meaning: the caller has looked for them. Trade-off: a thread takes a whole block of a row, so loads of
// neighbors are 32 to 128 bytes apart; a weight is quantized once.

// As if amax were at least this: 2^-100.
constexpr float AMAX_FLOOR = 7.888609e-31f;
constexpr float MAX_E2M1 = 6.0f;
constexpr float MAX_E4M3 = 448.0f;

// Code of the nearest E2M1 number, ties to the even code; beyond 6 is 6.
DEVICE unsigned e2m1(float value) {
    const float size = fabsf(value);
    const unsigned code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                          (size >= 3.5f) + (size > 5.0f);
    return code | __float_as_uint(value) >> 31 << 3;
}

// Code of the nearest E4M3 number, ties to the even code; beyond 448 is 448.
DEVICE unsigned e4m3_code(float value) {
    const unsigned bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    // Below 2^-6 codes are multiples of 2^-9. Above, they are the upper bits of the float.
    const unsigned code = size < 0x3c800000u ? __float2int_rn(__uint_as_float(size) * 512.0f)
                                             : (size + 0x7ffffu + (size >> 20 & 1u) >> 20) - 960u;
    return min(code, 0x7eu) | bits >> 24 & 0x80u;
}

// Without their sign the bits of floats are ordered as the floats are.
template <int V> DEVICE unsigned largest_of(const float (&value)[V]) {
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) largest = max(largest, __float_as_uint(value[k]) & 0x7fffffffu);
    return largest;
}

// Over a block of 256 threads; every thread gets the result.
DEVICE unsigned block_largest(unsigned bits) {
    __shared__ unsigned partial[256];
    partial[threadIdx.x] = bits;
    for (int step = 128; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) partial[threadIdx.x] = max(partial[threadIdx.x], partial[threadIdx.x + step]);
    }
    __syncthreads();
    return partial[0];
}

template <int V, class E> DEVICE void load_block(float (&value)[V], const E *w, bool wide) {
    if (wide) {
#pragma unroll
        for (int part = 0; part < V / 8; ++part) {
            float eight[8];
            load8(w + part * 8, eight);
#pragma unroll
            for (int k = 0; k < 8; ++k) value[part * 8 + k] = eight[k];
        }
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = to_float(w[k]);
    }
}

// E2M1 codes of a block, the earlier one of a byte in the low nibble.
template <int V> DEVICE void store_e2m1(unsigned char *codes, const float (&value)[V], float factor) {
#pragma unroll
    for (int word = 0; word < V / 8; ++word) {
        unsigned bits = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) bits |= e2m1(__fmul_rn(value[word * 8 + k], factor)) << 4 * k;
        reinterpret_cast<unsigned *>(codes)[word] = bits;
    }
}

// largest[gridDim.x] = the largest magnitude of parts of w [n], as bits. Launch: block 256; any grid.
template <class E> DEVICE void weight_largest(unsigned *largest, const E *w, long long n) {
    unsigned bits = 0;
    const long long step = static_cast<long long>(gridDim.x) * 256;
    for (long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; at < n; at += step)
        bits = max(bits, __float_as_uint(to_float(w[at])) & 0x7fffffffu);
    bits = block_largest(bits);
    if (threadIdx.x == 0) largest[blockIdx.x] = bits;
}

// codes [n / 2], scales [n / 16] and the map of what scales stand for [256], of w [n], whose largest magnitude is the largest
// of `parts`; n is a multiple of 16, and rows too. Launch: block 256; grid ceil(n / 4096).
template <class E>
DEVICE void nvfp4_quantize(unsigned char *codes, unsigned char *scales, float *map, const unsigned *largest, int parts,
                           const E *w, long long n) {
    unsigned bits = 0;
    for (int at = threadIdx.x; at < parts; at += 256) bits = max(bits, largest[at]);
    const float whole = fmaxf(__uint_as_float(block_largest(bits)), AMAX_FLOOR);
    const float tensor = __fdiv_rn(whole, MAX_E4M3 * MAX_E2M1), inverse = __fdiv_rn(MAX_E4M3 * MAX_E2M1, whole);
    // 0x7f is NaN, which no scale is.
    if (blockIdx.x == 0) map[threadIdx.x] = __fmul_rn(value_of_e4m3(threadIdx.x & 0x7fu), tensor);
    const long long block = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (block * 16 >= n) return;
    float value[16];
    load_block(value, w + block * 16, aligned16(w));
    const unsigned code = e4m3_code(__fdiv_rn(__fmul_rn(__uint_as_float(largest_of(value)), inverse), MAX_E2M1));
    scales[block] = code;
    store_e2m1(codes + block * 8, value, code == 0 ? 0.0f : __fdiv_rn(inverse, value_of_e4m3(code)));
}

// codes [n / 2] and scales [n / 32] of w [n]; n is a multiple of 32, and rows too. Launch: block 256; grid ceil(n / 8192).
template <class E>
DEVICE void mxfp4_quantize(unsigned char *codes, unsigned char *scales, const E *w, long long n) {
    const long long block = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (block * 32 >= n) return;
    float value[32];
    load_block(value, w + block * 32, aligned16(w));
    // The smallest power of two that is not below amax / 6; code 0 is 2^-127, a subnormal float.
    const unsigned ratio = __float_as_uint(__fdiv_rn(__uint_as_float(largest_of(value)), MAX_E2M1));
    const unsigned code = ratio <= 0x400000u ? 0u : min((ratio + 0x7fffffu) >> 23, 254u);
    scales[block] = code;
    store_e2m1(codes + block * 16, value, __uint_as_float(code == 254u ? 0x400000u : (254u - code) << 23));
}

// codes [o, i] and scales [o] of w [o, i]. Launch: block 256; grid o.
template <class E> DEVICE void fp8_quantize(unsigned char *codes, float *scales, const E *w, int inputs) {
    const long long row = blockIdx.x;
    w += row * inputs, codes += row * inputs;
    unsigned bits = 0;
    for (int at = threadIdx.x; at < inputs; at += 256) bits = max(bits, __float_as_uint(to_float(w[at])) & 0x7fffffffu);
    const float largest = fmaxf(__uint_as_float(block_largest(bits)), AMAX_FLOOR);
    const float factor = __fdiv_rn(MAX_E4M3, largest);
    if (threadIdx.x == 0) scales[row] = __fdiv_rn(largest, MAX_E4M3);
    for (int at = threadIdx.x; at < inputs; at += 256) codes[at] = e4m3_code(__fmul_rn(to_float(w[at]), factor));
}

#define WEIGHT_LARGEST(NAME, E)                                                                                       \
    KERNEL __launch_bounds__(256) NAME(unsigned *largest, const E *w, long long n) { weight_largest(largest, w, n); }
WEIGHT_LARGEST(weight_largest_bf16, bf16)
WEIGHT_LARGEST(weight_largest_f16, f16)
WEIGHT_LARGEST(weight_largest_f32, float)

#define NVFP4_QUANTIZE(NAME, E)                                                                                       \
    KERNEL __launch_bounds__(256) NAME(unsigned char *codes, unsigned char *scales, float *map,                       \
                                       const unsigned *largest, int parts, const E *w, long long n) {                 \
        nvfp4_quantize(codes, scales, map, largest, parts, w, n);                                                     \
    }
NVFP4_QUANTIZE(nvfp4_quantize_bf16, bf16)
NVFP4_QUANTIZE(nvfp4_quantize_f16, f16)
NVFP4_QUANTIZE(nvfp4_quantize_f32, float)

#define MXFP4_QUANTIZE(NAME, E)                                                                                       \
    KERNEL __launch_bounds__(256) NAME(unsigned char *codes, unsigned char *scales, const E *w, long long n) {        \
        mxfp4_quantize(codes, scales, w, n);                                                                          \
    }
MXFP4_QUANTIZE(mxfp4_quantize_bf16, bf16)
MXFP4_QUANTIZE(mxfp4_quantize_f16, f16)
MXFP4_QUANTIZE(mxfp4_quantize_f32, float)

#define FP8_QUANTIZE(NAME, E)                                                                                         \
    KERNEL __launch_bounds__(256) NAME(unsigned char *codes, float *scales, const E *w, int inputs) {                 \
        fp8_quantize(codes, scales, w, inputs);                                                                       \
    }
FP8_QUANTIZE(fp8_quantize_bf16, bf16)
FP8_QUANTIZE(fp8_quantize_f16, f16)
FP8_QUANTIZE(fp8_quantize_f32, float)
