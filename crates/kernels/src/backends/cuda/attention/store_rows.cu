// Rows to given rows of two matrices: new keys and values to those of earlier tokens; and the most probable token of rows of logits.

// keys and values [.., width], without gaps: row rows[t] of each = row t of k and v.
// Launch: grid (n), block any.
KERNEL store_rows(T *keys, T *values, const T *k, const T *v, long long k_stride, long long v_stride, const int *rows,
                  int width) {
    const long long to = static_cast<long long>(rows[blockIdx.x]) * width;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        keys[to + column] = k[blockIdx.x * k_stride + column];
        values[to + column] = v[blockIdx.x * v_stride + column];
    }
}

struct Best {
    float value;
    int id;

    // The larger value, the lower id among equals.
    DEVICE void take(float other_value, int other_id) {
        if (other_value > value || (other_value == value && other_id < id)) value = other_value, id = other_id;
    }
};

// ids [n] = the first index of the largest value of each row of logits; -1 where a value is NaN or plus infinity, or all are
// minus infinity.
// Launch: grid (n), block 1024.
KERNEL __launch_bounds__(1024) most_probable(int *ids, const T *logits, long long stride, int width) {
    __shared__ Best bests[32];
    const float infinity = __int_as_float(0x7f800000);
    const T *row = logits + blockIdx.x * stride;
    Best best = {-infinity, 0x7fffffff};
    bool wrong = false;
    for (int id = threadIdx.x; id < width; id += 1024) {
        const float value = to_float(row[id]);
        wrong |= !(value < infinity);
        best.take(value, id);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        best.take(__shfl_xor_sync(0xffffffffu, best.value, step), __shfl_xor_sync(0xffffffffu, best.id, step));
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    wrong = __syncthreads_or(wrong);
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < 32; ++warp) best.take(bests[warp].value, bests[warp].id);
    ids[blockIdx.x] = wrong || best.value == -infinity ? -1 : best.id;
}
