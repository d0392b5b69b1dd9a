// Values of frozen weights as kernels read them, flat: the codes of NF4 with their scales, or the values themselves.
//
// A weight [o, i] is row-major; blocks of 64 values run over the flat order, across rows. Codes: two a byte, the
// earlier in the high nibble, and the buffer holds whole blocks (32 bytes each), so that whole words may be read. The
// scale of a block is absmax[block], or with double quantization (absmax null) map[codes[block]] * nested[block /
// 256] + *offset, each operation rounded. What the codes are: crates/precision, src/nf4.
//
// Not supported: other block sizes, FP4.

constexpr int VALUES_PER_BLOCK = 64;
constexpr int BLOCKS_PER_NESTED = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The sixteen levels, to digits that name the f32 numbers exactly.
#define NF4_LEVELS                                                                                                  \
    {-1.0f,       -0.6961928f,  -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,        \
     0.0795803f,  0.1609302f,   0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f}

__constant__ float LEVELS[16] = NF4_LEVELS;

// The scales of the blocks, in either form.
struct Scales {
    const float *absmax;
    const unsigned char *codes;
    const float *nested;
    const float *map;
    const float *offset;

    DEVICE float at(long long block) const {
        if (absmax) return absmax[block];
        // Two roundings as on the host: a fused one would give other values than bitsandbytes.
        return __fadd_rn(__fmul_rn(map[codes[block]], nested[block / BLOCKS_PER_NESTED]), *offset);
    }
};

// A lane's part of the table of levels: decode() looks up in another lane's register, which needs no address and no
// memory, and takes the index modulo 32, so that a code needs no mask.
DEVICE float level_of_lane() { return LEVELS[threadIdx.x & 15]; }

// Level of value `index` of a word of eight codes. All lanes of the warp must call.
DEVICE float decode(float level, unsigned word, int index) {
    return __shfl_sync(ALL_LANES, level, word >> (index / 2 * 8 + (index % 2 ? 0 : 4)));
}

// Values of a quantized weight, flat; V is 8 or 1. The codes of eight values are one load.
struct Nf4Values {
    const unsigned char *codes;
    Scales scales;

    template <int V> struct Loaded {
        unsigned word;
        float scale;
    };

    template <int V> DEVICE Loaded<V> load(long long start, bool inside) const {
        Loaded<V> loaded = {0, inside ? scales.at(start / VALUES_PER_BLOCK) : 0.0f};
        if constexpr (V == 8) loaded.word = inside ? __ldcs(reinterpret_cast<const unsigned *>(codes) + start / 8) : 0;
        else loaded.word = inside ? codes[start / 2] >> (start % 2 ? 0 : 4) << 4 : 0;
        return loaded;
    }

    // All lanes of the warp must call.
    template <int V> static DEVICE void unpack(const Loaded<V> &loaded, float level, float (&value)[V]) {
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = decode(level, loaded.word, k) * loaded.scale;
    }
};

// Values of a weight that is stored as they are.
template <class E> struct DenseValues {
    const E *values;

    template <int V> struct Loaded {
        Pack<E, V> pack;
    };

    template <int V> DEVICE Loaded<V> load(long long start, bool inside) const {
        Loaded<V> loaded = {};
        if (inside) loaded.pack = Pack<E, V>::load_streaming(values + start);
        return loaded;
    }

    template <int V> static DEVICE void unpack(const Loaded<V> &loaded, float, float (&value)[V]) {
        loaded.pack.unpack(value);
    }
};
