// Pieces of the kernels of the gated delta rule: tiles in shared memory and the products of them. Compiled after prelude.cu
// and matrix_units.cu; one of the other files of this folder is compiled after this one.
//
// Defined by the host: KEY_DIM and VALUE_DIM, the widths of a head, multiples of 16 up to 128. SLICE, the columns of v that a step
// takes: 16, 32 or 64, a divisor of VALUE_DIM; less takes less shared memory.
//
// The rule, per value head of a document: S = e^g S; S = S + k ⊗ beta (v - Sᵀ k); o = Sᵀ q. Documents are cut into chunks of 64
// tokens and a shorter last one. With G the sum of g from the start of a chunk, S the state there, and products over rows:
//     D_ij = e^(G_i - G_j), i >= j;    inverse = (1 + strictly_lower(beta_i k_i k_j D_ij))^-1;    scores = (q kᵀ) D
//     corrections = inverse (beta (v - e^G k S));    o = e^G q S + scores corrections
//     S at the end = e^G_last S + kᵀ (e^(G_last - G) corrections)
// States lie as [value dim, key dim]: a warp that owns 16 columns of v has 16 of their rows, and needs no other warp.
//
// Products have T for factors and f32 for sums; a product that is a factor itself is rounded to T.
// Trade-off: f32 is there to be right, not fast: the same code around a `Left` and a `multiply` of shuffles and FFMA.
//
// In all kernels: pointers are aligned to 16 bytes, and so are the rows at a stride that hold heads. n tokens;
// chunks [chunks + 1]: first tokens, and n; documents [documents + 1]: first chunks of documents, and the number of chunks;
// value head h has key head h / (value_heads / key_heads). p(w) = 64 (w sizeof(T) + 16) are the bytes of a tile of width w.

typedef long long Long;

static constexpr int CHUNK = 64, SLICES = VALUE_DIM / SLICE;
// Threads of a block that has all tokens of a chunk, 16 per warp, and of a block of a scan, whose warps have 16 columns of v.
static constexpr int THREADS = 128, SCAN_THREADS = SLICE * 2;
// Blocks of 128 threads that a multiprocessor is to hold: registers are given out by it. f32 needs them, and before Hopper there is
// shared memory for two.
static constexpr int LEAST_BLOCKS = T_IS_F32 ? 1 : __CUDA_ARCH__ >= 900 ? 3 : 2;
static constexpr int KEY_TILES = KEY_DIM / 8, SLICE_TILES = SLICE / 8, CHUNK_TILES = CHUNK / 8;
static_assert(KEY_DIM % 16 == 0 && VALUE_DIM % SLICE == 0 && KEY_DIM <= 128 && VALUE_DIM <= 128, "widths of heads");
static_assert(SLICE == 16 || SLICE == 32 || SLICE == 64, "a warp has 16 columns, and a chunk as many rows as a state's slice");

// Of a token and head, f32: G, e^G, e^(G_last - G), beta.
struct __align__(16) Gate {
    float sum, from_start, to_end, beta;
};

// Rows of COLUMNS values in shared memory; 16 bytes between rows keep ldmatrix free of bank conflicts.
template <int COLUMNS> struct Tile {
    static constexpr int PITCH = COLUMNS + 16 / static_cast<int>(sizeof(T));
    T *data;
    DEVICE T *at(int row, int column) const { return data + row * PITCH + column; }
};

// Hands out shared memory.
struct Shared {
    unsigned char *next;

    template <int C> DEVICE Tile<C> tile(int rows = CHUNK) { return {values<T>(rows * Tile<C>::PITCH)}; }
    template <class V> DEVICE V *values(int count) {
        V *const result = reinterpret_cast<V *>(next);
        next += count * sizeof(V);
        return result;
    }
};

struct Chunk {
    int index, first, tokens;

    // Where a matrix of `size` values of this chunk and a head lies in [chunks, heads, size].
    DEVICE Long matrix(int heads, int head, int size) const { return (static_cast<Long>(index) * heads + head) * size; }
    // Where its first row lies.
    DEVICE Long row(Long stride) const { return first * stride; }
};

