// Queries, keys and values between the GEMM that computes them side by side and attention, which reads three dense matrices:
// RMSNorm of each query and key head (optional), rotary position embedding (optional), values copied.
//
// Rotation: the halves (a, b) of the rotated columns of a head become (a cos - b sin, b cos + a sin); columns after them pass. If pairs are
// interleaved, a and b are the even and the odd of the rotated columns. Rotated queries may have a factor per token. A thread
// takes the same pairs of several heads of one token, so the tables are read once for all of them. A head is shared by a power of two
// of lanes. Half widths or strides that are no multiple of 8, or pointers off the 16-byte grid, go one value at a time.
// Trade-off: with norms the values of a head are read twice, the second time from cache.

// Heads of one thread whose loads are in flight together.
static constexpr int HEADS_AT_ONCE = 2;
static constexpr unsigned ALL_LANES = 0xffffffffu;
// Threads of a token.
static constexpr int TOKEN_THREADS = 64;

// Dense queries, keys and values, or their gradients; and a gate for each query head, which lies after the query in the joined row, or null.
struct Dense {
    T *q, *k, *v, *gate;
    int q_heads, kv_heads, head_dim, q_step;

    DEVICE int heads() const { return q_heads + 2 * kv_heads + (gate != nullptr ? q_heads : 0); }
    // The first column of a head in the joined row.
    DEVICE int column(int index) const {
        if (index < q_heads) return index * q_step;
        index -= q_heads;
        if (index < 2 * kv_heads) return q_heads * q_step + index * head_dim;
        return (index - 2 * kv_heads) * q_step + head_dim;
    }
    DEVICE T *head(long long token, int index) const {
        if (index < q_heads) return q + (token * q_heads + index) * head_dim;
        index -= q_heads;
        if (index < kv_heads) return k + (token * kv_heads + index) * head_dim;
        index -= kv_heads;
        if (index < kv_heads) return v + (token * kv_heads + index) * head_dim;
        return gate + (token * q_heads + index - kv_heads) * head_dim;
    }
};

// Norms of query and key heads; weights are null where heads are not normalized.
struct Norms {
    const float *q_weight, *k_weight;
    float q_offset, k_offset;   // added to the weights before they multiply
    float q_epsilon, k_epsilon;

    DEVICE bool any() const { return q_weight != nullptr; }
};

// The columns of `V` pairs of a head, from a pair on: V columns from `low` and V from `high`. In halves, pairs lie across the two; first the
// halves of the rotated columns, then those of the others. Interleaved, the 2 V columns are adjacent where they are rotated.
struct Pairs {
    int rotated, others;
    bool interleaved;

    DEVICE Pairs(int head_dim, int rotated, bool interleaved)
        : rotated(rotated), others(head_dim / 2 - rotated), interleaved(interleaved) {}
    DEVICE int low(int pair) const { return pair < rotated ? interleaved ? 2 * pair : pair : pair + rotated; }
    template <int V> DEVICE int high(int pair) const {
        if (pair >= rotated) return pair + rotated + others;
        return interleaved ? 2 * pair + V : pair + rotated;
    }
};

// Cosines and sines of one token's rotated pairs; null where heads are not rotated. `sign` is -1 for the inverse rotation, `query_scale` is the
// factor of the token's queries.
struct Angles {
    const float *cos, *sin;
    float sign, query_scale;
    Pairs pairs;

    DEVICE Angles(const float *cos, const float *sin, const float *query_scale, bool inverse, const Pairs &pairs,
                  long long token)
        : cos(cos ? cos + token * pairs.rotated : nullptr), sin(sin ? sin + token * pairs.rotated : nullptr),
          sign(inverse ? -1.0f : 1.0f), query_scale(query_scale ? query_scale[token] : 1.0f), pairs(pairs) {}

    // Whether the pair is rotated.
    DEVICE bool at(int pair) const { return cos != nullptr && pair < pairs.rotated; }

    template <int V> DEVICE void load(float (&c)[V], float (&s)[V], int at) const {
        if (!this->at(at)) {
#pragma unroll
            for (int i = 0; i < V; ++i) c[i] = 1.0f, s[i] = 0.0f;
            return;
        }
        Pack<float, V>::load(cos + at).unpack(c);
        Pack<float, V>::load(sin + at).unpack(s);
#pragma unroll
        for (int i = 0; i < V; ++i) s[i] *= sign;
    }
};

