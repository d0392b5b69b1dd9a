// Sums, casts, row moves, copies and fills.
//
// Flat kernels walk the array in pieces that lie together, one per block and step, sixteen elements per thread, in
// vectors of 16 bytes where all arrays are f32 and of eight elements otherwise; any grid is right, and ceil(n / 4096)
// blocks of 256 threads is fast. An element whose index is beyond the last whole vector, and every element where a
// pointer is off the 16-byte grid, goes one at a time. Outputs may be inputs unless stated otherwise. Trade-off: none
// of them is fused with its neighbors.

DEVICE long long flat_thread() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE long long flat_threads() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// y[i] = function(a[i], b[i]) over n elements; b may be null, and the function then gets zeros.
template <int V, class Y, class A, class B, class F>
DEVICE void map_range(Y *y, const A *a, const B *b, long long begin, long long end, F function) {
    constexpr int AT_ONCE = V == 1 ? 2 : 16 / V;
    const long long step = static_cast<long long>(blockDim.x) * V;
    const long long first_of_thread = begin + blockIdx.x * AT_ONCE * step + threadIdx.x * V;
    for (long long base = first_of_thread; base < end; base += gridDim.x * AT_ONCE * step) {
        Pack<A, V> left[AT_ONCE];
        Pack<B, V> right[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const long long i = base + k * step;
            if (i < end) {
                left[k] = Pack<A, V>::load_streaming(a + i);
                if (b != nullptr) right[k] = Pack<B, V>::load_streaming(b + i);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const long long i = base + k * step;
            if (i >= end) break;
            float first[V], second[V];
            left[k].unpack(first);
            if (b != nullptr) right[k].unpack(second);
#pragma unroll
            for (int j = 0; j < V; ++j) first[j] = function(first[j], b != nullptr ? second[j] : 0.0f);
            Pack<Y, V>::pack(first).store(y + i);
        }
    }
}

template <class Y, class A, class B, class F> DEVICE void map(Y *y, const A *a, const B *b, long long n, F function) {
    constexpr int V = sizeof(Y) == 4 && sizeof(A) == 4 && sizeof(B) == 4 ? 4 : 8;
    const long long whole = aligned16(y, a, b) ? n / V * V : 0;
    map_range<V>(y, a, b, 0, whole, function);
    map_range<1>(y, a, b, whole, n, function);
}

// y [n] += x.   grid any, ceil(n / 4096) is fast; block (256).
KERNEL __launch_bounds__(256) accumulate_f32(float *y, const float *x, long long n) {
    map(y, y, x, n, [](float left, float right) { return left + right; });
}

// y [n] += x, added in f32 and rounded to T once.   grid any, ceil(n / 4096) is fast; block (256).
KERNEL __launch_bounds__(256) accumulate_f32_to_t(T *y, const float *x, long long n) {
    map(y, y, x, n, [](float left, float right) { return left + right; });
}

// The same from T.
KERNEL __launch_bounds__(256) accumulate_t(T *y, const T *x, long long n) {
    map(y, y, x, n, [](float left, float right) { return left + right; });
}

// y [n] = T(x * scale).   grid any, ceil(n / 4096) is fast; block (256). y must not be x unless T is f32.
KERNEL __launch_bounds__(256) cast_f32_to_t(T *y, const float *x, float scale, long long n) {
    map(y, x, static_cast<const float *>(nullptr), n, [scale](float value, float) { return value * scale; });
}

// y [n] = T(x * scale).   grid any, ceil(n / 4096) is fast; block (256). y may be x.
KERNEL __launch_bounds__(256) scaled(T *y, const T *x, float scale, long long n) {
    map(y, x, static_cast<const T *>(nullptr), n, [scale](float value, float) { return value * scale; });
}

// y [n] = f32(x).   grid any, ceil(n / 4096) is fast; block (256). y must not be x unless T is f32.
KERNEL __launch_bounds__(256) cast_t_to_f32(float *y, const T *x, long long n) {
    map(y, x, static_cast<const T *>(nullptr), n, [](float value, float) { return value; });
}

// ------------------------------------------------------------------------------------------------------------ rows

// Moves one row by a block.
template <int V> DEVICE void move_row(T *y, const T *x, int d) {
    for (int c = threadIdx.x; c < d / V; c += blockDim.x) Pack<T, V>::load_streaming(x + c * V).store(y + c * V);
}

// y [m, d] = rows `rows` of x [n, d]. y must not overlap x. Rows are trusted to lie inside x.
// grid (m), block (clamp(ceil(d / 8) rounded up to 32, 32, 256)).
KERNEL __launch_bounds__(256) gather_rows(T *y, const T *x, const int *rows, int m, int d) {
    const bool vectors = d % 8 == 0 && aligned16(y, x);
    for (long long row = blockIdx.x; row < m; row += gridDim.x) {
        const T *source = x + static_cast<long long>(rows[row]) * d;
        if (vectors) move_row<8>(y + row * d, source, d);
        else move_row<1>(y + row * d, source, d);
    }
}

// y [n, d]: row rows[i] = row i of x [m, d]; other rows of y stay as they are. y must not overlap x. Rows differ and are trusted to
// lie inside y.
// grid (m), block (clamp(ceil(d / 8) rounded up to 32, 32, 256)).
KERNEL __launch_bounds__(256) scatter_rows(T *y, const T *x, const int *rows, int m, int d) {
    const bool vectors = d % 8 == 0 && aligned16(y, x);
    for (long long row = blockIdx.x; row < m; row += gridDim.x) {
        T *target = y + static_cast<long long>(rows[row]) * d;
        if (vectors) move_row<8>(target, x + row * d, d);
        else move_row<1>(target, x + row * d, d);
    }
}

// --------------------------------------------------------------------------------------------------- copies, fills

template <class E>
DEVICE void copy_elements(void *target, const void *source, const long long (&size)[4], const long long (&stride)[4]) {
    E *y = static_cast<E *>(target);
    const E *x = static_cast<const E *>(source);
    const long long n = size[0] * size[1] * size[2] * size[3];
    for (long long i = flat_thread(); i < n; i += flat_threads()) {
        long long rest = i, offset = 0;
#pragma unroll
        for (int axis = 3; axis >= 0; --axis) {
            offset += rest % size[axis] * stride[axis];
            rest /= size[axis];
        }
        y[i] = x[offset];
    }
}

// y, contiguous, = the view of x with four axes of the given sizes and strides (elements; axis 0 is the outermost;
// unused axes have size 1). element_bytes is 1, 2, 4, 8 or 16, and both pointers are aligned to it. Not tuned.
// grid any, ceil(n / 1024) is fine; block (256).
KERNEL __launch_bounds__(256)
copy_strided(void *y, const void *x, int element_bytes, long long size0, long long size1, long long size2,
             long long size3, long long stride0, long long stride1, long long stride2, long long stride3) {
    const long long size[4] = {size0, size1, size2, size3}, stride[4] = {stride0, stride1, stride2, stride3};
    switch (element_bytes) {
    case 1: return copy_elements<unsigned char>(y, x, size, stride);
    case 2: return copy_elements<unsigned short>(y, x, size, stride);
    case 4: return copy_elements<unsigned>(y, x, size, stride);
    case 8: return copy_elements<uint2>(y, x, size, stride);
    case 16: return copy_elements<uint4>(y, x, size, stride);
    default: __trap();
    }
}

// y[row * y_stride ..] = x[row * x_stride ..] for `bytes` bytes of each of `rows` rows; strides in bytes; no overlap. A block copies a row at
// a time; narrow rows are copied by neighboring threads.
// grid any, rows is fast, or ceil(rows * bytes / 16384) where rows are narrow; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) copy_rows(unsigned char *y, long long y_stride, const unsigned char *x, long long x_stride,
                                        long long rows, long long bytes) {
    const bool vectors = bytes % 16 == 0 && y_stride % 16 == 0 && x_stride % 16 == 0 && aligned16(y, x);
    if (vectors && bytes < NARROW_BYTES) {
        const long long each = bytes / 16, count = rows * each;
        for (long long at = flat_thread(); at < count; at += flat_threads()) {
            const long long row = at / each, column = at % each * 16;
            *reinterpret_cast<uint4 *>(y + row * y_stride + column) =
                __ldcs(reinterpret_cast<const uint4 *>(x + row * x_stride + column));
        }
        return;
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        unsigned char *to = y + row * y_stride;
        const unsigned char *from = x + row * x_stride;
        if (vectors) {
            const uint4 *source = reinterpret_cast<const uint4 *>(from);
            uint4 *target = reinterpret_cast<uint4 *>(to);
            for (long long base = threadIdx.x; base < bytes / 16; base += 4 * 256) {
                uint4 part[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (base + k * 256 < bytes / 16) part[k] = __ldcs(source + base + k * 256);
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (base + k * 256 < bytes / 16) target[base + k * 256] = part[k];
            }
        } else {
            for (long long at = threadIdx.x; at < bytes; at += 256) to[at] = from[at];
        }
    }
}

// Fills n bytes whose first 16-byte boundary is found here; `word` repeats every 4 bytes.
DEVICE void fill_words(unsigned char *y, unsigned word, long long n) {
    const long long head = min(n, static_cast<long long>(-reinterpret_cast<long long>(y) & 15));
    const long long vectors = (n - head) / 16, tail = head + vectors * 16;
    uint4 *middle = reinterpret_cast<uint4 *>(y + head);
    for (long long i = flat_thread(); i < vectors; i += flat_threads()) middle[i] = make_uint4(word, word, word, word);
    for (long long i = flat_thread(); i < head; i += flat_threads()) y[i] = word >> (8 * (i % 4));
    for (long long i = tail + flat_thread(); i < n; i += flat_threads()) y[i] = word >> (8 * ((i - head) % 4));
}

// n bytes of zero.   grid any, ceil(n / 16384) is fast; block (256).
KERNEL __launch_bounds__(256) fill_zero(unsigned char *y, long long n) { fill_words(y, 0, n); }

// y [n] = value; y is aligned to 4 bytes.   grid any, ceil(n / 4096) is fast; block (256).
KERNEL __launch_bounds__(256) fill_f32(float *y, float value, long long n) {
    fill_words(reinterpret_cast<unsigned char *>(y), __float_as_uint(value), n * 4);
}

// --------------------------------------------------------------------------------------------------------- dropout

// Tokens from one row to the next in a mask.
constexpr long long DROPOUT_ROW_PITCH = 1ll << 24;

template <int V>
DEVICE void dropped_row(T *y, const T *x, long long first, int d, bool adds, unsigned threshold, float scale, unsigned long long key) {
    const int step = gridDim.y * blockDim.x * V;
    for (int c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < d; c += step) {
        float values[V], sum[V];
        Pack<T, V>::load_streaming(x + c).unpack(values);
        if (adds) Pack<T, V>::load_streaming(y + c).unpack(sum);
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const unsigned long long index = first + c + i;
            const unsigned bits = random_bits(index / 2, key) >> (index % 2 * 16) & 0xffffu;
            const float kept = bits >= threshold ? values[i] * scale : 0.0f;
            values[i] = adds ? sum[i] + kept : kept;
        }
        Pack<T, V>::pack(values).store(y + c);
    }
}