DEVICE Chunk chunk_of(const int *chunks, int index) { return {index, chunks[index], chunks[index + 1] - chunks[index]}; }

// What a block of a scan owns: SLICE columns of v, from `slice` on, of a head in a document, and a warp 16 of them, from `own` on.
struct Sequence {
    int slice, own, head, key_head, first_chunk, end_chunk, first_token, end_token;
    bool is_first, is_last;   // among the documents

    DEVICE Sequence(const int *chunks, const int *documents, int key_heads, int value_heads) {
        const int document = blockIdx.x / SLICES / value_heads;
        slice = blockIdx.x % SLICES * SLICE, own = threadIdx.x / 32 * 16;
        head = blockIdx.x / SLICES % value_heads, key_head = head / (value_heads / key_heads);
        first_chunk = documents[document], end_chunk = documents[document + 1];
        first_token = chunks[first_chunk], end_token = chunks[end_chunk];
        is_first = document == 0, is_last = document + 1 == gridDim.x / SLICES / value_heads;
    }
    // Where a value of a state that passes between tiles of a row lies in [value_heads, KEY_DIM, VALUE_DIM], by the warp's column of v.
    DEVICE Long carried(int column, int key) const {
        return (static_cast<Long>(head) * KEY_DIM + key) * VALUE_DIM + slice + own + column;
    }
    DEVICE Chunk chunk(int index) const {
        const int first = first_token + (index - first_chunk) * CHUNK;
        return {index, first, min(CHUNK, end_token - first)};
    }
};

// D of two tokens of a chunk; zero where the row is the earlier. Rows past the last token may have any gate.
DEVICE float decay_between(const Gate *gates, int row, int column) {
    return row < column ? 0.0f : exp_fast(fminf(gates[row].sum - gates[column].sum, 0.0f));
}

// Sum of the values of four lanes, which share rows of a product.
DEVICE float sum_of_four(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Sum over this lane and those before it, or after it.
template <bool AFTER> DEVICE float running_sum(float value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float other = AFTER ? __shfl_down_sync(0xffffffffu, value, step) : __shfl_up_sync(0xffffffffu, value, step);
        if (AFTER ? threadIdx.x % 32 + step < 32 : threadIdx.x % 32 >= step) value += other;
    }
    return value;
}

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }
DEVICE float softplus(float value) { return fmaxf(value, 0.0f) + log1pf(expf(-fabsf(value))); }

// Starts copying ROWS rows to a tile, by BLOCK threads; rows from `valid` on become zero.
template <int BLOCK, int ROWS, int COLUMNS>
DEVICE void copy_rows(Tile<COLUMNS> to, const T *from, int stride, int valid) {
    constexpr int EACH = 16 / sizeof(T), PIECES = COLUMNS / EACH, AT_ONCE = BLOCK / PIECES;
    const int first = threadIdx.x / PIECES, column = threadIdx.x % PIECES * EACH;
    if (first >= AT_ONCE) return;
    const T *source = from + first * stride + column;
    const Word target = shared_address(to.at(first, column));
#pragma unroll 8
    for (int row = 0; row < ROWS; row += AT_ONCE, source += AT_ONCE * stride) {
        if (ROWS % AT_ONCE != 0 && row + first >= ROWS) break;
        const bool inside = row + first < valid;
        copy_16(target + row * Tile<COLUMNS>::PITCH * sizeof(T), inside ? source : from, inside);
    }
}

template <int BLOCK> DEVICE void copy_gates(Gate *to, const Gate *from, int valid) {
    for (int i = threadIdx.x; i < CHUNK; i += BLOCK) copy_16(shared_address(to + i), from + (i < valid ? i : 0), i < valid);
}

