// Types and helpers that every CUDA source of this folder is compiled after.
//
// The host puts one line `#define T_IS_BF16 1` (or T_IS_F16, T_IS_F32) before this text and a kernel file after it,
// and hands the whole to NVRTC. There is no #include: the two 16-bit floats are defined here, as bits. Needs sm_75 or
// later (the matrix instructions). Not supported: subnormals beyond what the hardware's conversions do.
//
// What it offers
//   T                              element type of activations; sizeof(T) is 2 or 4
//   bf16, f16                      16-bit floats, a struct of `unsigned short bits`
//   to_float(e)  from_float<E>(f)  round_to<E>(f)       one value; round to nearest even
//   load8(p, v)  store8(p, v)      eight values as float v[8]; p aligned to 16 bytes
//   Pack<E, V>                     V values as they lie in memory (V 1, 2, 4, 8): load, load_streaming, store,
//                                  store_streaming, unpack, pack
//   aligned16(p...)                whether all pointers are
//   wait_for_earlier()             what a kernel begins with that may start before earlier work has ended
//   warp_sum  warp_max  block_sum  block_sum2  block_max         every thread gets the result; fixed order
//   exp_fast  reciprocal_fast      about 2 units in the last place
//   random_bits(pair, key)         a hash: bits of a random stream

#ifndef T_IS_BF16
#define T_IS_BF16 0
#endif
#ifndef T_IS_F16
#define T_IS_F16 0
#endif
#ifndef T_IS_F32
#define T_IS_F32 0
#endif
#if T_IS_BF16 + T_IS_F16 + T_IS_F32 != 1
#error "exactly one of T_IS_BF16, T_IS_F16, T_IS_F32 must be 1"
#endif

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// Waits for the work that was launched before, which may not have ended where the host says `early`, and lets the next kernel start. Must come before
// any access to memory.
DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

#if T_IS_BF16
typedef bf16 T;
#elif T_IS_F16
typedef f16 T;
#else
typedef float T;
#endif

// -------------------------------------------------------------------------------------------- one value, two values

DEVICE float to_float(float value) { return value; }

DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

DEVICE float to_float(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

// Two neighbors in one 32-bit word, the first in the low half.
template <class E> DEVICE void unpack2(unsigned word, float &first, float &second);
template <class E> DEVICE unsigned pack2(float first, float second);

template <> DEVICE void unpack2<bf16>(unsigned word, float &first, float &second) {
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000u);
}

template <> DEVICE void unpack2<f16>(unsigned word, float &first, float &second) {
    first = to_float(f16{static_cast<unsigned short>(word & 0xffffu)});
    second = to_float(f16{static_cast<unsigned short>(word >> 16)});
}

// Before sm_80 no instruction rounds two values, and none rounds to bf16.
#if __CUDA_ARCH__ < 800
DEVICE unsigned bf16_bits(float value) {
    const unsigned bits = __float_as_uint(value);
    // A NaN stays one: adding to its bits could carry into the sign.
    return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

DEVICE unsigned f16_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

template <> DEVICE unsigned pack2<bf16>(float first, float second) {
#if __CUDA_ARCH__ < 800
    return bf16_bits(first) | bf16_bits(second) << 16;
#else
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#endif
}

template <> DEVICE unsigned pack2<f16>(float first, float second) {
#if __CUDA_ARCH__ < 800
    return f16_bits(first) | f16_bits(second) << 16;
#else
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#endif
}

template <class E> DEVICE E from_float(float value) {
    return E{static_cast<unsigned short>(pack2<E>(value, 0.0f) & 0xffffu)};
}
template <> DEVICE float from_float<float>(float value) { return value; }

// The float that is left of `value` when it is stored as E.
template <class E> DEVICE float round_to(float value) { return to_float(from_float<E>(value)); }

// ------------------------------------------------------------------------------------------------- V values in memory

// V neighbors kept as they lie in memory: half the registers of floats for a 16-bit type. Loads and stores move 16
// bytes an instruction where V values are that long; the pointer must be aligned to min(16, V * sizeof(E)) bytes.
template <class E, int V> struct Pack {
    static constexpr int WORDS = V * static_cast<int>(sizeof(E)) / 4;
    static_assert(WORDS == 1 || WORDS == 2 || WORDS % 4 == 0, "a pack is 4, 8 or a multiple of 16 bytes");
    unsigned word[WORDS];

    static DEVICE Pack load(const E *pointer) { return read<false>(pointer); }
    // For data that is read once: the caches drop it first.
    static DEVICE Pack load_streaming(const E *pointer) { return read<true>(pointer); }
    DEVICE void store(E *pointer) const { write<false>(pointer); }
    DEVICE void store_streaming(E *pointer) const { write<true>(pointer); }

    DEVICE void unpack(float (&value)[V]) const {
        if constexpr (sizeof(E) == 4) {
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] = __uint_as_float(word[i]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) unpack2<E>(word[i], value[2 * i], value[2 * i + 1]);
        }
    }

    static DEVICE Pack pack(const float (&value)[V]) {
        Pack result;
        if constexpr (sizeof(E) == 4) {
#pragma unroll
            for (int i = 0; i < V; ++i) result.word[i] = __float_as_uint(value[i]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) result.word[i] = pack2<E>(value[2 * i], value[2 * i + 1]);
        }
        return result;
    }

  private:
    template <bool STREAMING> static DEVICE Pack read(const E *pointer) {
        Pack result;
        if constexpr (WORDS == 1) {
            const unsigned *source = reinterpret_cast<const unsigned *>(pointer);
            result.word[0] = STREAMING ? __ldcs(source) : *source;
        } else if constexpr (WORDS == 2) {
            const uint2 *source = reinterpret_cast<const uint2 *>(pointer);
            const uint2 part = STREAMING ? __ldcs(source) : *source;
            result.word[0] = part.x, result.word[1] = part.y;
        } else {
            const uint4 *source = reinterpret_cast<const uint4 *>(pointer);
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i) {
                const uint4 part = STREAMING ? __ldcs(source + i) : source[i];
                result.word[4 * i] = part.x, result.word[4 * i + 1] = part.y;
                result.word[4 * i + 2] = part.z, result.word[4 * i + 3] = part.w;
            }
        }
        return result;
    }

    template <bool STREAMING> DEVICE void write(E *pointer) const {
        if constexpr (WORDS == 1) {
            unsigned *target = reinterpret_cast<unsigned *>(pointer);
            if (STREAMING) __stcs(target, word[0]);
            else *target = word[0];
        } else if constexpr (WORDS == 2) {
            uint2 *target = reinterpret_cast<uint2 *>(pointer);
            const uint2 part = make_uint2(word[0], word[1]);
            if (STREAMING) __stcs(target, part);
            else *target = part;
        } else {
            uint4 *target = reinterpret_cast<uint4 *>(pointer);
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i) {
                const uint4 part = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
                if (STREAMING) __stcs(target + i, part);
                else target[i] = part;
            }
        }
    }
};