// y [n, d] = (adds ? y : 0) + x with dropped values at zero and the others times scale; rows at strides of their own. y may be x only at
// the same stride. A value's index in the mask follows from its row of the step: x begins first_token tokens into the micro-batch, whose rows
// of row_len tokens begin with the step's row first_row. With choices [n], row r belongs to token choices[r] / per_token of the micro-batch, and
// has the place of that token, per_token times as wide.
// grid (n, 1); with few rows (n, ceil(d / 4096)) fills the device; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
dropout(T *y, long long y_stride, const T *x, long long x_stride, unsigned long long key, long long first_token,
        long long first_row, long long row_len, const int *choices, int per_token, float scale, int threshold, int adds,
        long long n, int d) {
    const bool vectors = d % 8 == 0 && y_stride % 8 == 0 && x_stride % 8 == 0 && aligned16(y, x);
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        T *to = y + row * y_stride;
        const T *from = x + row * x_stride;
        const long long choice = choices != nullptr ? choices[row] : first_token + row, token = choice / per_token;
        const long long place = (first_row + token / row_len) * DROPOUT_ROW_PITCH + token % row_len;
        const long long first = (place * per_token + choice % per_token) * d;
        if (vectors) dropped_row<8>(to, from, first, d, adds != 0, threshold, scale, key);
        else dropped_row<1>(to, from, first, d, adds != 0, threshold, scale, key);
    }
}