// Writes rows of a tile, by `threads` threads of which this is number `thread`.
template <int C> DEVICE void write_rows(T *to, int stride, Tile<C> from, int rows, int thread, int threads) {
    constexpr int EACH = 16 / sizeof(T), PIECES = C / EACH;
    for (int i = thread; i < rows * PIECES; i += threads) {
        const int row = i / PIECES, column = i % PIECES * EACH;
        *reinterpret_cast<uint4 *>(to + row * stride + column) = *reinterpret_cast<const uint4 *>(from.at(row, column));
    }
}

// Sums of a warp, 16 rows and 8 N columns: c[n][j] is row `row_of(j)` and column 8 n + `column_of(j)`.
DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int row_of(int j) { return lane() / 4 + j / 2 * 8; }
DEVICE int column_of(int j) { return lane() % 4 * 2 + j % 2; }

// Calls function(sum, row, column) for this lane's sums.
template <int N, class F> DEVICE void for_each(float (&c)[N][4], F function) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) function(c[i / 4][i % 4], row_of(i % 4), i / 4 * 8 + column_of(i));
}

template <int N> DEVICE void clear(float (&c)[N][4]) { for_each(c, [](float &sum, int, int) { sum = 0.0f; }); }

// Two neighbors of a row in memory.
DEVICE void store_pair(T *to, float first, float second) {
    const float pair[2] = {first, second};
    Pack<T, 2>::pack(pair).store(to);
}

DEVICE float2 load_pair(const T *from) {
    float pair[2];
    Pack<T, 2>::load(from).unpack(pair);
    return make_float2(pair[0], pair[1]);
}

// Writes the rows below `valid`.
template <int N> DEVICE void store(T *to, int stride, const float (&c)[N][4], int row, int valid) {
#pragma unroll
    for (int i = 0; i < N * 4; i += 2) {
        const int at = row + row_of(i % 4);
        if (at < valid) store_pair(to + at * stride + i / 4 * 8 + column_of(i), c[i / 4][i % 4], c[i / 4][i % 4 + 1]);
    }
}

// The same in pieces of 16 bytes, through rows of a tile that no other warp reads.
template <int N, int C>
DEVICE void store_through(Tile<C> tile, T *to, int stride, const float (&c)[N][4], int row, int valid) {
    store(tile.at(row, 0), Tile<C>::PITCH, c, 0, 16);
    __syncwarp();
    write_rows(to + row * stride, stride, Tile<C>{tile.at(row, 0)}, min(16, valid - row), lane(), 32);
    __syncwarp();
}

// Writes the transpose, whose rows are below `valid`, to 16 columns, through those of a tile, which no other warp reads.
template <int N, int C>
DEVICE void store_transposed(Tile<C> tile, int column, T *to, int stride, float (&c)[N][4], int valid) {
    constexpr int EACH = 16 / sizeof(T), PIECES = 16 / EACH;
    __syncwarp();
    for_each(c, [&](float sum, int row, int token) { *tile.at(token, column + row) = from_float<T>(sum); });
    __syncwarp();
#pragma unroll 1
    for (int i = lane(); i < 8 * N * PIECES; i += 32) {
        const int row = i / PIECES, piece = i % PIECES * EACH;
        if (row < valid)
            *reinterpret_cast<uint4 *>(to + row * stride + column + piece) =
                *reinterpret_cast<const uint4 *>(tile.at(row, column + piece));
    }
}

// Whether the rows of a tile are those of the right factor, or its columns.
enum RightFactor { ROWS, COLUMNS_OF };

// A `Left` is the left factor of a step, 16 rows and 16 columns: of a tile, of one whose rows are the columns, or of sums, rounded.
#if T_IS_F32
struct Left {
    float value[2][4];

    template <int C> static DEVICE Left load(Tile<C> tile, int row, int k) {
        Left a;
        for_each(a.value, [&](float &value, int i, int j) { value = *tile.at(row + i, k + j); });
        return a;
    }
    template <int C> static DEVICE Left load_transposed(Tile<C> tile, int row, int k) {
        Left a;
        for_each(a.value, [&](float &value, int i, int j) { value = *tile.at(k + j, row + i); });
        return a;
    }
    static DEVICE Left of(const float (&first)[4], const float (&second)[4]) {
        return {{{first[0], first[1], first[2], first[3]}, {second[0], second[1], second[2], second[3]}}};
    }
};

