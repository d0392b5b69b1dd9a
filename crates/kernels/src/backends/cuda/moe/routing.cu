// Routing of tokens to experts: scores and the experts that they choose, the order of rows, and sums over the rows of a token.
//
// Nothing has atomics: the rows of an expert are placed by the block of that expert in the order of tokens, and sums over a token's rows
// are gathered, so results do not depend on the schedule. Trade-off: every expert's block reads the experts of all choices.

static constexpr int MAX_EXPERTS_PER_LANE = MAX_EXPERTS / 32;

// What choices compare: a value that is not a number counts as the largest.
DEVICE float comparable(float value) { return value != value ? __int_as_float(0x7f800000) : value; }

// The lower index of the largest values of all lanes; an index of `none` has no value.
DEVICE int warp_largest(float value, int index, int none) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, step);
        const int other_index = __shfl_xor_sync(0xffffffffu, index, step);
        const bool is_larger = index == none || other > value || (other == value && other_index < index);
        if (other_index != none && is_larger) value = other, index = other_index;
    }
    return index;
}

// The sum of the two largest of `size` values, at least 2. A lane's two largest, then those of pairs of lanes.
DEVICE float largest_two(const float *values, const float *correction, int size) {
    const float least = -__int_as_float(0x7f800000);
    float first = least, second = least;
    for (int i = threadIdx.x % 32; i < size; i += 32) {
        const float value = comparable(values[i] + (correction == nullptr ? 0.0f : correction[i]));
        second = fmaxf(second, fminf(first, value));
        first = fmaxf(first, value);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, first, step), next = __shfl_xor_sync(0xffffffffu, second, step);
        second = fmaxf(fminf(first, other), fmaxf(second, next));
        first = fmaxf(first, other);
    }
    return first + second;
}

// A bit for each of the `chosen` of `groups` groups of equal size, at most 32, with the largest sums of their two largest scores.
DEVICE unsigned choose_groups(const float *scores, const float *correction, int e, int groups, int chosen) {
    const int lane = threadIdx.x % 32, size = e / groups;
    float mine = 0.0f;
    for (int group = 0; group < groups; ++group) {
        const float sum = largest_two(scores + group * size, correction == nullptr ? nullptr : correction + group * size, size);
        if (lane == group) mine = comparable(sum);
    }
    unsigned allowed = 0;
    for (int i = 0; i < chosen; ++i) {
        const bool is_free = lane < groups && !(allowed >> lane & 1);
        allowed |= 1u << warp_largest(mine, is_free ? lane : 32, 32);
    }
    return allowed;
}

// scores [n, e] f32 = softmax or, if `sigmoid`, sigmoids of logits [n, e]; experts [n, k] with the k largest scores, plus correction [e] f32 if
// that is not null; weights [n, k] f32 = scale times their scores, divided by their sum plus epsilon if `normalizes`, times expert_scale [e] f32
// if that is not null. With `groups` (0: none), only experts of the `chosen_groups` groups are chosen. Of equal ones the lower expert comes
// first. One warp per token; e at most 1024.
// grid (ceil(n / 8)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) route_top_k(float *scores, int *experts, float *weights, const T *logits, const float *correction,
                                          const float *expert_scale, long long n, int e, int k, int sigmoid, int normalizes, float scale,
                                          float epsilon, int groups, int chosen_groups) {
    const int lane = threadIdx.x % 32;
    const long long token = static_cast<long long>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / 32;
    if (token >= n) return;
    const T *row = logits + token * e;
    float *s = scores + token * e;
    if (sigmoid) {
        for (int i = lane; i < e; i += 32) s[i] = 1.0f / (1.0f + expf(-to_float(row[i])));
    } else {
        float largest = -__int_as_float(0x7f800000);
        for (int i = lane; i < e; i += 32) largest = fmaxf(largest, to_float(row[i]));
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int i = lane; i < e; i += 32) {
            const float value = expf(to_float(row[i]) - largest);
            s[i] = value;
            sum += value;
        }
        sum = warp_sum(sum);
        for (int i = lane; i < e; i += 32) s[i] /= sum;
    }
    __syncwarp();
    const unsigned allowed = groups > 0 ? choose_groups(s, correction, e, groups, chosen_groups) : 0xffffffffu;
    const int group_size = groups > 0 ? e / groups : e;
    unsigned chosen = 0;  // bit i: expert lane + 32 i
    float total = 0.0f;
    for (int j = 0; j < k; ++j) {
        float best = 0.0f;
        int index = e;
        for (int i = 0; lane + 32 * i < e && i < MAX_EXPERTS_PER_LANE; ++i) {
            const int expert = lane + 32 * i;
            if (chosen >> i & 1 || !(allowed >> expert / group_size & 1)) continue;
            const float value = comparable(s[expert] + (correction == nullptr ? 0.0f : correction[expert]));
            if (index == e || value > best) best = value, index = expert;
        }
        index = warp_largest(best, index, e);
        if (index % 32 == lane) chosen |= 1u << (index / 32);
        const float score = s[index];
        total += score;
        if (lane == 0) {
            experts[token * k + j] = index;
            weights[token * k + j] = score * scale * (expert_scale == nullptr ? 1.0f : expert_scale[index]);
        }
    }
    if (!normalizes) return;
    __syncwarp();
    for (int j = lane; j < k; j += 32) weights[token * k + j] /= total + epsilon;
}

