// Flash attention: the pieces that flash_forward.cu and flash_backward.cu share. Compiled as prelude.cu, matrix_units.cu,
// this, then one of the two. 16-bit T only (T = float has flash_f32.cu with the same kernel names); sm_75 or later.
//
// Tensors are packed: `tokens` rows on one flat axis, row i of a tensor at `i * stride` elements, head h at `h * HEAD_DIM`
// inside the row. cu_seqlens [documents + 1] holds the ascending document boundaries, from 0; query i sees key j of its
// document where i - window < j <= i (window = tokens: no window). Rows after the last boundary count as one more document.
//
// Tiles lie on the flat axis, not inside documents: a tile of queries needs keys from the start of its first row's
// document to its own last row, and a tile of keys needs queries up to the end of its last row's document. A mask with one
// bound per row does the rest, so a thousand one-token documents cost no more tiles than one long document, and no launch
// depends on the boundaries. Trade-off: a NaN or infinity in one document may reach another document of the
// same tile (0 * NaN).
//
// Math: Dao, FlashAttention-2, 2023 (arXiv 2307.08691). A tile in shared memory is HEAD_DIM values per row, its 16-byte
// chunks permuted inside the row so that eight rows of one chunk hit all banks.
//
// A tile of queries has those of `heads` query heads that share a key head, one head after the other: 1, 2 or 4, a divisor of query_heads /
// kv_heads. So it spans fewer tokens, of which fewer are hidden from each other, and keys are read once for all of them.
//
// Macros of the host: HEAD_DIM 64, 96, 128 or 256 (default 128); SOFT_CAP, where scaled scores s become SOFT_CAP * tanh(s / SOFT_CAP)
// before the softmax; and the tile sizes of flash_forward.cu, flash_backward.cu (planning/flash.rs).

#define FLASH_PIECES 1

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

namespace flash {

typedef unsigned short Half;   // the bits of one T
typedef long long Long;

constexpr int CHUNKS = HEAD_DIM / 8;   // 16-byte chunks of a row, and 8-wide column tiles of a product
constexpr int PITCH = HEAD_DIM * 2;    // bytes of a row
constexpr int STEPS = HEAD_DIM / 16;   // mma steps over the head width
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256, "HEAD_DIM must be 64, 96, 128 or 256");

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ----------------------------------------------------------------------------------------------------------- documents

// The document of a token: the last d of [low, high) with cu_seqlens[d] <= token, given that low is one. All 32 lanes
// search together: three rounds of loads for 32768 documents.
DEVICE int document_of(const int *cu_seqlens, int low, int high, int token) {
    const int lane = threadIdx.x % 32;
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, probe = low + lane * step;
        const bool before = probe < high && cu_seqlens[probe] <= token;
        low += (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
        high = min(high, low + step);
    }
    return low;
}

// The documents of a tile's rows.
struct Documents {
    const int *cu_seqlens;
    int count, tokens, window, first_row, last_row, first, last;

    DEVICE Documents(const int *cu_seqlens, int count, int tokens, int window, int first_row, int last_row)
        : cu_seqlens(cu_seqlens), count(count), tokens(tokens), window(window), first_row(first_row), last_row(last_row) {
        first = document_of(cu_seqlens, 0, count + 1, first_row);
        last = document_of(cu_seqlens, first, count + 1, last_row);
    }

    // First key that the query `row` sees, and the end of the queries that see the key `row`. Both rise with the row.
    DEVICE int start(int document, int row) const { return max(cu_seqlens[document], row - window + 1); }
    DEVICE int end(int document, int row) const {
        return min(document < count ? cu_seqlens[document + 1] : tokens, row + window);
    }
    DEVICE int first_start() const { return start(first, first_row); }
    DEVICE int last_start() const { return start(last, last_row); }
    DEVICE int first_end() const { return end(first, first_row); }
    DEVICE int last_end() const { return end(last, last_row); }