template <RightFactor B, int N, int C>
DEVICE void multiply(float (&c)[N][4], const Left &a, Tile<C> b, int column, int k, int from = 0, int to = N) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll 1
        for (int pair = 0; pair < 4; ++pair) {
            const int owner = lane() / 4 * 4 + pair, row = k + i / 2 * 8 + pair * 2 + i % 2;
            const float upper = __shfl_sync(0xffffffffu, a.value[i / 2][i % 2], owner);
            const float lower = __shfl_sync(0xffffffffu, a.value[i / 2][2 + i % 2], owner);
#pragma unroll
            for (int j = 0; j < 2 * N; ++j) {
                if (j / 2 < from || j / 2 >= to) continue;
                const int at = column + j / 2 * 8 + column_of(j);
                const float right = B == ROWS ? *b.at(row, at) : *b.at(at, row);
                c[j / 2][j % 2] += upper * right, c[j / 2][2 + j % 2] += lower * right;
            }
        }
}
#else
struct Left {
    Word word[4];

    template <int C> static DEVICE Left load(Tile<C> tile, int row, int k) {
        Left a;
        load_matrices(a.word, shared_address(tile.at(row + lane() % 16, k + lane() / 16 * 8)));
        return a;
    }
    template <int C> static DEVICE Left load_transposed(Tile<C> tile, int row, int k) {
        Left a;
        const int matrix = lane() / 8;
        load_matrices_transposed(a.word, shared_address(tile.at(k + matrix / 2 * 8 + lane() % 8, row + matrix % 2 * 8)));
        return a;
    }
    static DEVICE Left of(const float (&first)[4], const float (&second)[4]) {
        return {{pack2<T>(first[0], first[1]), pack2<T>(first[2], first[3]), pack2<T>(second[0], second[1]),
                 pack2<T>(second[2], second[3])}};
    }
};

// c += a b for 16 rows of b from `k` on, and its columns from `column` on; of c only [from, to), both even.
template <RightFactor B, int N, int C>
DEVICE void multiply(float (&c)[N][4], const Left &a, Tile<C> b, int column, int k, int from = 0, int to = N) {
    constexpr int STEP = B == ROWS ? 16 : 16 * Tile<C>::PITCH;
    const int half = column + lane() / 16 * 8;
    const T *const address = B == ROWS ? b.at(k + lane() % 16, half) : b.at(half + lane() % 8, k + lane() / 8 % 2 * 8);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        if (n < from || n >= to) continue;
        Word right[4];
        if (B == ROWS) load_matrices_transposed(right, shared_address(address + n / 2 * STEP));
        else load_matrices(right, shared_address(address + n / 2 * STEP));
        multiply_add(c[n], a.word, right[0], right[1]);
        multiply_add(c[n + 1], a.word, right[2], right[3]);
    }
}
#endif

// c += a b over K columns of a, whose 16 rows begin at `row`; those from `end` on are zero.
template <RightFactor B, int K, int N, int C, int CB>
DEVICE void multiply_tiles(float (&c)[N][4], Tile<C> a, int row, Tile<CB> b, int column = 0, int end = K) {
#pragma unroll (T_IS_F32 ? 1 : 8)
    for (int k = 0; k < K; k += 16)
        if (k < end) multiply<B>(c, Left::load(a, row, k), b, column, k);
}

// c += a b, where a is sums of this warp, rounded.
template <RightFactor B, int K, int N, int C>
DEVICE void multiply_sums(float (&c)[N][4], const float (&a)[K][4], Tile<C> b) {
#pragma unroll
    for (int k = 0; k < K; k += 2) multiply<B>(c, Left::of(a[k], a[k + 1]), b, 0, k * 8);
}