// counts [e] = how many of `choices` experts are each. grid (e), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) count_rows(int *counts, const int *experts, long long choices) {
    __shared__ int sums[8];
    const int expert = blockIdx.x;
    int count = 0;
    for (long long i = threadIdx.x; i < choices; i += 256) count += experts[i] == expert;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += sums[i];
    counts[expert] = total;
}

// Neighboring choices that a thread of place_rows looks at.
static constexpr int CHOICES = 8;

// Places the choices of each expert one after the other: rows [choices] and its inverse choices_of [choices], the token of each row, and the
// first row of each expert and the end of the last one, starts [e + 1].
// grid (e), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) place_rows(int *rows, int *choices_of, int *tokens, int *starts, const int *experts, const int *counts,
                                         long long choices, int k) {
    __shared__ int warps[8];
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int next = 0;
    for (int i = 0; i < expert; ++i) next += counts[i];
    if (threadIdx.x == 0) {
        starts[expert] = next;
        if (expert + 1 == gridDim.x) starts[gridDim.x] = next + counts[expert];
    }
    if (counts[expert] == 0) return;
    // Each thread looks at neighboring choices, so that rows are in their order.
    for (long long first = 0; first < choices; first += 256 * CHOICES) {
        const long long own = first + threadIdx.x * CHOICES;
        unsigned mine = 0;
#pragma unroll
        for (int i = 0; i < CHOICES; ++i) mine |= (own + i < choices && experts[own + i] == expert ? 1u : 0u) << i;
        int before = __popc(mine);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) warps[warp] = before;
        __syncthreads();
        int row = next + before - __popc(mine), all = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < warp) row += warps[i];
            all += warps[i];
        }
        for (; mine != 0; mine &= mine - 1, ++row) {
            const long long choice = own + __ffs(mine) - 1;
            rows[choice] = row;
            choices_of[row] = static_cast<int>(choice);
            tokens[row] = static_cast<int>(choice / k);
        }
        next += all;
        __syncthreads();
    }
}

template <int V> DEVICE void load_values(const T *from, float (&value)[V]) { Pack<T, V>::load(from).unpack(value); }
template <> DEVICE void load_values<1>(const T *from, float (&value)[1]) { value[0] = to_float(*from); }
template <int V> DEVICE void store_values(T *to, const float (&value)[V]) { Pack<T, V>::pack(value).store(to); }
template <> DEVICE void store_values<1>(T *to, const float (&value)[1]) { *to = from_float<T>(value[0]); }

// y [rows, d], y_stride apart: row tokens[r] of x [n, d]; several rows in flight.
// grid (ceil(rows / DISPATCHED_ROWS)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) dispatch_rows(T *y, const T *x, const int *tokens, int rows, int d, long long y_stride) {
    const int first = blockIdx.x * DISPATCHED_ROWS;
    const bool vectors = d % 8 == 0 && y_stride % 8 == 0 && aligned16(y, x);
    const T *from[DISPATCHED_ROWS];
#pragma unroll
    for (int r = 0; r < DISPATCHED_ROWS; ++r) from[r] = x + static_cast<long long>(tokens[min(first + r, rows - 1)]) * d;
    for (int c = threadIdx.x * 8; vectors && c < d; c += 256 * 8) {
        Pack<T, 8> values[DISPATCHED_ROWS];
#pragma unroll
        for (int r = 0; r < DISPATCHED_ROWS; ++r) values[r] = Pack<T, 8>::load(from[r] + c);
#pragma unroll
        for (int r = 0; r < DISPATCHED_ROWS; ++r)
            if (first + r < rows) values[r].store(y + (first + r) * y_stride + c);
    }
    for (int c = threadIdx.x; !vectors && c < d; c += 256)
        for (int r = 0; r < DISPATCHED_ROWS && first + r < rows; ++r) y[(first + r) * y_stride + c] = from[r][c];
}