    // Each row's first key (or the end of its queries) to shared memory, for the tiles that need a mask; all threads must call.
    DEVICE void store_starts(int *to, int rows) const {
        for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            const int row = min(first_row + i, tokens - 1);
            to[i] = start(of(row), row);
        }
    }
    DEVICE void store_ends(int *to, int rows) const {
        for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            const int row = min(first_row + i, tokens - 1);
            to[i] = end(of(row), row);
        }
    }

  private:
    // The document of one row of the tile (each thread its own row).
    DEVICE int of(int row) const {
        int low = first, high = last + 1;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (cu_seqlens[middle] <= row) low = middle;
            else high = middle;
        }
        return low;
    }
};

// --------------------------------------------------------------------------------------------------------------- tiles

// Permutes the 16-byte chunks of a row: chunk c lies at c ^ permutation(row).
DEVICE int permutation(int row) { return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3; }

DEVICE Word chunk_address(Word tile, int row, int chunk) { return tile + row * PITCH + ((chunk ^ permutation(row)) << 4); }

// One head of a packed tensor.
template <class Value> struct Rows {
    Value *data;
    Long stride;
    bool aligned;   // rows can be moved 16 bytes at a time

    DEVICE Rows(const void *tensor, Long row_stride, int head)
        : data(static_cast<Value *>(const_cast<void *>(tensor)) + static_cast<Long>(head) * HEAD_DIM), stride(row_stride),
          aligned(((reinterpret_cast<unsigned long long>(tensor) | static_cast<unsigned long long>(row_stride * 2)) & 15) ==
                  0) {}
};

DEVICE uint4 read_chunk_slowly(const Half *from) {
    Word word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | static_cast<Word>(from[2 * i + 1]) << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Starts copying COUNT rows from `first` into a tile, by all THREADS of the block; rows past the last become zero.
template <int COUNT, int THREADS>
DEVICE void copy_rows(Word tile, const Rows<const Half> &source, int first, int tokens) {
    const Half *base = source.data + first * source.stride;
    if (!source.aligned) {
#pragma unroll 1
        for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            const bool inside = first + row < tokens;
            store_chunk(chunk_address(tile, row, chunk),
                        inside ? read_chunk_slowly(base + row * source.stride + chunk * 8) : make_uint4(0, 0, 0, 0));
        }
    } else if constexpr (THREADS % CHUNKS == 0 && COUNT % (THREADS / CHUNKS) == 0) {
        constexpr int AT_ONCE = THREADS / CHUNKS;
        const int chunk = threadIdx.x % CHUNKS;
        int row = threadIdx.x / CHUNKS;
        const Half *from = base + row * source.stride + chunk * 8;
        const Long step = AT_ONCE * source.stride;
#pragma unroll
        for (int i = 0; i < COUNT / AT_ONCE; ++i, row += AT_ONCE, from += step) {
            const bool inside = first + row < tokens;
            copy_16(chunk_address(tile, row, chunk), inside ? from : base, inside);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            const bool inside = first + row < tokens;
            copy_16(chunk_address(tile, row, chunk), base + (inside ? row * source.stride + chunk * 8 : 0), inside);
        }
    }
}

// Starts copying COUNT floats from index `first`; zeros past the last.
template <int COUNT, int THREADS> DEVICE void copy_floats(Word to, const float *from, int first, int tokens) {
    for (int i = threadIdx.x; i < COUNT; i += THREADS) {
        const bool inside = first + i < tokens;
        copy_4(to + i * 4, inside ? from + first + i : from, inside);
    }
}

// What a lane adds to a tile's address for ldmatrix.x4: its row, and its half of a 16-wide step, permuted.
struct Lane {
    Word row, half;

    DEVICE Lane(int row_index, int half_index) : row(row_index * PITCH), half((half_index ^ permutation(row_index)) << 4) {}

