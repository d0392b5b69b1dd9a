// Embedding lookup, and its gradient as a sum of rows by id.
//
// The gradient has no atomics: the block of the first token with an id adds up all tokens with that id, in ascending
// order, so the result does not depend on the schedule. Every block scans the ids for its own, n^2 comparisons in the
// worst case (n = 32768: a tenth of a millisecond). Trade-off: where one id makes up most tokens, one block adds most
// rows. Ids are trusted to lie inside the table, but for -1: no token was drawn, and the error is on its way.

template <int V, class E> DEVICE void embed_row(T *y, const E *row, int d, float scale) {
    for (int c = threadIdx.x; c < d / V; c += blockDim.x) {
        float value[V];
        Pack<E, V>::load(row + c * V).unpack(value);
#pragma unroll
        for (int i = 0; i < V; ++i) value[i] *= scale;
        Pack<T, V>::pack(value).store(y + c * V);
    }
}

template <class E> DEVICE void embed(T *y, const E *table, const int *ids, long long n, int d, float scale) {
    const bool vectors = d % 8 == 0 && aligned16(y, table);
    for (long long token = blockIdx.x; token < n; token += gridDim.x) {
        const E *row = table + static_cast<long long>(max(ids[token], 0)) * d;
        if (vectors) embed_row<8>(y + token * d, row, d, scale);
        else embed_row<1>(y + token * d, row, d, scale);
    }
}

// y [n, d] = rows `ids` of a table [v, d] of T times scale; with a scale of 1 bit for bit up to NaN payloads.
// grid (n), block (clamp(ceil(d / 8) rounded up to 32, 32, 256)), no dynamic shared memory.
KERNEL __launch_bounds__(256) embed_from_t(T *y, const T *table, const int *ids, long long n, int d, float scale) {
    embed(y, table, ids, n, d, scale);
}

// The same from a table of f32.
KERNEL __launch_bounds__(256) embed_from_f32(T *y, const float *table, const int *ids, long long n, int d, float scale) {
    embed(y, table, ids, n, d, scale);
}

// ------------------------------------------------------------------------------------------------------------ backward

static constexpr int SCAN_THREADS = 256;
static constexpr int SCAN_IDS = 8;                        // neighboring ids that one thread compares
static constexpr int SCAN = SCAN_THREADS * SCAN_IDS;      // ids between two barriers

// Bit k of the result: whether ids[first + k] is `id`, for positions below `end`.
DEVICE unsigned equal_ids(const int *ids, long long first, long long end, int id) {
    unsigned found = 0;
    if (first + SCAN_IDS <= end && aligned16(ids + first)) {
#pragma unroll
        for (int k = 0; k < SCAN_IDS; k += 4) {
            const int4 part = *reinterpret_cast<const int4 *>(ids + first + k);
            found |= (part.x == id) << k | (part.y == id) << (k + 1);
            found |= (part.z == id) << (k + 2) | (part.w == id) << (k + 3);
        }
    } else {
        for (int k = 0; k < SCAN_IDS && first + k < end; ++k) found |= (ids[first + k] == id) << k;
    }
    return found;
}

// Writes the positions, relative to the scanned range, of all set bits of the block in ascending order; returns how many.
DEVICE int list_matches(unsigned found, unsigned short *list) {
    __shared__ int warp_counts[SCAN_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = __popc(found);
    int before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) warp_counts[warp] = before;
    __syncthreads();
    before -= own;
    int total = 0;
#pragma unroll
    for (int w = 0; w < SCAN_THREADS / 32; ++w) {
        if (w < warp) before += warp_counts[w];
        total += warp_counts[w];
    }
    for (; found != 0; found &= found - 1) list[before++] = threadIdx.x * SCAN_IDS + __ffs(found) - 1;
    __syncthreads();
    return total;
}

// Adds the listed rows to the columns of this block, several rows in flight.
template <int V, class E>
DEVICE void add_rows(E *dtable_row, const T *dy, const unsigned short *list, int count, int d, float scale) {
    constexpr int AT_ONCE = 4;
    for (int c = blockIdx.y * SCAN_THREADS + threadIdx.x; c < d / V; c += gridDim.y * SCAN_THREADS) {
        float sum[V], value[V];
        Pack<E, V>::load(dtable_row + c * V).unpack(sum);
        int index = 0;
        for (; index + AT_ONCE <= count; index += AT_ONCE) {
            Pack<T, V> rows[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                rows[k] = Pack<T, V>::load_streaming(dy + static_cast<long long>(list[index + k]) * d + c * V);
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                rows[k].unpack(value);
#pragma unroll
                for (int i = 0; i < V; ++i) sum[i] += scale * value[i];
            }
        }
#pragma unroll 1
        for (; index < count; ++index) {
            Pack<T, V>::load_streaming(dy + static_cast<long long>(list[index]) * d + c * V).unpack(value);
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] += scale * value[i];
        }
        Pack<E, V>::pack(sum).store(dtable_row + c * V);
    }
}

template <class E>
DEVICE void add_rows_by_id(E *dtable, const int *ids, const T *dy, long long n, int d, float scale) {
    __shared__ unsigned short list[SCAN];
    const long long token = blockIdx.x;
    if (token >= n) return;
    const int id = ids[token];
    if (id < 0) return;
    const long long own_offset = threadIdx.x * SCAN_IDS;
    // The nearest earlier tokens first: in text, most repeats are near.
    for (long long chunk = token / SCAN; chunk >= 0; --chunk) {
        const unsigned found = equal_ids(ids, chunk * SCAN + own_offset, token, id);
        if (__syncthreads_or(found != 0)) return;
    }
    const bool vectors = d % 8 == 0 && aligned16(dtable, dy);
    E *dtable_row = dtable + static_cast<long long>(id) * d;
    for (long long start = token / SCAN * SCAN; start < n; start += SCAN) {
        const unsigned found = equal_ids(ids, start + own_offset, n, id);
        if (!__syncthreads_or(found != 0)) continue;
        const int count = list_matches(found, list);
        if (vectors) add_rows<8>(dtable_row, dy + start * d, list, count, d, scale);
        else add_rows<1>(dtable_row, dy + start * d, list, count, d, scale);
        __syncthreads();
    }
}

// dtable [v, d] f32 += rows of dy [n, d] times scale, summed by id; rows with an id below 0 are left out.
// grid (n, 1), or (n, up to ceil(d / 2048)) where few ids make up most tokens; block (256) exactly, no dynamic shared
// memory.
KERNEL __launch_bounds__(SCAN_THREADS, 4)
embed_backward(float *dtable, const int *ids, const T *dy, long long n, int d, float scale) {
    add_rows_by_id(dtable, ids, dy, n, d, scale);
}

// The same to a table in bf16, whose sums are rounded once per SCAN tokens that have the id.
KERNEL __launch_bounds__(SCAN_THREADS, 4)
embed_backward_to_bf16(bf16 *dtable, const int *ids, const T *dy, long long n, int d, float scale) {
    add_rows_by_id(dtable, ids, dy, n, d, scale);
}