template <int V>
DEVICE void combine_row(T *y, const T *x, const int *row, const float *weight, const T *residual, int k, int d) {
    for (int c = threadIdx.x * V; c < d; c += 256 * V) {
        float sum[V] = {}, value[V];
        for (int j = 0; j < k; ++j) {
            load_values<V>(x + static_cast<long long>(row[j]) * d + c, value);
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] += weight == nullptr ? value[i] : weight[j] * value[i];
        }
        if (residual != nullptr) {
            load_values<V>(residual + c, value);
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] += value[i];
        }
        store_values<V>(y + c, sum);
    }
}

// y [n, d] = residual (if any) + sum over j of weights [n, k] (one each, if null) times row rows[n, k] of x [n k, d], in f32 and rounded
// once. grid (n), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) combine_rows(T *y, const T *x, const int *rows, const float *weights, const T *residual, int k, int d) {
    const long long token = blockIdx.x;
    const int *row = rows + token * k;
    const float *weight = weights == nullptr ? nullptr : weights + token * k;
    const T *added = residual == nullptr ? nullptr : residual + token * d;
    if (d % 8 == 0 && aligned16(y, x, residual)) combine_row<8>(y + token * d, x, row, weight, added, k, d);
    else combine_row<1>(y + token * d, x, row, weight, added, k, d);
}

template <int V> DEVICE float combine_row_backward(T *dx, const T *y, const T *gradient, float weight, int d) {
    float dot = 0.0f;
    for (int c = threadIdx.x * V; c < d; c += 256 * V) {
        float dy[V], value[V];
        load_values<V>(gradient + c, dy);
        load_values<V>(y + c, value);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            dot += dy[i] * value[i];
            dy[i] *= weight;
        }
        store_values<V>(dx + c, dy);
    }
    return dot;
}

// For each row of y [s, d]: dx [s, d] = its weight times the gradient dy [n, d] of its token, both at strides, and d_weights [n k] f32 at its
// choice = the dot product of both. grid (s), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) combine_rows_backward(T *dx, float *d_weights, const T *y, const T *dy, const float *weights,
                                                    const int *choices_of, int k, int d, long long dx_stride, long long dy_stride) {
    const long long row = blockIdx.x;
    const int choice = choices_of[row];
    const T *gradient = dy + static_cast<long long>(choice / k) * dy_stride, *output = y + row * d;
    T *to = dx + row * dx_stride;
    const bool vectors = d % 8 == 0 && dx_stride % 8 == 0 && dy_stride % 8 == 0 && aligned16(dx, y, dy);
    const float dot = block_sum(vectors ? combine_row_backward<8>(to, output, gradient, weights[choice], d)
                                        : combine_row_backward<1>(to, output, gradient, weights[choice], d));
    if (threadIdx.x == 0) d_weights[choice] = dot;
}

// d_logits [n, e] from the gradient d_weights [n, k] f32 of the weights [n, k]: through the factor, expert_scale [e] f32 if that is not null and, if
// `normalizes`, the division by their sum; then through the softmax, or the sigmoids if `sigmoid`. One warp per token.
// grid (ceil(n / 8)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) route_backward(T *d_logits, const float *scores, const int *experts, const float *weights,
                                             const float *d_weights, const float *expert_scale, long long n, int e, int k, int sigmoid,
                                             int normalizes, float scale, float epsilon) {
    const int lane = threadIdx.x % 32;
    const long long token = static_cast<long long>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / 32;
    if (token >= n) return;
    const float *s = scores + token * e;
    const int *chosen = experts + token * k;
    const float *w = weights + token * k, *dw = d_weights + token * k;
    const auto factor = [=](int j) { return scale * (expert_scale == nullptr ? 1.0f : expert_scale[chosen[j]]); };
    float mean = 0.0f, total = 0.0f;
    for (int j = lane; j < k; j += 32) {
        mean += dw[j] * w[j];
        total += s[chosen[j]];
    }
    mean = normalizes ? warp_sum(mean) : 0.0f;
    const float inverse = normalizes ? 1.0f / (warp_sum(total) + epsilon) : 1.0f;
    float through = 0.0f;
    if (!sigmoid) {
        for (int j = lane; j < k; j += 32) through += s[chosen[j]] * (factor(j) * dw[j] - mean) * inverse;
        through = warp_sum(through);
    }
    for (int i = lane; i < e; i += 32) d_logits[token * e + i] = from_float<T>(-s[i] * through);
    __syncwarp();
    for (int j = lane; j < k; j += 32) {
        const float score = s[chosen[j]], d_score = (factor(j) * dw[j] - mean) * inverse;
        const float slope = sigmoid ? score * (1.0f - score) : score;
        d_logits[token * e + chosen[j]] = from_float<T>(slope * (d_score - through));
    }
}
