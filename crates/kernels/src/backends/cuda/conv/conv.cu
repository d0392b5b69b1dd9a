// Depthwise causal convolutions inside documents, forward and backward.
//
// Defined by the host: WIDTH, the tokens that a filter covers, at most 8; GATED, whether y = c * conv(b * x) (LFM2) or
// y = silu(conv(x)) (Gated DeltaNet).
//
// A thread owns two channels and walks over the tokens of its block with the last WIDTH values in registers, so each
// value is read once, and WIDTH - 1 more at the edges of a block. Documents are found once per block, by their
// boundaries. Trade-off: 4 bytes per load of a 16-bit type; a warp still reads 128 bytes at once.
//
// Launch of both: grid (ceil(d / 256), ceil(n / tokens)), block 128, no dynamic shared memory. d is even, and so are
// all strides; pointers are aligned to two values.

#ifndef WIDTH
#define WIDTH 3
#endif
#ifndef GATED
#define GATED 1
#endif

static constexpr int THREADS = 128;
// Tokens that are read before the first of them is used.
static constexpr int AHEAD = 4;

struct Pair {
    float value[2];
};

DEVICE Pair load_pair(const T *pointer) {
    Pair result;
    Pack<T, 2>::load(pointer).unpack(result.value);
    return result;
}

// Rows [n, d] with a stride.
struct Rows {
    T *pointer;
    long long stride;

    DEVICE T *at(int token, int column) const { return pointer + token * stride + column; }
    DEVICE Pair load(int token, int column) const { return load_pair(at(token, column)); }
    DEVICE void store(int token, int column, const Pair &pair) const {
        Pack<T, 2>::pack(pair.value).store(at(token, column));
    }
};

struct Inputs {
    Rows b, c, x;

    // What is convolved.
    DEVICE Pair product(int token, int column) const {
        Pair u = x.load(token, column);
#if GATED
        const Pair factor = b.load(token, column);
        for (int i = 0; i < 2; ++i) u.value[i] *= factor.value[i];
#endif
        return u;
    }
};

// The document of a token.
struct Document {
    const int *boundaries;
    int index, start, end;

    DEVICE Document(const int *boundaries, int documents, int token) : boundaries(boundaries), index(0) {
        int above = documents;
        while (above - index > 1) {
            const int middle = (index + above) / 2;
            if (boundaries[middle] <= token) index = middle;
            else above = middle;
        }
        start = boundaries[index], end = boundaries[index + 1];
    }

    DEVICE void next() { ++index, start = end, end = boundaries[index + 1]; }
};

// The last WIDTH values, the latest first.
struct Window {
    Pair value[WIDTH];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) value[i] = Pair{{0.0f, 0.0f}};
    }

    DEVICE void push(const Pair &next) {
#pragma unroll
        for (int i = WIDTH - 1; i > 0; --i) value[i] = value[i - 1];
        value[0] = next;
    }
};

// filter.value[i] meets the token i before.
DEVICE Window load_filter(const float *filters, int column) {
    Window filter;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
#pragma unroll
        for (int channel = 0; channel < 2; ++channel)
            filter.value[i].value[channel] = filters[(column + channel) * WIDTH + WIDTH - 1 - i];
    return filter;
}