// One value: what the paths for odd widths and unaligned pointers use.
template <class E> struct Pack<E, 1> {
    E value;

    static DEVICE Pack load(const E *pointer) { return Pack{*pointer}; }
    static DEVICE Pack load_streaming(const E *pointer) { return Pack{*pointer}; }
    DEVICE void store(E *pointer) const { *pointer = value; }
    DEVICE void store_streaming(E *pointer) const { *pointer = value; }
    DEVICE void unpack(float (&result)[1]) const { result[0] = to_float(value); }
    static DEVICE Pack pack(const float (&source)[1]) { return Pack{from_float<E>(source[0])}; }
};

// Eight values at a 16-byte boundary, as floats.
template <class E> DEVICE void load8(const E *pointer, float (&value)[8]) { Pack<E, 8>::load(pointer).unpack(value); }
template <class E> DEVICE void store8(E *pointer, const float (&value)[8]) { Pack<E, 8>::pack(value).store(pointer); }

template <class... P> DEVICE bool aligned16(P... pointers) {
    return ((reinterpret_cast<unsigned long long>(pointers) | ... | 0ull) & 15ull) == 0;
}

// ---------------------------------------------------------------------------------------------------------- reductions

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

DEVICE float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// Over a block of one dimension, a multiple of 32 threads. All threads must call; every thread gets the result. Two
// calls may follow each other: a barrier guards the scratch of the earlier one.
DEVICE float2 block_sum2(float first, float second) {
    __shared__ float2 partial[32];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    first = warp_sum(first), second = warp_sum(second);
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / 32] = make_float2(first, second);
    __syncthreads();
    const float2 mine = lane < warps ? partial[lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(mine.x), warp_sum(mine.y));
}

DEVICE float block_sum(float value) {
    __shared__ float partial[32];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

DEVICE float block_max(float value) {
    __shared__ float partial[32];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    value = warp_max(value);
    __syncthreads();
    if (lane == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : -__int_as_float(0x7f800000));
}

// ----------------------------------------------------------------------------------------------------------- functions

DEVICE unsigned mixed(unsigned value) {
    value ^= value >> 16;
    value *= 0x7feb352du;
    value ^= value >> 15;
    value *= 0x846ca68bu;
    return value ^ (value >> 16);
}

// 16 random bits for each of a pair of adjacent values (`linear/dropout.rs`).
DEVICE unsigned random_bits(unsigned long long pair, unsigned long long key) {
    const unsigned high = static_cast<unsigned>(pair >> 32) * 0x9e3779b9u;
    return mixed(mixed(static_cast<unsigned>(pair) ^ static_cast<unsigned>(key)) ^ static_cast<unsigned>(key >> 32) ^ high);
}

DEVICE float exp_fast(float value) { return __expf(value); }

// 1 / value in one instruction; 1 / infinity is 0.
DEVICE float reciprocal_fast(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
