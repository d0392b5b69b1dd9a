// Drawing a token from each row of f32 logits by a random number, with the logarithm of its probability.
//
// One block per row, which lies in the second-level cache after the GEMM that wrote it: it is read for the maximum, for the sum of exponentials and
// 32 times for the nucleus if tokens are left out, and for the sums of 32 parts. The part that has the token is divided once more.
// Trade-off: f32 exponentials and sums of a thread, f64 sums of parts: a number within 1e-6 of a border may fall on either side.

static constexpr int THREADS = 1024;
static constexpr int WARPS = THREADS / 32;
static constexpr unsigned ALL = 0xffffffffu;

DEVICE double sum_of_warp(double value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

struct Scratch {
    float highest[WARPS];
    double sums[WARPS];
};

// Sum over the block, in every thread.
DEVICE double sum_of_block(double value, Scratch &scratch) {
    value = sum_of_warp(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch.sums[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) sum += scratch.sums[warp];
    return sum;
}

// Floats in the order of these integers.
DEVICE int ordered(float value) {
    const int bits = __float_as_int(value);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
DEVICE float of_ordered(int order) { return __int_as_float(order >= 0 ? order : order ^ 0x7fffffff); }

struct Row {
    const float *logits;
    int width;
    float cap, inverse_temperature, highest;

    DEVICE float capped(float logit) const { return cap > 0 ? cap * tanhf(logit / cap) : logit; }
    DEVICE float value(int id) const { return capped(logits[id]); }
    DEVICE float weight(float value) const { return expf((value - highest) * inverse_temperature); }

    // Calls `take` for the logits from `first` to `end` in these steps, of which the next ones are on their way meanwhile.
    template <class Take> DEVICE void each(int first, int end, int step, Take take) const {
        constexpr int AHEAD = 8;
        for (; first < end; first += AHEAD * step) {
            float logit[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) logit[k] = first + k * step < end ? logits[first + k * step] : 0.0f;
#pragma unroll
            for (int k = 0; k < AHEAD; ++k)
                if (first + k * step < end) take(logit[k]);
        }
    }

    // The sum of weights of this thread's values from `floor` on.
    DEVICE float part_from(float floor, int first, int end, int step) const {
        float sum = 0;
        each(first, end, step, [&](float logit) {
            const float value = capped(logit);
            if (value >= floor) sum += weight(value);
        });
        return sum;
    }

    // The sum of weights of all values from `floor` on.
    DEVICE double sum_from(float floor, Scratch &scratch) const {
        return sum_of_block(part_from(floor, threadIdx.x, width, THREADS), scratch);
    }
};

// ids [n], log_probs [n] = tokens drawn from logits [n, width], without gaps, by random [n]; id -1 where a logit is NaN or plus infinity, or all are
// minus infinity. cap 0: no soft cap.
// Launch: grid (n), block 1024.
KERNEL __launch_bounds__(1024) draw_tokens(int *ids, float *log_probs, const float *logits, const float *random, int width, float cap,
                                           float temperature, float top_p, float min_p) {
    __shared__ Scratch scratch;
    const float infinity = __int_as_float(0x7f800000);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Row row = {logits + static_cast<long long>(blockIdx.x) * width, width, cap, 1.0f / temperature, -infinity};
    bool wrong = false;
    float highest = -infinity;
    row.each(threadIdx.x, width, THREADS, [&](float logit) {
        wrong |= !(logit < infinity);
        highest = fmaxf(highest, row.capped(logit));
    });
    highest = warp_max(highest);
    if (lane == 0) scratch.highest[warp] = highest;
    wrong = __syncthreads_or(wrong);
    for (int other = 0; other < WARPS; ++other) highest = fmaxf(highest, scratch.highest[other]);
    if (wrong || highest == -infinity) {
        if (threadIdx.x == 0) ids[blockIdx.x] = -1, log_probs[blockIdx.x] = infinity - infinity;
        return;
    }
    row.highest = highest;
    const bool are_all_kept = !(min_p > 0) && !(top_p < 1);
    double total = are_all_kept ? 0 : row.sum_from(-infinity, scratch), left = 0;
    float floor = min_p > 0 ? highest + temperature * logf(min_p) : -infinity;
    if (top_p < 1) {
        // The largest floor above which the sum is enough, by halving.
        long long low = ordered(-infinity), high = ordered(highest);
        while (low < high) {
            const int middle = static_cast<int>((low + high + 1) >> 1);
            if (row.sum_from(of_ordered(middle), scratch) >= top_p * total) low = middle;
            else high = middle - 1;
        }
        floor = fmaxf(floor, of_ordered(static_cast<int>(low)));
    }
    // Each warp has a part of adjacent tokens: first of all, then of the part in which the number lies, or the last one that has any.
    int begin = 0, end = width;
    for (int division = 0; division < 2; ++division) {
        const int size = (end - begin + WARPS - 1) / WARPS, first = begin + warp * size;
        const double sum = sum_of_warp(row.part_from(floor, first + lane, min(first + size, end), 32));
        __syncthreads();
        if (lane == 0) scratch.sums[warp] = sum;
        __syncthreads();
        if (division == 0) {
            for (int other = 0; other < WARPS; ++other) left += scratch.sums[other];
            if (are_all_kept) total = left;
            left *= random[blockIdx.x];
        }
        int mine = 0;
        double rest = left;
        for (int other = 0; other < WARPS; ++other) {
            if (scratch.sums[other] <= 0) continue;
            mine = other, left = rest;
            if (rest < scratch.sums[other]) break;
            rest -= scratch.sums[other];
        }
        begin += mine * size, end = min(begin + size, end);
    }
    if (warp == 0) {
        int last = -1, chosen = -1;
        // The next value is on its way while the lanes add up.
        float next = begin + lane < end ? row.value(begin + lane) : -infinity;
        for (int first = begin; first < end && chosen < 0; first += 32) {
            const int id = first + lane;
            const float value = next;
            next = id + 32 < end ? row.value(id + 32) : -infinity;
            const bool is_kept = id < end && value >= floor && value > -infinity;
            float before = is_kept ? row.weight(value) : 0.0f;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float other = __shfl_up_sync(ALL, before, step);
                if (lane >= step) before += other;
            }
            const unsigned past = __ballot_sync(ALL, is_kept && before > left);
            const unsigned kept = __ballot_sync(ALL, is_kept);
            if (kept) last = first + 31 - __clz(kept);
            if (past) chosen = first + __ffs(past) - 1;
            left -= __shfl_sync(ALL, before, 31);
        }
        if (lane == 0) {
            if (chosen < 0) chosen = last;
            ids[blockIdx.x] = chosen;
            log_probs[blockIdx.x] = (row.value(chosen) - highest) * row.inverse_temperature - static_cast<float>(log(total));
        }
    }
}
