// Values of frozen weights as kernels read them: codes of a quantized format with their scales, or the values themselves.
//
// A weight [o, i] is row-major, and so are its codes and scales. Codes of four bits: two a byte, and the buffer holds whole
// blocks, so that whole words may be read. What the codes are: crates/precision, src/format.rs and the files it names.
//
//   format   a code             codes of a byte        a scale for              scales
//   NF4      level of a table   earlier one is high    64 values, across rows   f32, or 8-bit codes around their mean
//   NVFP4    E2M1               earlier one is low     16 values of a row       UE4M3 times one f32
//   MXFP4    E2M1               earlier one is low     32 values of a row       E8M0
//   FP8      E4M3               one                    a row                    f32
//
// A format is a struct of values below and a line of QUANTIZED_FORMATS. Not supported: other block sizes.

constexpr int NF4_BLOCK = 64;
constexpr int BLOCKS_PER_NESTED = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The sixteen levels of NF4, to digits that name the f32 numbers exactly.
#define NF4_LEVELS                                                                                                  \
    {-1.0f,       -0.6961928f,  -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,        \
     0.0795803f,  0.1609302f,   0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f}

__constant__ float LEVELS_OF_NF4[16] = NF4_LEVELS;
__constant__ float LEVELS_OF_E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The scales of the blocks: f32 (`floats`), codes of a map, or codes of a map times one f32 per 256 plus an offset. What a
// form does not have is null.
struct Scales {
    const float *floats;
    const unsigned char *codes;
    const float *map;
    const float *nested;
    const float *offset;

    DEVICE float at(long long block) const {
        if (floats) return floats[block];
        const float level = map[codes[block]];
        // Two roundings as on the host: a fused one would give other values than bitsandbytes.
        return nested ? __fadd_rn(__fmul_rn(level, nested[block / BLOCKS_PER_NESTED]), *offset) : level;
    }

    // The scale of a block as it is stored: loads that do not wait for each other.
    struct Raw {
        float direct, nested;
        unsigned code;
    };

    DEVICE Raw load(long long block) const {
        Raw raw = {};
        if (floats) raw.direct = floats[block];
        else {
            raw.code = codes[block];
            if (nested) raw.nested = nested[block / BLOCKS_PER_NESTED];
        }
        return raw;
    }

    // What at() gives.
    DEVICE float value(const Raw &raw) const {
        if (floats) return raw.direct;
        const float level = map[raw.code];
        return nested ? __fadd_rn(__fmul_rn(level, raw.nested), *offset) : level;
    }
};

// Neighbors of a row that are loaded at once by the products with few rows (few_rows.cu). They begin at a multiple of this.
constexpr int CHUNK = 32;

// Where a quantized weight lies.
struct Stored {
    const unsigned char *codes;
    Scales scales;
};

// Level of a code in the low four bits: decode() looks up in another lane's register, which needs no address and no
// memory, and takes the index modulo 32, so that a code needs no mask. All lanes of the warp must call.
DEVICE float decode(float level, unsigned code) { return __shfl_sync(ALL_LANES, level, code); }

// Values of a weight in codes of four bits; V is 8 or 1. The codes of eight values are one load. A row of eight values
// begins in a whole word, or V is 1.
template <class FORMAT> struct FourBits {
    Stored stored;
    int inputs;

    template <int V> struct Loaded {
        unsigned word;
        float scale;
    };

    // This lane's part of the table of levels.
    static DEVICE float level_of_lane() { return FORMAT::level(threadIdx.x & 15); }

    // Where value k of a word begins.
    static DEVICE constexpr int shift(int k) { return FORMAT::HIGH_FIRST ? (k ^ 1) * 4 : k * 4; }

    template <int V> DEVICE Loaded<V> load(long long row, int column, bool inside) const {
        const long long start = row * inputs + column;
        Loaded<V> loaded = {0, inside ? stored.scales.at(start / FORMAT::BLOCK) : 0.0f};
        if constexpr (V == 8)
            loaded.word = inside ? __ldcs(reinterpret_cast<const unsigned *>(stored.codes) + start / 8) : 0;
        else
            loaded.word = inside ? stored.codes[start / 2] >> shift(start % 2) << shift(0) : 0;
        return loaded;
    }

    // All lanes of the warp must call.
    template <int V> static DEVICE void unpack(const Loaded<V> &loaded, float level, float (&value)[V]) {
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = decode(level, loaded.word >> shift(k)) * loaded.scale;
    }

    // A chunk as it is stored; a scale is for all of it, or for half.
    static constexpr int SCALES = FORMAT::BLOCK < CHUNK ? CHUNK / FORMAT::BLOCK : 1;
    struct Chunk {
        uint4 words;
        Scales::Raw raw[SCALES];
    };

    DEVICE Chunk load_chunk(long long row, int column, bool inside) const {
        const long long start = row * inputs + column;
        Chunk chunk = {};
        if (!inside) return chunk;
        chunk.words = __ldcs(reinterpret_cast<const uint4 *>(stored.codes + start / 2));
#pragma unroll
        for (int k = 0; k < SCALES; ++k) chunk.raw[k] = stored.scales.load((start + k * FORMAT::BLOCK) / FORMAT::BLOCK);
        return chunk;
    }

    // Values 8 * part and on of a chunk; 0 outside of the matrix. All lanes of the warp must call.
    DEVICE void unpack_part(const Chunk &chunk, int part, bool inside, float level, float (&value)[8]) const {
        const unsigned word = part == 0 ? chunk.words.x : part == 1 ? chunk.words.y : part == 2 ? chunk.words.z : chunk.words.w;
        const float scale = inside ? stored.scales.value(chunk.raw[part * SCALES / 4]) : 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = decode(level, word >> shift(k)) * scale;
    }
};