    // The step is 16 values wide; tile must begin at a multiple of 8 rows.
    DEVICE Word at(Word tile, int step) const { return tile + row + ((step * 32) ^ half); }
};

// 16 rows as the left factor; also 16 rows, transposed, as the right factor that they multiply by their own columns.
DEVICE Lane left_lane(int lane) { return Lane(lane % 16, lane / 16); }

// 16 rows as the right factor whose columns they are.
DEVICE Lane right_lane(int lane) { return Lane(lane / 16 * 8 + lane % 8, lane / 8 % 2); }

// A warp's rows as left factors, held in registers.
template <int M> struct Held {
    Word word[STEPS][M][4];

    DEVICE void load(Word tile, Lane left) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int m = 0; m < M; ++m) load_matrices(word[step][m], left.at(tile + m * 16 * PITCH, step));
    }
};

template <int M, int N>
DEVICE void multiply_step(float (&c)[M][N][4], const Word (&a)[M][4], Word b_tile, Lane right, int step) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        Word b[4];
        load_matrices(b, right.at(b_tile + n * 16 * PITCH, step));
#pragma unroll
        for (int m = 0; m < M; ++m) {
            multiply_add(c[m][2 * n], a[m], b[0], b[1]);
            multiply_add(c[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

// c[16 M, 8 N] += a bᵀ, over the head width: a is the tile at the warp's first row, b a tile of 8 N rows.
template <int M, int N> DEVICE void multiply(float (&c)[M][N][4], Word a_tile, Lane left, Word b_tile, Lane right) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        Word a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) load_matrices(a[m], left.at(a_tile + m * 16 * PITCH, step));
        multiply_step(c, a, b_tile, right, step);
    }
}

template <int M, int N> DEVICE void multiply(float (&c)[M][N][4], const Held<M> &a, Word b_tile, Lane right) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) multiply_step(c, a.word[step], b_tile, right, step);
}

// c[16 M, HEAD_DIM] += a b: a is a product of this warp, rounded to T, and b a tile of 8 N rows.
template <int M, int N>
DEVICE void multiply_rounded(float (&c)[M][CHUNKS][4], const float (&a)[M][N][4], Word b_tile, Lane left) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        Word rounded[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&part)[4] = a[m][2 * k + i / 2];
                rounded[m][i] = pack2<T>(part[i % 2 * 2], part[i % 2 * 2 + 1]);
            }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            Word b[4];
            load_matrices_transposed(b, left.at(b_tile + k * 16 * PITCH, step));
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(c[m][2 * step], rounded[m], b[0], b[1]);
                multiply_add(c[m][2 * step + 1], rounded[m], b[2], b[3]);
            }
        }
    }
}

// How a tile of ROWS rows is divided among `heads` heads, the first of which is head0. A warp's rows are of one head.
struct Heads {
    int head0, tokens_log2;   // tokens: rows of one head

    template <int ROWS> DEVICE static Heads of_tile(int index, int heads) { return {index * heads, 31 - __clz(ROWS / heads)}; }

    DEVICE int tokens() const { return 1 << tokens_log2; }
    DEVICE int head(int row) const { return row >> tokens_log2; }   // after head0
    DEVICE int token(int row) const { return row & (tokens() - 1); }
};

// Starts copying such a tile, whose tokens begin at `first`; rows past the last become zero. `source` is head0 of the tensor.
template <int ROWS, int THREADS>
DEVICE void copy_heads(Word tile, const Rows<const Half> &source, Heads heads, int first, int tokens) {
    static_assert(ROWS * CHUNKS % THREADS == 0, "each thread copies as much");
    const Half *base = source.data;
    if (!source.aligned) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS, token = first + heads.token(row);
            const Half *from = base + token * source.stride + heads.head(row) * HEAD_DIM + chunk * 8;
            store_chunk(chunk_address(tile, row, chunk), token < tokens ? read_chunk_slowly(from) : make_uint4(0, 0, 0, 0));
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < ROWS * CHUNKS / THREADS; ++k) {
        const int i = threadIdx.x + k * THREADS, row = i / CHUNKS, chunk = i % CHUNKS, token = first + heads.token(row);
        const bool inside = token < tokens;
        const Half *from = base + (inside ? token * source.stride + heads.head(row) * HEAD_DIM + chunk * 8 : 0);
        copy_16(chunk_address(tile, row, chunk), from, inside);
    }
}