DEVICE void rotate(float &a, float &b, float c, float s) {
    const float first = a * c - b * s;
    b = b * c + a * s;
    a = first;
}

// Rotates the columns that `Pairs` names, and multiplies them by `factor`.
template <int V>
DEVICE void rotate(float (&a)[V], float (&b)[V], const float (&c)[V], const float (&s)[V], bool interleaved,
                   float factor) {
    bool is_done = false;
    if constexpr (V > 1) {
        if (interleaved) {
#pragma unroll
            for (int i = 0; i < V / 2; ++i) {
                rotate(a[2 * i], a[2 * i + 1], c[i], s[i]);
                rotate(b[2 * i], b[2 * i + 1], c[V / 2 + i], s[V / 2 + i]);
            }
            is_done = true;
        }
    }
    if (!is_done) {
#pragma unroll
        for (int i = 0; i < V; ++i) rotate(a[i], b[i], c[i], s[i]);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] *= factor, b[i] *= factor;
}

// How the threads of a token, and the blocks along the second axis of the grid, share its heads: `count` lanes per head.
struct Share {
    int count, lane, first_head, head_step;

    DEVICE explicit Share(int chunks) : count(1) {
        while (count < chunks && count < 32) count *= 2;
        const int heads = TOKEN_THREADS / count;
        lane = threadIdx.x % count, first_head = blockIdx.y * heads + threadIdx.x / count, head_step = gridDim.y * heads;
    }