DEVICE Pair convolved(const Window &filter, const Window &u) {
    Pair sum = {{0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
#pragma unroll
        for (int channel = 0; channel < 2; ++channel)
            sum.value[channel] += filter.value[i].value[channel] * u.value[i].value[channel];
    return sum;
}

// The values before `token` in its document.
DEVICE Window before(const Inputs &inputs, int start, int token, int column) {
    Window u;
    u.clear();
    for (int earlier = max(start, token - WIDTH + 1); earlier < token; ++earlier)
        u.push(inputs.product(earlier, column));
    return u;
}

DEVICE float sigmoid(float value) { return reciprocal_fast(1.0f + exp_fast(-value)); }

// y [n, d]; filters [d, WIDTH] f32; boundaries [documents + 1], of 0 to n.
KERNEL __launch_bounds__(THREADS)
    conv_forward(T *y, T *b, T *c, T *x, long long b_stride, long long c_stride, long long x_stride,
                 const float *filters, const int *boundaries, int documents, int n, int d, int tokens) {
    const int column = 2 * (blockIdx.x * THREADS + threadIdx.x);
    if (column >= d) return;
    const Inputs inputs = {{b, b_stride}, {c, c_stride}, {x, x_stride}};
    const int first = blockIdx.y * tokens, last = min(n, first + tokens);
    const Window filter = load_filter(filters, column);
    Document document(boundaries, documents, first);
    Window u = before(inputs, document.start, first, column);
    for (int from = first; from < last; from += AHEAD) {
        Pair next[AHEAD], factor[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (from + i >= last) break;
            next[i] = inputs.product(from + i, column);
#if GATED
            factor[i] = inputs.c.load(from + i, column);
#endif
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int token = from + i;
            if (token >= last) break;
            if (token == document.end) document.next(), u.clear();
            u.push(next[i]);
            Pair s = convolved(filter, u);
            for (int channel = 0; channel < 2; ++channel)
                s.value[channel] *= GATED ? factor[i].value[channel] : sigmoid(s.value[channel]);
            Rows{y, d}.store(token, column, s);
        }
    }
}

// The gradients of the inputs, at one stride, and if `partial` is not null the sums over the tokens of each block for the
// filters, [blocks, d, WIDTH] f32.
struct Backward {
    Inputs inputs;
    Rows db, dc, dx;
    Window filter;
    Window ds;
    int column, first, last;

    // Writes the gradient of what `token` convolves, whose latest reader is the first in the window.
    DEVICE void emit(int token) const {
        if (token < first || token >= last) return;
        Pair du = {{0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
#pragma unroll
            for (int channel = 0; channel < 2; ++channel)
                du.value[channel] += filter.value[i].value[channel] * ds.value[WIDTH - 1 - i].value[channel];
#if GATED
        const Pair x = inputs.x.load(token, column), b = inputs.b.load(token, column);
        Pair of_b;
        for (int channel = 0; channel < 2; ++channel) {
            of_b.value[channel] = du.value[channel] * x.value[channel];
            du.value[channel] *= b.value[channel];
        }
        db.store(token, column, of_b);
#endif
        dx.store(token, column, du);
    }

    // Ends a document: nothing reads its last tokens any more.
    DEVICE void flush(int start, int end) {
        for (int i = WIDTH - 1; i > 0; --i) {
            ds.push(Pair{{0.0f, 0.0f}});
            if (end - i >= start) emit(end - i);
        }
        ds.clear();
    }
};

KERNEL __launch_bounds__(THREADS)
    conv_backward(T *db, T *dc, T *dx, long long d_stride, float *partial, const T *dy, long long dy_stride, T *b, T *c,
                  T *x, long long b_stride, long long c_stride, long long x_stride, const float *filters,
                  const int *boundaries, int documents, int n, int d, int tokens) {
    const int column = 2 * (blockIdx.x * THREADS + threadIdx.x);
    if (column >= d) return;
    const int first = blockIdx.y * tokens, last = min(n, first + tokens);
    const Inputs inputs = {{b, b_stride}, {c, c_stride}, {x, x_stride}};
    Backward backward = {inputs,         {db, d_stride}, {dc, d_stride}, {dx, d_stride}, load_filter(filters, column),
                         load_filter(filters, column), column, first, last};
    backward.ds.clear();
    Window of_filter;
    of_filter.clear();
    Document document(boundaries, documents, first);
    Window u = before(inputs, document.start, first, column);
    const int stop = min(n, last + WIDTH - 1);
    bool is_open = stop == n;
#pragma unroll 2
    for (int token = first; token < stop; ++token) {
        if (token == document.end) {
            backward.flush(document.start, document.end);
            if (token >= last) {
                is_open = false;
                break;
            }
            document.next(), u.clear();
        }
        u.push(inputs.product(token, column));
        const Pair s = convolved(backward.filter, u);
        Pair ds = load_pair(dy + token * dy_stride + column), of_c;
#if GATED
        const Pair factor = inputs.c.load(token, column);
#endif
        for (int channel = 0; channel < 2; ++channel) {
            const float value = s.value[channel];
            of_c.value[channel] = ds.value[channel] * value;
#if GATED
            ds.value[channel] *= factor.value[channel];
#else
            const float gate = sigmoid(value);
            ds.value[channel] *= gate * (1.0f + value * (1.0f - gate));
#endif
        }
        if (token < last) {
            if (GATED) backward.dc.store(token, column, of_c);
            if (partial != nullptr)
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
#pragma unroll
                    for (int channel = 0; channel < 2; ++channel)
                        of_filter.value[i].value[channel] += ds.value[channel] * u.value[i].value[channel];
        }
        backward.ds.push(ds);
        const int done = token - WIDTH + 1;
        if (done >= document.start) backward.emit(done);
    }
    if (is_open) backward.flush(document.start, n);
    if (partial == nullptr) return;
    float *row = partial + (static_cast<long long>(blockIdx.y) * d + column) * WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i)
#pragma unroll
        for (int channel = 0; channel < 2; ++channel)
            row[channel * WIDTH + WIDTH - 1 - i] = of_filter.value[i].value[channel];
}