struct Nf4 {
    static constexpr int BLOCK = NF4_BLOCK;
    static constexpr bool HIGH_FIRST = true;
    static DEVICE float level(int code) { return LEVELS_OF_NF4[code]; }
};

template <int SIZE> struct E2m1 {
    static constexpr int BLOCK = SIZE;
    static constexpr bool HIGH_FIRST = false;
    static DEVICE float level(int code) { return LEVELS_OF_E2M1[code]; }
};

typedef FourBits<Nf4> Nf4Values;
typedef FourBits<E2m1<16>> Nvfp4Values;
typedef FourBits<E2m1<32>> Mxfp4Values;

// The value of an E4M3 code: its exponent and mantissa as those of a float, whose exponents begin 120 lower. NaN, which
// no weight has, reads as 480.
DEVICE float value_of_e4m3(unsigned code) {
    return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;
}

// Values of a weight in E4M3 with a scale per row.
struct Fp8Values {
    Stored stored;
    int inputs;

    template <int V> struct Loaded {
        uint2 words;
        float scale;
    };

    static DEVICE float level_of_lane() { return 0.0f; }

    template <int V> DEVICE Loaded<V> load(long long row, int column, bool inside) const {
        const long long start = row * inputs + column;
        Loaded<V> loaded = {make_uint2(0, 0), inside ? stored.scales.at(row) : 0.0f};
        if constexpr (V == 8) {
            if (inside) loaded.words = __ldcs(reinterpret_cast<const uint2 *>(stored.codes + start));
        } else {
            if (inside) loaded.words.x = stored.codes[start];
        }
        return loaded;
    }

    template <int V> static DEVICE void unpack(const Loaded<V> &loaded, float, float (&value)[V]) {
#pragma unroll
        for (int k = 0; k < V; ++k)
            value[k] = value_of_e4m3((k < 4 ? loaded.words.x : loaded.words.y) >> k % 4 * 8) * loaded.scale;
    }

    struct Chunk {
        uint4 words[2];
        Scales::Raw raw;
    };

    DEVICE Chunk load_chunk(long long row, int column, bool inside) const {
        Chunk chunk = {};
        if (!inside) return chunk;
        const uint4 *from = reinterpret_cast<const uint4 *>(stored.codes + row * inputs + column);
        chunk.words[0] = __ldcs(from), chunk.words[1] = __ldcs(from + 1);
        chunk.raw = stored.scales.load(row);
        return chunk;
    }

    DEVICE void unpack_part(const Chunk &chunk, int part, bool inside, float, float (&value)[8]) const {
        const uint4 &words = chunk.words[part / 2];
        const unsigned low = part % 2 == 0 ? words.x : words.z, high = part % 2 == 0 ? words.y : words.w;
        const float scale = inside ? stored.scales.value(chunk.raw) : 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k) value[k] = value_of_e4m3((k < 4 ? low : high) >> k % 4 * 8) * scale;
    }
};

// All quantized formats: the names of their kernels in write_out.cu and fp8.cu, and their values.
#define QUANTIZED_FORMATS(KERNEL_OF)                                                                                \
    KERNEL_OF(nf4_write_out, nf4_weight_rows, nf4_weight_columns, Nf4Values)                                        \
    KERNEL_OF(nvfp4_write_out, nvfp4_weight_rows, nvfp4_weight_columns, Nvfp4Values)                                \
    KERNEL_OF(mxfp4_write_out, mxfp4_weight_rows, mxfp4_weight_columns, Mxfp4Values)                                \
    KERNEL_OF(fp8_write_out, fp8_weight_rows, fp8_weight_columns, Fp8Values)

// Values of a weight that is stored as they are.
template <class E> struct DenseValues {
    const E *values;
    int inputs;

    template <int V> struct Loaded {
        Pack<E, V> pack;
    };

    static DEVICE float level_of_lane() { return 0.0f; }

    template <int V> DEVICE Loaded<V> load(long long row, int column, bool inside) const {
        Loaded<V> loaded = {};
        if (inside) loaded.pack = Pack<E, V>::load_streaming(values + row * inputs + column);
        return loaded;
    }

    template <int V> static DEVICE void unpack(const Loaded<V> &loaded, float, float (&value)[V]) {
        loaded.pack.unpack(value);
    }

    struct Chunk {
        Pack<E, 8> packs[CHUNK / 8];
    };

    DEVICE Chunk load_chunk(long long row, int column, bool inside) const {
        Chunk chunk = {};
#pragma unroll
        for (int part = 0; part < CHUNK / 8; ++part)
            if (inside) chunk.packs[part] = Pack<E, 8>::load_streaming(values + row * inputs + column + part * 8);
        return chunk;
    }

    DEVICE void unpack_part(const Chunk &chunk, int part, bool, float, float (&value)[8]) const {
        chunk.packs[part].unpack(value);
    }
};