    // Sum over the lanes of a head; all lanes of the warp must call.
    DEVICE float sum(float value) const {
        for (int step = count / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
        return value;
    }
};

// Moves one token's heads between the joined row and the dense rows and rotates queries and keys on the way.
template <int V, bool TO_DENSE>
DEVICE void rotate_token(const Dense &dense, T *joined, const Angles &angles, long long token) {
    const int chunks = dense.head_dim / 2 / V, heads = dense.heads();
    const int rotated = dense.q_heads + dense.kv_heads;
    const Share share(chunks);
    for (int chunk = share.lane; chunk < chunks; chunk += share.count) {
        const int at = chunk * V, low_at = angles.pairs.low(at), high_at = angles.pairs.high<V>(at);
        float c[V], s[V];
        angles.load<V>(c, s, at);
        for (int base = share.first_head; base < heads; base += HEADS_AT_ONCE * share.head_step) {
            Pack<T, V> low[HEADS_AT_ONCE], high[HEADS_AT_ONCE];
#pragma unroll
            for (int u = 0; u < HEADS_AT_ONCE; ++u) {
                const int head = base + u * share.head_step;
                if (head < heads) {
                    const T *from = TO_DENSE ? joined + dense.column(head) : dense.head(token, head);
                    low[u] = Pack<T, V>::load_streaming(from + low_at);
                    high[u] = Pack<T, V>::load_streaming(from + high_at);
                }
            }
#pragma unroll
            for (int u = 0; u < HEADS_AT_ONCE; ++u) {
                const int head = base + u * share.head_step;
                if (head >= heads) break;
                T *to = TO_DENSE ? dense.head(token, head) : joined + dense.column(head);
                if (head < rotated && angles.at(at)) {
                    float a[V], b[V];
                    low[u].unpack(a), high[u].unpack(b);
                    rotate<V>(a, b, c, s, angles.pairs.interleaved, head < dense.q_heads ? angles.query_scale : 1.0f);
                    low[u] = Pack<T, V>::pack(a), high[u] = Pack<T, V>::pack(b);
                }
                low[u].store(to + low_at);
                high[u].store(to + high_at);
            }
        }
    }
}

template <int V, class E>
DEVICE void load_pair(float (&a)[V], float (&b)[V], const E *from, int at, const Pairs &pairs) {
    Pack<E, V>::load(from + pairs.low(at)).unpack(a);
    Pack<E, V>::load(from + pairs.high<V>(at)).unpack(b);
}

template <int V>
DEVICE void load_factors(float (&low)[V], float (&high)[V], const float *weight, float offset, int at, const Pairs &pairs) {
    load_pair<V>(low, high, weight, at, pairs);
#pragma unroll
    for (int i = 0; i < V; ++i) low[i] += offset, high[i] += offset;
}

template <int V>
DEVICE void store_pair(T *to, const float (&a)[V], const float (&b)[V], int at, const Pairs &pairs) {
    Pack<T, V>::pack(a).store(to + pairs.low(at));
    Pack<T, V>::pack(b).store(to + pairs.high<V>(at));
}

// As rotate_token to dense rows, with queries and keys normalized first.
template <int V>
DEVICE void normalize_token(const Dense &dense, const T *joined, const Norms &norms, const Angles &angles,
                            long long token) {
    const int chunks = dense.head_dim / 2 / V, heads = dense.heads();
    const Pairs &pairs = angles.pairs;
    const Share share(chunks);
    // The same number of rounds for all lanes of a warp: they sum together.
    for (int base = 0; base < heads; base += share.head_step) {
        const int head = base + share.first_head;
        const bool inside = head < heads, is_query = head < dense.q_heads;
        const bool normed = inside && head < dense.q_heads + dense.kv_heads;
        const T *from = joined + dense.column(head);
        float squares = 0.0f;
        for (int chunk = share.lane; normed && chunk < chunks; chunk += share.count) {
            float a[V], b[V];
            load_pair<V>(a, b, from, chunk * V, pairs);
#pragma unroll
            for (int i = 0; i < V; ++i) squares += a[i] * a[i] + b[i] * b[i];
        }
        squares = share.sum(squares);
        const float epsilon = is_query ? norms.q_epsilon : norms.k_epsilon;
        const float rstd = 1.0f / sqrtf(squares / dense.head_dim + epsilon);
        const float *weight = is_query ? norms.q_weight : norms.k_weight;
        const float offset = is_query ? norms.q_offset : norms.k_offset;
        const float factor = is_query ? angles.query_scale : 1.0f;
        T *to = inside ? dense.head(token, head) : nullptr;
        for (int chunk = share.lane; inside && chunk < chunks; chunk += share.count) {
            const int at = chunk * V;
            float a[V], b[V], c[V], s[V];
            load_pair<V>(a, b, from, at, pairs);
            if (normed) {
                float low[V], high[V];
                load_factors<V>(low, high, weight, offset, at, pairs);
#pragma unroll
                for (int i = 0; i < V; ++i) a[i] *= rstd * low[i], b[i] *= rstd * high[i];
                angles.load<V>(c, s, at);
                rotate<V>(a, b, c, s, pairs.interleaved, factor);
            }
            store_pair<V>(to, a, b, at, pairs);
        }
    }
}

// Backward of normalize_token: gradients of dense heads to the gradient of the joined row. raw_q and raw_k are the token's heads
// before their norm.
template <int V>
DEVICE void normalize_token_backward(const Dense &gradients, T *joined, const T *raw_q, const T *raw_k,
                                     const Norms &norms, const Angles &angles, long long token) {
    const int width = gradients.head_dim, chunks = width / 2 / V, heads = gradients.heads();
    const Pairs &pairs = angles.pairs;
    const Share share(chunks);
    for (int base = 0; base < heads; base += share.head_step) {
        const int head = base + share.first_head;
        const bool inside = head < heads, is_query = head < gradients.q_heads;
        const bool normed = inside && head < gradients.q_heads + gradients.kv_heads;
        const T *dy = inside ? gradients.head(token, head) : nullptr;
        const T *x = is_query ? raw_q + head * gradients.q_step : raw_k + (head - gradients.q_heads) * width;
        const float *weight = is_query ? norms.q_weight : norms.k_weight;
        const float offset = is_query ? norms.q_offset : norms.k_offset;
        const float factor = is_query ? angles.query_scale : 1.0f;
        float squares = 0.0f, products = 0.0f;
        for (int chunk = share.lane; normed && chunk < chunks; chunk += share.count) {
            const int at = chunk * V;
            float a[V], b[V], c[V], s[V], x_low[V], x_high[V], low[V], high[V];
            load_pair<V>(a, b, dy, at, pairs);
            angles.load<V>(c, s, at);
            rotate<V>(a, b, c, s, pairs.interleaved, factor);
            load_pair<V>(x_low, x_high, x, at, pairs);
            load_factors<V>(low, high, weight, offset, at, pairs);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                squares += x_low[i] * x_low[i] + x_high[i] * x_high[i];
                products += x_low[i] * (a[i] * low[i]) + x_high[i] * (b[i] * high[i]);
            }
        }
        squares = share.sum(squares), products = share.sum(products);
        const float epsilon = is_query ? norms.q_epsilon : norms.k_epsilon;
        const float rstd = 1.0f / sqrtf(squares / width + epsilon), along = rstd * rstd * (products / width);
        T *to = joined + gradients.column(head);
        for (int chunk = share.lane; inside && chunk < chunks; chunk += share.count) {
            const int at = chunk * V;
            float a[V], b[V];
            load_pair<V>(a, b, dy, at, pairs);
            if (normed) {
                float c[V], s[V], x_low[V], x_high[V], low[V], high[V];
                angles.load<V>(c, s, at);
                rotate<V>(a, b, c, s, pairs.interleaved, factor);
                load_pair<V>(x_low, x_high, x, at, pairs);
                load_factors<V>(low, high, weight, offset, at, pairs);
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    a[i] = rstd * (a[i] * low[i] - x_low[i] * along);
                    b[i] = rstd * (b[i] * high[i] - x_high[i] * along);
                }
            }
            store_pair<V>(to, a, b, at, pairs);
        }
    }
}