// Whether any of a warp's rows, from `row` on, sees a key of a step: what is hidden from all of them is not computed. `starts` holds
// the band's rows; they rise.
template <int M> DEVICE bool sees_keys(const int *starts, int row, int key0, int keys) {
    return key0 < row + M * 16 && key0 + keys > starts[0];
}

// Hides keys outside [start, row] of each row. `starts` holds the band's rows, `row` is the lane's first row and `key` its
// first key.
template <int M, int N>
DEVICE void hide_keys(float (&scores)[M][N][4], const int *starts, int row, int key, float hidden) {
    const int lane_row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int start = starts[lane_row + i * 8], end = row + i * 8;
#pragma unroll
        for (int j = 0; j < N * 2; ++j) {
            const int at = key + j / 2 * 8 + j % 2;
            if (at < start || at > end) scores[i / 2][j / 2][i % 2 * 2 + j % 2] = hidden;
        }
    }
}

// Scales and caps scores in place, where there is a cap. It is applied before keys are hidden.
template <int M, int N> DEVICE void cap_scores(float (&scores)[M][N][4], float scale) {
#ifdef SOFT_CAP
    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
    const float twice = scale * (2.0f * LOG2_E / SOFT_CAP);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
        float &score = scores[i / (N * 4)][i / 4 % N][i % 4];
        score = SOFT_CAP - 2.0f * SOFT_CAP / (exp2_fast(score * twice) + 1.0f);
    }
#endif
}

// What the scores are still to be multiplied by after cap_scores.
DEVICE float scale_of_scores(float scale) {
#ifdef SOFT_CAP
    return 1.0f;
#else
    return scale;
#endif
}

// Slope of a capped score by its scaled score, from the probability p = exp(score - lse) and base = lse * LOG2_E; 0 where p is.
DEVICE float cap_slope(float p, float base) {
#ifdef SOFT_CAP
    float log2_p;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2_p) : "f"(p));
    const float tanh = (log2_p + base) * (1.0f / (LOG2_E * SOFT_CAP));
    return p > 0.0f ? 1.0f - tanh * tanh : 0.0f;
#else
    return 1.0f;
#endif
}

template <int M, int N> DEVICE void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) c[i / (N * 4)][i / 4 % N][i % 4] = 0.0f;
}

// Rounds factor * c to T and writes the rows from `first` on, through `tile`: shared memory of 16 M rows at the warp's first
// row that no other warp uses any more. factor[m][0] is for row lane / 4 of 16, factor[m][1] for the row 8 below.
template <int M>
DEVICE void write_rows(const Rows<Half> &target, int first, int tokens, Word tile, const float (&c)[M][CHUNKS][4],
                       const float (&factor)[M][2]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float f = factor[m][half];
                store_word(chunk_address(tile, m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4,
                           pack2<T>(c[m][n][2 * half] * f, c[m][n][2 * half + 1] * f));
            }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < M * 16 * CHUNKS; i += 32) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row >= tokens) continue;
        const uint4 value = load_chunk(chunk_address(tile, row, chunk));
        Half *to = target.data + (first + row) * target.stride + chunk * 8;
        if (target.aligned) {
            *reinterpret_cast<uint4 *>(to) = value;
        } else {
            const Word word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) to[j] = static_cast<Half>(word[j / 2] >> (j % 2 * 16));
        }
    }
}

}   // namespace flash
