// Rotary position embedding in the rotate-half form: the halves (a, b) of each head become (a cos - b sin, b cos + a
// sin).
//
// A thread takes the same pairs of several heads of one token, so that the tables are read once for all of them. Half
// widths or strides that are no multiple of 8, or pointers off the 16-byte grid, go one value at a time. Gives up: one
// launch for the queries and one for the keys.

// Heads of one thread whose loads are in flight together.
static constexpr int HEADS_AT_ONCE = 2;

template <int V>
DEVICE void rotate_token(T *y, const T *x, const float *cos, const float *sin, int heads, int head_dim, bool backward) {
    const int half = head_dim / 2, chunks = half / V;
    const int lanes = min(chunks, static_cast<int>(blockDim.x)), head_step = blockDim.x / lanes;
    const int first_head = threadIdx.x / lanes;
    if (first_head >= head_step) return;
    for (int chunk = threadIdx.x % lanes; chunk < chunks; chunk += lanes) {
        float c[V], s[V];
        Pack<float, V>::load(cos + chunk * V).unpack(c);
        Pack<float, V>::load(sin + chunk * V).unpack(s);
        if (backward) {
#pragma unroll
            for (int i = 0; i < V; ++i) s[i] = -s[i];
        }
        for (int base = first_head; base < heads; base += HEADS_AT_ONCE * head_step) {
            Pack<T, V> low[HEADS_AT_ONCE], high[HEADS_AT_ONCE];
#pragma unroll
            for (int u = 0; u < HEADS_AT_ONCE; ++u) {
                const int head = base + u * head_step;
                if (head < heads) {
                    low[u] = Pack<T, V>::load(x + head * head_dim + chunk * V);
                    high[u] = Pack<T, V>::load(x + head * head_dim + half + chunk * V);
                }
            }
#pragma unroll
            for (int u = 0; u < HEADS_AT_ONCE; ++u) {
                const int head = base + u * head_step;
                if (head >= heads) break;
                float a[V], b[V];
                low[u].unpack(a), high[u].unpack(b);
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    const float first = a[i] * c[i] - b[i] * s[i];
                    b[i] = b[i] * c[i] + a[i] * s[i];
                    a[i] = first;
                }
                Pack<T, V>::pack(a).store(y + head * head_dim + chunk * V);
                Pack<T, V>::pack(b).store(y + head * head_dim + half + chunk * V);
            }
        }
    }
}

// x, y: rows of heads * head_dim neighbouring values at row strides (elements); y may be x. cos, sin [n, head_dim / 2].
// head_dim is even. backward != 0 rotates the other way round.
// grid (ceil(n / 4)), block (64, 4): four tokens a block, any other grid works too; no dynamic shared memory.
KERNEL __launch_bounds__(256)
rotary(T *y, long long y_stride, const T *x, long long x_stride, const float *cos, const float *sin, long long n,
       int heads, int head_dim, int backward) {
    const int half = head_dim / 2;
    const bool vectors = half % 8 == 0 && y_stride % 8 == 0 && x_stride % 8 == 0 && aligned16(y, x, cos, sin);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.y;
    for (long long token = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y; token < n; token += step) {
        T *y_row = y + token * y_stride;
        const T *x_row = x + token * x_stride;
        const float *cos_row = cos + token * half, *sin_row = sin + token * half;
        if (vectors) rotate_token<8>(y_row, x_row, cos_row, sin_row, heads, head_dim, backward != 0);
        else rotate_token<1>(y_row, x_row, cos_row, sin_row, heads, head_dim, backward != 0);
    }
}