// Dense q [n, q_heads * head_dim], k and v [n, kv_heads * head_dim] of rows `x` = [q | k | v] at x_stride (elements). With
// kv_heads 0, k and v may be null. Weights [head_dim] may be null: no norm. cos and sin [n, rotated] may be null: no rotation; then
// rotated is head_dim / 2, and otherwise at most that. query_scale [n] may be null: no factor; otherwise rotated is head_dim / 2.
// interleaved != 0 rotates neighboring columns. With a gate, queries are q_step = 2 * head_dim columns apart in x; otherwise
// q_step is head_dim and gate null. inverse != 0 rotates the other way. head_dim is even. Outputs must not overlap x.
// grid (ceil(n / 4), any), block (64, 4): four tokens per block, any other grid works too; no dynamic shared memory.
KERNEL __launch_bounds__(256)
heads_forward(T *q, T *k, T *v, const T *x, long long x_stride, const float *q_weight, const float *k_weight,
              float q_offset, float k_offset, float q_epsilon, float k_epsilon, const float *cos, const float *sin,
              const float *query_scale, int rotated, int interleaved, int inverse, long long n, int q_heads, int kv_heads,
              int head_dim, T *gate, int q_step) {
    wait_for_earlier();
    const Dense dense = {q, k, v, gate, q_heads, kv_heads, head_dim, q_step};
    const Norms norms = {q_weight, k_weight, q_offset, k_offset, q_epsilon, k_epsilon};
    const int half = head_dim / 2;
    const bool vectors = half % 8 == 0 && rotated % 8 == 0 && x_stride % 8 == 0 &&
                         aligned16(q, k, v, gate, x, q_weight, k_weight, cos, sin);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.y;
    for (long long token = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y; token < n; token += step) {
        T *row = const_cast<T *>(x) + token * x_stride;
        const Angles angles(cos, sin, query_scale, inverse != 0, Pairs(head_dim, rotated, interleaved != 0), token);
        if (norms.any()) {
            if (vectors) normalize_token<8>(dense, row, norms, angles, token);
            else normalize_token<1>(dense, row, norms, angles, token);
        } else {
            if (vectors) rotate_token<8, true>(dense, row, angles, token);
            else rotate_token<1, true>(dense, row, angles, token);
        }
    }
}

// Backward: rows `dx` = [dq | dk | dv] at dx_stride from dense gradients. raw_q and raw_k are rows before the norm, at their
// strides; null without norm.
// grid and block as for heads_forward.
KERNEL __launch_bounds__(256)
heads_backward(T *dx, long long dx_stride, const T *dq, const T *dk, const T *dv, const T *raw_q, long long raw_q_stride,
               const T *raw_k, long long raw_k_stride, const float *q_weight, const float *k_weight, float q_offset,
               float k_offset, float q_epsilon, float k_epsilon, const float *cos, const float *sin,
               const float *query_scale, int rotated, int interleaved, long long n, int q_heads, int kv_heads,
               int head_dim, T *gate, int q_step) {
    const Dense dense = {const_cast<T *>(dq), const_cast<T *>(dk), const_cast<T *>(dv), gate, q_heads, kv_heads,
                         head_dim,            q_step};
    const Norms norms = {q_weight, k_weight, q_offset, k_offset, q_epsilon, k_epsilon};
    const int half = head_dim / 2;
    const bool vectors = half % 8 == 0 && rotated % 8 == 0 && dx_stride % 8 == 0 && raw_q_stride % 8 == 0 &&
                         raw_k_stride % 8 == 0 &&
                         aligned16(dx, dq, dk, dv, gate, raw_q, raw_k, q_weight, k_weight, cos, sin);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.y;
    for (long long token = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y; token < n; token += step) {
        T *row = dx + token * dx_stride;
        const Angles angles(cos, sin, query_scale, true, Pairs(head_dim, rotated, interleaved != 0), token);
        if (norms.any()) {
            const T *q_row = raw_q + token * raw_q_stride, *k_row = raw_k + token * raw_k_stride;
            if (vectors) normalize_token_backward<8>(dense, row, q_row, k_row, norms, angles, token);
            else normalize_token_backward<1>(dense, row, q_row, k_row, norms, angles, token);
        } else {
            if (vectors) rotate_token<8, false>(dense, row, angles, token);
            else rotate_token<1, false>(dense, row, angles, token);
        }
    }
}

// Columns of a head that one lane sums.
static constexpr int LANE_COLUMNS = 16;

// partial [gridDim.x, head_dim] = sums of parts of the gradient of a norm's weight: of the dense gradients dy [n, heads * head_dim]
// of rotated heads, and the raw heads x at x_stride, head_step columns apart. cos and sin [n, rotated] may be null, and so may query_scale [n]. head_dim is even and
// at most 512.
// grid (any), block (256) exactly: a warp per head; no dynamic shared memory. Bounded to the registers of three blocks, which need no spills.
KERNEL __launch_bounds__(256, 3)
heads_norm_gradient(float *partial, const T *dy, const T *x, long long x_stride, float epsilon, const float *cos,
                    const float *sin, const float *query_scale, int rotated, int interleaved, long long n, int heads,
                    int head_dim, int head_step) {
    constexpr int WARPS = 8;
    __shared__ float sums[WARPS][32 * LANE_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[LANE_COLUMNS] = {};
    const long long step = static_cast<long long>(gridDim.x) * WARPS;
    for (long long unit = static_cast<long long>(blockIdx.x) * WARPS + warp; unit < n * heads; unit += step) {
        const long long token = unit / heads;
        const T *gradient = dy + unit * head_dim, *raw = x + token * x_stride + unit % heads * head_step;
        float squares = 0.0f;
        for (int column = lane; column < head_dim; column += 32) {
            const float value = to_float(raw[column]);
            squares += value * value;
        }
        const float rstd = 1.0f / sqrtf(warp_sum(squares) / head_dim + epsilon);
        const float factor = query_scale ? query_scale[token] : 1.0f;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; ++i) {
            const int column = lane + i * 32;
            if (column >= head_dim) break;
            float rotated_back = to_float(gradient[column]);
            if (cos != nullptr && column < 2 * rotated) {
                const bool low = interleaved ? column % 2 == 0 : column < rotated;
                const int pair = interleaved ? column / 2 : low ? column : column - rotated;
                const long long at = token * rotated + pair;
                const int partner = interleaved ? column ^ 1 : low ? column + rotated : column - rotated;
                const float other = to_float(gradient[partner]);
                rotated_back = rotated_back * cos[at] + (low ? other : -other) * sin[at];
            }
            rotated_back *= factor;
            sum[i] += rotated_back * (to_float(raw[column]) * rstd);
        }
    }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) sums[warp][lane + i * 32] = sum[i];
    __syncthreads();
    for (int column = threadIdx.x; column < head_dim; column += 256) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += sums[w][column];
        partial[static_cast<long long>(blockIdx.x) * head_dim + column] = total;
    }
}
